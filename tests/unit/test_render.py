"""Programs as text, to the letter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import torch_ltc
from torch_ltc.program.render import program_dot, program_text
from torch_ltc.runtime.pending import pending_program


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
        "  aten::mul_.Tensor(%1, $0:float)\n"
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
        "  aten::uniform_(%3, $0:float, $1:float, generator=generator)\n"
        "}"
    )


def test_every_call_names_the_users_file_and_line() -> None:
    x = torch.ones(2).to("ltc")
    y = F.gelu(x)
    (call,) = [line for line in program_text(pending_program([y])).splitlines() if "aten::gelu" in line]
    assert call.split("  # ")[1].startswith("test_render.py:")


def test_dot_graph_has_a_node_per_instruction_and_an_edge_per_operand() -> None:
    x = torch.ones(2, 2).to("ltc")
    y = x @ x.t()
    assert program_dot(pending_program([y])) == (
        "digraph G {\n"
        '  node0 [label="input 0\\nfloat32[2,2]"]\n'
        '  node1 [label="aten::t\\nfloat32[2,2] stride=(1,2)"]\n'
        '  node2 [label="aten::mm\\nfloat32[2,2]\\nROOT=0"]\n'
        '  node0 -> node1 [label="i=0"]\n'
        '  node0 -> node2 [label="i=0"]\n'
        '  node1 -> node2 [label="i=1"]\n'
        "}\n"
    )


def test_an_empty_program_renders() -> None:
    assert program_text(pending_program([])) == "IR {\n\n}\n"
