"""Programs as text, to the letter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import torch_ltc
from torch_ltc.execute.pending import pending_program
from torch_ltc.program.instruction import Call, Program, Update
from torch_ltc.program.text import Sources, operand_text, program_dot, program_lines, program_text
from torch_ltc.source import UNKNOWN, Source


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def text_of(*tensors: torch.Tensor) -> str:
    """The listing, without source lines."""
    lines = program_text(pending_program(tensors)).splitlines()
    return "\n".join(line.split("  # ")[0] for line in lines)


def test_views_in_place_calls_numbers_and_outputs() -> None:
    x = torch.ones(2, 3).to("ltc")
    view = x[1]
    view.mul_(2.5)
    total = torch.cat([view, x[0]]) + 1
    assert text_of(total, view) == (
        "IR {\n"
        "  %0: float32[2,3] = input(buffer=0)\n"
        "  %1: float32[3] stride=(1) offset=3 view ROOT=1 = aten::select.int(%0, 0, 1)\n"
        "  aten::mul_.Tensor(%1, $0:float) writes %1\n"
        "  %2: float32[3] view = aten::select.int(%0, 0, 0)\n"
        "  %3: float32[6] = aten::cat([%1, %2], 0)\n"
        "  %4: float32[6] ROOT=0 = aten::add.Tensor(%3, $1:int, alpha=1)\n"
        "}"
    )


def test_several_results_and_random_draws() -> None:
    x = torch.ones(4).to("ltc")
    values, places = x.topk(2)
    noise = torch.empty(4, device="ltc").uniform_(0.0, 2.0)
    assert text_of(values, places, noise) == (
        "IR {\n"
        "  %0: float32[4] = input(buffer=0)\n"
        "  %1: float32[2] ROOT=0, %2: int64[2] ROOT=1 = aten::topk(%0, 2, -1, True, True)\n"
        "  %3: float32[4] ROOT=2 = aten::empty_strided([4], [1], dtype=torch.float32, device=device)\n"
        "  aten::uniform_(%3, $0:float, $1:float, generator=generator) writes %3\n"
        "}"
    )


def test_statistics_that_the_schema_is_silent_about_are_marked_as_written() -> None:
    x, mean, variance = (torch.ones(2, 2).to("ltc"), torch.zeros(2).to("ltc"), torch.ones(2).to("ltc"))
    y = F.batch_norm(x, mean, variance, training=True)
    (call,) = [line for line in text_of(y).splitlines() if "batch_norm(" in line]
    assert call.endswith(") writes %1, %2")


def with_sources(program: Program, *sources: Source) -> Program:
    """The program with these sources for its calls."""
    given = iter(sources)
    made = [replace(i, source=next(given)) if isinstance(i, Call) else i for i in program.instructions]
    return replace(program, instructions=tuple(made))


FORWARD = Source("/home/me/net.py", 12, "Net.forward", module="Net.layers.0")
BACKWARD = Source("/home/me/train.py", 30, "main", backward=True, module=FORWARD.module, forward=FORWARD)
ELSEWHERE = Source("/home/me/train.py", 31, "main", backward=True)


def small_program() -> Program:
    torch_ltc.sync(wait=True)
    x = torch.ones(2).to("ltc")
    y = x.relu().neg().sgn()
    return with_sources(pending_program([y]), FORWARD, BACKWARD, ELSEWHERE)


@pytest.mark.parametrize(
    ("sources", "lines"),
    [
        (
            "short",
            [
                "  # net.py:12 Net.forward [Net.layers.0]",
                "  # train.py:30 main, backward of net.py:12 Net.forward [Net.layers.0]",
                "  # train.py:31 main, backward",
            ],
        ),
        (
            "full",
            [
                "  # /home/me/net.py:12 Net.forward [Net.layers.0]",
                "  # /home/me/train.py:30 main, backward of /home/me/net.py:12 Net.forward [Net.layers.0]",
                "  # /home/me/train.py:31 main, backward",
            ],
        ),
        ("none", ["", "", ""]),
    ],
)
def test_every_call_names_the_users_line_module_and_forward_line(sources: Sources, lines: list[str]) -> None:
    assert program_text(small_program(), sources) == (
        "IR {\n"
        "  %0: float32[2] = input(buffer=0)\n"
        f"  %1: float32[2] = aten::relu(%0){lines[0]}\n"
        f"  %2: float32[2] = aten::neg(%1){lines[1]}\n"
        f"  %3: float32[2] ROOT=0 = aten::sgn(%2){lines[2]}\n"
        "}\n"
    )


def test_lines_come_with_their_sources() -> None:
    lines = program_lines(small_program())
    assert lines[1:] == [
        ("%1: float32[2] = aten::relu(%0)", FORWARD),
        ("%2: float32[2] = aten::neg(%1)", BACKWARD),
        ("%3: float32[2] ROOT=0 = aten::sgn(%2)", ELSEWHERE),
    ]
    assert lines[0][0] == "%0: float32[2] = input(buffer=0)"


def test_new_values_of_inputs_are_lines_too() -> None:
    program = replace(small_program(), updates=(Update(0, 3),))
    assert program_lines(program)[-1] == ("input 0 becomes %3", UNKNOWN)
    assert program_text(program).endswith("\n  input 0 becomes %3\n}\n")


def test_arguments_are_the_same_text_in_every_process() -> None:
    class Odd:
        pass

    assert operand_text("a\n'b'") == "\"a\\n'b'\""
    assert operand_text([None, torch.float64, (1, 2.5), Odd()]) == "[None, torch.float64, [1, 2.5], <Odd>]"


_SCRIPT = """
import torch
import torch_ltc
from torch_ltc.program.text import program_dot, program_text
from torch_ltc.execute.pending import pending_program

