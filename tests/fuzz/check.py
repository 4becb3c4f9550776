"""Runs programs in a mode, compares with the oracle, and makes failing ones smaller."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch_ltc
from tests.fuzz import runner
from tests.fuzz.program import Mode, Program
from tests.fuzz.runner import Seen

Oracle = Callable[[Program], list[Seen]]
TOLERANCE = 2e-3


def eager(program: Program) -> list[Seen]:
    """What is seen on the CPU."""
    return runner.run(program.statements, "cpu", program.variants, program.seed, program.threads)


# What makes a large difference of a small one: bits of numbers, and choices.
_MAGNIFIES = re.compile(
    r"view\(torch\.|\.(?:round|floor|frac|sign|argsort|argmax|argmin|histc|bucketize|searchsorted)\("
    # Before a batch norm a bias has no gradient but rounding; a zero that is near only times infinity is no NaN.
    r"|nn\.(?:Linear|Conv\dd)\([^\n]*?\), nn\.BatchNorm|float\('inf'\)"
    # Roundings of half precision that go round in a training.
    r"|autocast.*\n(?:.*\n)*.*backward"
)
# Signs that are all equal have no gradient but rounding before a norm, nor have weights of a pooled convolution whose
# inputs add up to zero; optimizers that divide by the size of gradients make steps of it.
_MAGNIFY_TOGETHER = re.compile(
    r"(?:Layer|Group)Norm\([\s\S]*\.abs\(\)\.mean\(|AdaptiveAvgPool1d\([\s\S]*linspace\(-1, 1,[\s\S]*optim\.(?!SGD)"
)


def check(program: Program, mode: Mode, oracle: Oracle = eager) -> str | None:
    """How the program differs from the oracle in the mode that is entered; None when it does not. Raises Skip."""
    magnifies = any(map(_MAGNIFIES.search, program.statements)) or _MAGNIFY_TOGETHER.search(program.lines())
    if not mode.equal and magnifies:
        raise runner.Skip("results that are close may be told apart")
    theirs = oracle(program)
    ours = runner.run(program.statements, "ltc", program.variants, program.seed, program.threads)
    for place, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        found = runner.compare(left, right, program.statements, 0.0 if mode.equal else TOLERANCE)
        if found:
            return f"execution {place}: {found}"
    return None


def failure_kind(found: str) -> str:
    """The part of a difference that must stay when the program is made smaller."""
    what = found.split(": ", 1)[1]
    return what.split(":")[0].split(" ")[0]


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with less, the largest steps first."""
    count = len(program.statements)
    step = count // 2
    while step >= 1:
        for begin in range(count - step, -1, -step):
            rest = program.statements[:begin] + program.statements[begin + step :]
            yield replace(program, statements=rest)
        step //= 2
    for place in range(len(program.variants)):
        if len(program.variants) > 1:
            yield replace(program, variants=program.variants[:place] + program.variants[place + 1 :])


def shrink(program: Program, found: str, mode: Mode, oracle: Oracle = eager, most: int = 300) -> tuple[Program, str]:
    """The smallest program that was found to fail in the same way, each try with empty caches."""
    kind, tries = failure_kind(found), 0
    smaller: Program | None = program
    while smaller is not None and tries < most:
        program, smaller = smaller, None
        for candidate in _smaller(program):
            tries += 1
            torch_ltc.ir_cache.reset()
            try:
                now = check(candidate, mode, oracle)
            except runner.Skip:
                continue
            if now and failure_kind(now) == kind:
                smaller, found = candidate, now
                break
            if tries >= most:
                break
    return program, found
