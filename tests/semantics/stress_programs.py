"""A process under stress: `python -m tests.semantics.stress_programs SECONDS`.

Threads record, sync and read many small programs, some of which fail, while the interpreter switches threads all the
time and programs are compiled in the background. Memory that one thread frees while another looks at it ends the
process.
"""

from __future__ import annotations

import faulthandler
import gc
import random
import sys
import threading
import time

import torch
from torch import Tensor

import torch_ltc
from torch_ltc.config import settings
from torch_ltc.errors import LtcError

THREADS = 4
_KEPT: list[Tensor] = []


def _program(choose: random.Random, x: Tensor) -> Tensor:
    """A few calls on a tensor of four elements: views, writes, lists, random shapes."""
    y = x + 1
    for _ in range(choose.randint(1, 6)):
        kind = choose.randrange(6)
        if kind == 0:
            y = y * choose.random()
        elif kind == 1:
            y = y.clone()
            y[choose.randrange(4)] = choose.random()
        elif kind == 2:
            y = torch.cat([y, y])[choose.randrange(4) :][:4]
        elif kind == 3:
            y = torch.stack(torch._foreach_add([y, x], 1.0)).sum(0)
        elif kind == 4:
            y = y.view(2, 2).t().reshape(4)
        else:
            y = y - torch.ones(choose.randint(1, 40), device="ltc").sum()
    return y


def _fail(choose: random.Random) -> Tensor:
    """A program whose index is out of range."""
    rows = torch.tensor([9]).to("ltc")
    return torch.nn.functional.embedding(rows, torch.ones(choose.randint(2, 5), 2, device="ltc")) + 1


def _live(seed: int, deadline: float, counts: list[int]) -> None:
    choose = random.Random(seed)
    x = torch.zeros(4, device="ltc")
    while time.monotonic() < deadline:
        failing = choose.random() < 0.1
        try:
            y = _fail(choose) if failing else _program(choose, x)
            # What one thread makes others free.
            _KEPT.append(y)
            if len(_KEPT) > 20:
                del _KEPT[: choose.randint(1, 20)]
            end = choose.randrange(4)
            if end == 0:
                torch_ltc.sync()
            elif end == 1:
                y.sum().item()
            elif end == 2:
                torch_ltc.explain(y)
            if choose.random() < 0.02:
                gc.collect()
        except LtcError:
            # Whichever thread reads next is told of a failure.
            counts[1] += 1
        counts[0] += 1


def main() -> None:
    faulthandler.enable()
    sys.setswitchinterval(1e-5)
    deadline = time.monotonic() + float(sys.argv[1])
    counts = [[0, 0] for _ in range(THREADS)]
    with settings.scope(fallback="allow", recompiles="allow"):
        threads = [threading.Thread(target=_live, args=(seed, deadline, counts[seed])) for seed in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(1_000):
            try:
                torch_ltc.sync(wait=True)
                break
            except LtcError:
                counts[0][1] += 1
    # The device is as it should be afterwards.
    assert (torch.arange(4.0).to("ltc") * 2).tolist() == [0.0, 2.0, 4.0, 6.0]
    print(sum(count[0] for count in counts), sum(count[1] for count in counts))


if __name__ == "__main__":
    main()
