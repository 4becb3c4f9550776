"""Programs in files and side by side, to the letter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_ltc
from torch_ltc import debug
from torch_ltc.compile.program_cache import fingerprint
from torch_ltc.config import settings
from torch_ltc.debug.dump import diff, known_entry
from torch_ltc.errors import LtcError, LtcWarning
from torch_ltc.events import SyncEvent, subscribe
from torch_ltc.execute.pending import pending_program
from torch_ltc.program.text import program_text
from torch_ltc.source import UNKNOWN


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


@pytest.fixture
def synced() -> Iterator[list[int]]:
    """Numbers of the programs that are synced meanwhile."""
    found: list[int] = []

    def note(event: object) -> None:
        assert isinstance(event, SyncEvent)
        found.append(event.program)

    end = subscribe(note, SyncEvent)
    yield found
    end()


def step(x: torch.Tensor) -> torch.Tensor:
    y = x.relu()
    torch_ltc.sync(wait=True)
    return y


def test_the_file_of_synced_programs_is_laid_out_as_the_original_lays_it_out(tmp_path: Path, synced: list[int]) -> None:
    path = tmp_path / "programs.txt"
    # A size that no other test has: a program keeps the lines that recorded it first.
    x = torch.ones(1013).to("ltc")
    torch_ltc.sync(wait=True)
    synced.clear()
    with settings.scope(save_tensors_file=str(path)):
        kept = step(x)
    text = path.read_text()
    here = re.escape(__file__)
    head, stack, rest = re.split(r"((?:  \S+ \(.*:\d+\)\n)+)", text, maxsplit=1)
    assert head == "[ScheduleSyncTensorsGraph]\nPython Stacktrace:\n"
    frames = stack.splitlines()
    name = "test_the_file_of_synced_programs_is_laid_out_as_the_original_lays_it_out"
    assert re.fullmatch(rf"  step \({here}:\d+\)", frames[0]), "the innermost frame comes first"
    assert re.fullmatch(rf"  {name} \({here}:\d+\)", frames[1])
    line = re.search(r"test_dump\.py:(\d+) step", rest)
    assert line is not None
    assert rest == (
        f"\nHashes: ({fingerprint(known_entry(synced[0]).program).hex()})\n"
        "\n"
        "## BEGIN_GRAPH\n"
        "IR {\n"
        "  %0: float32[1013] = input(buffer=0)\n"
        f"  %1: float32[1013] ROOT=0 = aten::relu(%0)  # {line[0]}\n"
        "}\n"
        "\n"
        "## END_GRAPH\n"
        "\n"
        "\n"
    )
    assert kept.sum().item() == 1013


def test_the_hash_does_not_depend_on_the_users_lines() -> None:
    program = pending_program([torch.ones(2).to("ltc").relu()])
    others = [replace(item, source=UNKNOWN) for item in program.instructions]
    assert program_text(replace(program, instructions=tuple(others))) != program_text(program)
    assert fingerprint(replace(program, instructions=tuple(others))) == fingerprint(program)


def test_a_file_that_cannot_be_written_is_a_warning_once(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "programs.txt"
    x = torch.ones(2).to("ltc")
    with settings.scope(save_tensors_file=str(path)):
        with pytest.warns(LtcWarning) as told:
            first = step(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = step(first)
    assert [str(warning.message) for warning in told] == [
        f"programs cannot be written to {path}: No such file or directory (this is said once)\n"
        "  try: set LTC_SAVE_TENSORS_FILE or settings.save_tensors_file to a file in a folder that exists"
    ]
    assert told[0].filename == __file__
    assert second.tolist() == [1.0, 1.0]


def test_diff_takes_numbers_programs_and_pending_tensors(synced: list[int]) -> None:
    x = torch.ones(2).to("ltc")
    torch_ltc.sync(wait=True)
    synced.clear()
    y = x.relu().neg()
    torch_ltc.sync(wait=True)
    (number,) = synced
    z = x.relu().abs()
    program = known_entry(number).program
    wanted = (
        "2 lines differ: 1 removed (aten::neg), 1 added (aten::abs)\n"
        f"--- program {number}\n"
        "+++ program N\n"
        "@@ -1,3 +1,3 @@\n"
        "  %0: float32[2] = input(buffer=0)\n"
        "  %1: float32[2] = aten::relu(%0)\n"
        "- %2': float32[2] ROOT=0 = aten::neg(%1)\n"
        "+ %2: float32[2] ROOT=0 = aten::abs(%1)\n"
    )
    for first in (number, program):
        text = diff(first, z, sources="none")
        assert re.sub(r"(\+\+\+ program) \d+", r"\1 N", text) == wanted
    assert diff(number, number).startswith("no difference in 3 lines")
    assert y.tolist() == [-1.0, -1.0]


def test_an_unknown_program_says_what_to_do() -> None:
    with pytest.raises(LtcError) as caught:
        known_entry(-5)
    assert str(caught.value) == (
        "program -5 is not known: it was never synced in this process, or it was dropped to make room\n"
        "  try: torch_ltc.debug.dump_ir([tensor]) shows what is pending; the setting tree_bound says how much is kept"
    )


def test_a_form_that_does_not_exist_is_refused() -> None:
    x = torch.ones(2).to("ltc").relu()
    with pytest.raises(ValueError, match="there is no program format 'html'; use 'text', 'dot' or 'backend'"):
        debug.dump_ir([x], "html")