layer = torch.nn.Linear(3, 4).to("ltc")
torch_ltc.sync(wait=True)
y = torch.nn.functional.dropout(layer(torch.ones(2, 3).to("ltc"))).mul_(3)
program = pending_program([y])
print(program_text(program, "full"), program_dot(program))
"""


def test_two_processes_write_the_same_text(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    seen = [
        subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            check=True,
            timeout=90,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert seen[0] == seen[1]
    assert "aten::linear" in seen[0]
    assert "0x" not in seen[0]


_STYLE = '  node [shape="box", style="rounded,filled", fontname="monospace"]\n'


def test_dot_graph_has_a_node_per_instruction_and_an_edge_per_operand() -> None:
    x = torch.ones(2, 2).to("ltc")
    y = x @ x.t()
    program = with_sources(pending_program([y]), UNKNOWN, UNKNOWN)
    assert program_dot(program) == (
        "digraph G {\n"
        + _STYLE
        + '  node0 [label="input 0\\n%0: float32[2,2]", fillcolor="#cfe2f3"]\n'
        + '  node1 [label="aten::t\\n%1: float32[2,2] stride=(1,2) view", fillcolor="#eeeeee", tooltip="aten::t(%0)"]\n'
        + '  node2 [label="aten::mm\\n%2: float32[2,2]\\nROOT=0", fillcolor="#ffffff", penwidth=3, '
        + 'tooltip="aten::mm(%0, %1)"]\n'
        + '  node0 -> node1 [label="i=0"]\n'
        + '  node0 -> node2 [label="i=0"]\n'
        + '  node1 -> node2 [label="i=1"]\n'
        + "}\n"
    )


def test_dot_edges_lead_from_a_write_to_what_reads_the_memory_later() -> None:
    x = torch.ones(2, 2).to("ltc")
    x[0].mul_(2)
    y = x + 1
    edges = [line.strip() for line in program_dot(pending_program([y])).splitlines() if "->" in line]
    assert edges == [
        'node0 -> node1 [label="i=0"]',
        'node1 -> node2 [label="i=0"]',
        'node0 -> node3 [label="i=0"]',
        'node2 -> node3 [style="dashed"]',
    ]


def test_dot_clusters_are_modules_inside_each_other() -> None:
    assert program_dot(small_program()).splitlines()[2:16] == [
        '  node0 [label="input 0\\n%0: float32[2]", fillcolor="#cfe2f3"]',
        '  node3 [label="aten::sgn\\n%3: float32[2]\\nROOT=0\\ntrain.py:31 main, backward", fillcolor="#ffffff",'
        ' penwidth=3, tooltip="aten::sgn(%2)"]',
        '  subgraph "cluster Net" {',
        '    label="Net"',
        '    subgraph "cluster Net.layers" {',
        '      label="Net.layers"',
        '      subgraph "cluster Net.layers.0" {',
        '        label="Net.layers.0"',
        '        node1 [label="aten::relu\\n%1: float32[2]\\nnet.py:12 Net.forward [Net.layers.0]",'
        ' fillcolor="#ffffff", tooltip="aten::relu(%0)"]',
        '        node2 [label="aten::neg\\n%2: float32[2]\\ntrain.py:30 main, backward of net.py:12 '
        'Net.forward [Net.layers.0]", fillcolor="#ffffff", tooltip="aten::neg(%1)"]',
        "      }",
        "    }",
        "  }",
        '  node0 -> node1 [label="i=0"]',
    ]


def test_quotes_and_backslashes_cannot_end_a_dot_label() -> None:
    x = torch.ones(2).to("ltc")
    odd = Source('C:\\new "ones"', 3, "<module>")
    text = program_dot(with_sources(pending_program([x.relu()]), odd))
    assert 'C:\\\\new \\"ones\\":3"' in text


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_takes_the_dot_graph() -> None:
    x = torch.ones(2).to("ltc")
    odd = Source('C:\\new "ones"', 3, "<module>", module='Net."x"')
    program = with_sources(pending_program([x.relu()]), odd)
    for made in (program, small_program()):
        drawn = subprocess.run(["dot", "-Tsvg"], input=program_dot(made), capture_output=True, text=True, timeout=60)
        assert (drawn.returncode, drawn.stderr) == (0, "")
        assert drawn.stdout.count('class="node"') == len(made.instructions)


def test_an_empty_program_renders() -> None:
    assert program_text(pending_program([])) == "IR {\n\n}\n"
