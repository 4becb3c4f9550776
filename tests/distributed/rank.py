"""One rank of a distributed test: runs cases on the CPU and on the device, and compares them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import torch_ltc
from tests.distributed.cases import CASES, UNEVEN, UNUSED, Result, enter_group
from tests.distributed.models import linear_as_one_call
from torch_ltc import events


def _differences(expected: Result, actual: Result, same: Callable[[Tensor, Tensor], bool] = torch.equal) -> list[str]:
    """The names of the tensors that are not the same, and by how much."""
    if expected.keys() != actual.keys():
        return [f"names: {sorted(expected)} and {sorted(actual)}"]
    return [
        f"{name}: {(expected[name] - actual[name]).abs().max().item() if expected[name].numel() else 0}"
        for name in expected
        if not same(expected[name], actual[name])
    ]


class Steps:
    """What the device does: its syncs, each with its reason and whether the program was known, what compiled after the
    third step's programs, the backends that ran programs, and fallbacks."""

    def __init__(self) -> None:
        self.syncs: list[tuple[str, bool]] = []
        self.fallbacks: list[str] = []
        # Programs of the steps in order: those of the first three may be compiled while later ones run.
        self._steps: list[int] = []
        self._compiled: list[int] = []
        self.backends: list[str] = []

    def note(self, event: object) -> None:
        """Listen to the device."""
        if isinstance(event, events.SyncEvent):
            if event.reason is events.SyncReason.OPTIMIZER:
                self._steps.append(event.program)
            self.syncs.append((event.reason.name, event.known))
        elif isinstance(event, events.FallbackEvent):
            self.fallbacks.append(event.op)
        elif isinstance(event, events.CompileEvent):
            self._compiled.append(event.program)
        elif isinstance(event, events.ExecuteEvent) and event.backend not in self.backends:
            self.backends.append(event.backend)


def _late_compiles(steps: Steps) -> int:
    """How many programs of steps after the third were compiled that the first three did not have."""
    late = set(steps._steps[3:]) - set(steps._steps[:3])
    return sum(program in late for program in steps._compiled)


def run_case(name: str) -> dict[str, object]:
    """The differences between the devices, and what the device did.

    To the bit: with two ranks from plain eager. DDP's buckets are in the order in which gradients become ready, and in
    a sum over more ranks the order of additions depends on a number's place in the bucket; so that with four the last
    bits are those of an eager network whose gradients become ready in the order of the device's.
    """
    case = {**CASES, **UNUSED, **UNEVEN}[name]
    plain = case("cpu")
    with linear_as_one_call():
        ordered = case("cpu") if name.startswith("ddp") else plain
    steps = Steps()
    unsubscribe = events.subscribe(steps.note)
    actual = case("ltc")
    torch_ltc.wait_device_ops()
    unsubscribe()
    exact = plain if dist.get_world_size() == 2 else ordered
    found = {
        "differences": _differences(exact, actual),
        "distances": _differences(plain, actual, torch.allclose),
        "differences_from_plain": _differences(plain, actual),
        "differences_by_order": _differences(plain, ordered),
        "late_compiles": _late_compiles(steps),
    }
    return {**found, **{key: value for key, value in vars(steps).items() if not key.startswith("_")}}


def main() -> None:
    """Run the cases that the command line names, and print what came of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    enter_group(options)
    found = {}
    for name in options.cases:
        found[name] = run_case(name)
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
