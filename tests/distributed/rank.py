"""One rank of a distributed test: runs cases on the CPU and on the device, and compares them."""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist

import torch_ltc
from tests.distributed.cases import CASES, UNEVEN, UNUSED, Result, enter_group
from torch_ltc import events


def _differences(expected: Result, actual: Result) -> list[str]:
    """The names of the tensors that are not equal to the bit.

    With more than two ranks the order of a sum depends on the place of a number in DDP's bucket. Buckets are made in
    the order in which gradients become ready, and a layer with a bias, which is one call on the device, gives its two
    in another one.
    """
    exact = dist.get_world_size() == 2
    if expected.keys() != actual.keys():
        return [f"names: {sorted(expected)} and {sorted(actual)}"]
    return [
        f"{name}: {(expected[name] - actual[name]).abs().max().item() if expected[name].numel() else 0}"
        for name in expected
        if not (torch.equal if exact else torch.allclose)(expected[name], actual[name])
    ]


class Steps:
    """What the device does: its syncs, each with its reason and whether the program was known, and fallbacks."""

    def __init__(self) -> None:
        self.syncs: list[tuple[str, bool]] = []
        self.fallbacks: list[str] = []

    def note(self, event: object) -> None:
        """Listen to the device."""
        if isinstance(event, events.SyncEvent):
            self.syncs.append((event.reason.name, event.known))
        elif isinstance(event, events.FallbackEvent):
            self.fallbacks.append(event.op)


def run_case(name: str) -> dict[str, object]:
    """The differences between the devices, and what the device did."""
    case = {**CASES, **UNUSED, **UNEVEN}[name]
    expected = case("cpu")
    steps = Steps()
    unsubscribe = events.subscribe(steps.note)
    actual = case("ltc")
    torch_ltc.wait_device_ops()
    unsubscribe()
    return {"differences": _differences(expected, actual), **vars(steps)}


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
