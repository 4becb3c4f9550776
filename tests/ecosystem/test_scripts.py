"""Scripts that others have written, from a folder of the reader's: `--nanogpt DIR`, `--examples DIR`.

Each runs plainly on the CPU, unmodified through `ltc run`, and, where it takes a device, with `ltc`: what it prints
must be the same.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ecosystem import support
from tests.ecosystem.example_scripts import SCRIPTS, Script, is_there, repeatable

LTC = ("-m", "torch_ltc", "run", "--quiet")
NANOGPT = [
    "--dataset=tiny",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=16",
    "--batch_size=4",
    "--max_iters=8",
    "--lr_decay_iters=8",
    "--warmup_iters=2",
    "--eval_iters=2",
    "--eval_interval=4",
    "--log_interval=2",
    "--gradient_accumulation_steps=2",
    "--dropout=0.0",
    "--dtype=float32",
    "--always_save_checkpoint=False",
    "--compile=False",
]
# Durations differ.
VARYING = re.compile(
    r"time.*|ms/batch[ \d.]*|(Time|Data) +[\d.]+ \( *[\d.]+\)|\([\d.]+s\)|^\w+ \w+ [\d :]+\t|saved at saved.*"
)
# Lines that name the device or the arguments, or say whether data are there.
OF_DEVICE = re.compile(r"Using |using CPU|WARNING: acc|Namespace\(|Downloading|Dataset already")


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the folder that the option of the test names."""
    source = request.config.getoption(request.param, None)
    if source is None:
        pytest.skip(f"{request.param} is not given")
    return Path(shutil.copytree(source, tmp_path / "copy"))


def printed(folder: Path, *arguments: str) -> list[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LTC_")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=500, check=False,
        env={**variables, "LTC_CACHE_DIR": "off"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [VARYING.sub("", line) for line in done.stdout.splitlines() if not OF_DEVICE.match(line)]


@pytest.mark.parametrize("copied", ["--nanogpt"], indirect=True)
def test_nanogpt_trains_in_all_ways(copied: Path) -> None:
    data = copied / "data" / "tiny"
    data.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(0)
    for name, count in (("train", 20_000), ("val", 4_000)):
        (data / f"{name}.bin").write_bytes(b"".join(struct.pack("<H", numbers.randrange(50)) for _ in range(count)))
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50}))

    def losses(*arguments: str) -> list[str]:
        return [line for line in printed(copied, *arguments, *NANOGPT) if line.startswith(("step", "iter"))]

    expected = losses("train.py", "--device=cpu")
    assert len(expected) == 8
    assert losses(*LTC, "train.py", "--device=cpu") == expected
    assert losses(*LTC, "--map-cuda", "train.py", "--device=cuda") == expected
    assert losses("train.py", "--device=ltc") == expected


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
@pytest.mark.parametrize("copied", ["--examples"], indirect=True)
def test_examples_print_the_same_in_all_ways(copied: Path, script: Script) -> None:
    if missing := [library for library in script.needs if not is_there(library)]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    folder = copied / script.folder
    script.prepare(folder)
    if script.first:
        printed(folder, *script.first)
    (folder / "repeatable.py").write_text(repeatable(script))

    def run(*before: str, device: str, arguments: tuple[str, ...]) -> tuple[list[str | bytes], dict[str, float]]:
        options = (device, str(script.lines), script.file)
        lines = printed(folder, *before, "repeatable.py", *options, *script.arguments, *arguments)
        written = [(folder / name).read_bytes() for name in script.writes]
        for name in script.writes:
            (folder / name).unlink()
        return [*lines, *written], json.loads((folder / "figures.json").read_text())

    expected, cpu = run(device="cpu", arguments=script.on_cpu)
    assert any(expected)
    found, through = run(*LTC, device="", arguments=script.on_cpu)
    assert found == expected
    if script.on_accelerator is not None:
        found, through = run(device="ltc", arguments=script.on_accelerator)
        assert found == expected
    programs, compiles, fallbacks = (int(through[name]) for name in ("programs", "compiles", "fallbacks"))
    assert programs, "nothing ran on the device"
    row = support.Figures("pytorch/examples", str(script), programs, compiles, fallbacks, cpu["s"], through["s"])
    support.measured.append(row)
