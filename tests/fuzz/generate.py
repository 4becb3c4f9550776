"""Makes random programs. Each candidate statement is run on the CPU first, so that most are valid.

Sizes and numbers come from small sets: shapes repeat, and what was recorded for one program serves the next.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import templates
from tests.fuzz.program import Program
from tests.fuzz.runner import compiled, namespace, reset_switches
from tests.fuzz.trainings import replayed, training

SIZES = (0, 1, 2, 3, 4, 5)
FLOATS = (0.5, 1.0, -1.5, 2.0, 0.0, 3.25, 1e-3)
MOST_ELEMENTS = 4096


class Maker:
    """A program in the making: its statements so far, and what they make on the CPU."""

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(f"{kind}-{seed}")
        self.statements: list[str] = []
        self.variant: dict[str, Any] = {
            **{f"n{place}": self.random.choice(FLOATS) for place in range(3)},
            **{f"k{place}": self.random.randrange(3) for place in range(2)},
            **dict(zip("ABC", (self._size(), self._size(), self._size()))),
        }
        self.env = namespace("cpu", self.variant, [])
        self.count = 0

    def _size(self) -> int:
        return self.random.choices(SIZES, (1, 2, 4, 4, 4, 2))[0]

    def tensors(self, fits: Callable[[Tensor], bool] = lambda tensor: True) -> list[str]:
        """The names of live tensors that fit."""
        return [
            name for name, value in self.env.items() if name[0] == "t" and isinstance(value, Tensor) and fits(value)
        ]

    def pick(self, fits: Callable[[Tensor], bool] = lambda tensor: True) -> str:
        """A live tensor that fits, later ones rather than early ones; any if none does."""
        names = self.tensors(fits) or self.tensors()
        if not names:
            self.add(f"{self.new()} = torch.arange(12.0, device=D).view(3, 4)")
            names = self.tensors()
        return names[-1] if self.random.random() < 0.35 else self.random.choice(names)

    def number(self) -> str:
        """A number: mostly one that varies between executions."""
        if self.random.random() < 0.5:
            return f"n{self.random.randrange(3)}"
        return repr(self.random.choice((*FLOATS, 2, 3, -1)))

    def dim(self, tensor: Tensor) -> str:
        """A dimension of the tensor, now and then one that it has not."""
        if tensor.dim() == 0 or self.random.random() < 0.02:
            return str(self.random.choice((0, -1, 3)))
        return str(self.random.randrange(-tensor.dim(), tensor.dim()))

    def index(self, tensor: Tensor) -> str:
        """An index expression: integers, slices, None, Ellipsis, masks, index tensors."""
        parts: list[str] = []
        choose = self.random
        for size in tensor.shape[: choose.randint(0, max(tensor.dim(), 1))]:
            kind = choose.random()
            if kind < 0.3 and size:
                parts.append(choose.choice((str(choose.randrange(-size, size)), f"k0 % {size}")))
            elif kind < 0.75:
                parts.append(
                    choose.choice((":", "1:", ":-1", "::2", ":k0", "k1:", "0:0" if choose.random() < 0.2 else ":2"))
                )
            elif kind < 0.83:
                parts.append("None")
            elif kind < 0.9 and size:
                values = [choose.randrange(size) for _ in range(choose.randint(1, 3))]
                parts.append(f"torch.tensor({values}, device=D)")
            else:
                parts.append("...") if "..." not in parts else parts.append(":")
        if not parts:
            return choose.choice(("...", "None", "()"))
        return ", ".join(parts)

    def fill(self, template: str) -> str:
        """The template with names and numbers in its places."""
        parts: dict[str, str] = {}
        values = self.env
        if "{f}" in template:
            parts["f"] = self.pick(lambda tensor: tensor.is_floating_point())
        if "as_strided" in template:
            # Results of some kernels have more memory in eager than they show.
            parts["x"] = self.pick(lambda tensor: tensor.numel() > 3)
        elif "{x}" in template:
            parts["x"] = self.pick()
        first = values.get(parts.get("x") or parts.get("f") or "")
        if first is None:
            first = torch.ones(())
        if "{y}" in template:
            parts["y"] = self.pick(lambda tensor: _broadcasts(tensor, first))
        if "{g}" in template:
            parts["g"] = self.pick(lambda tensor: tensor.is_floating_point() and _broadcasts(tensor, first))
        if "{m}" in template:
            parts["m"] = self.pick(lambda tensor: _multiplies(first, tensor))
        if "{t}" in template:
            parts["t"] = self.new()
        if "{b}" in template:
            parts["b"] = self.pick(lambda tensor: tensor.dtype == torch.bool and _broadcasts(tensor, first))
        if "{s}" in template:
            parts["s"] = self.pick(lambda tensor: tensor.shape == first.shape and tensor is not first)
        for key in ("n", "o"):
            parts[key] = self.number()
        parts["d"], parts["e"] = self.dim(first), self.dim(first)
        parts["i"] = self.index(first)
        parts["k"] = self.random.choice(("k0", "k1", "1", "2", "0"))
        parts["dt"] = self.random.choice(templates.DTYPES)
        parts["bool"] = self.random.choice(("True", "False"))
        parts["size"] = self._some_shape()
        for key in ("shape", "strides"):
            parts[key] = str([self.random.choice((0, 1, 2, 3)) for _ in range(first.dim() or 1)])
        parts["view"] = self.random.choice(("", "", "[0]", "[..., 0]", ".t()", "[1:]", "[..., ::2]", ".view(-1)"))
        return template.format_map(parts)

    def _some_shape(self) -> str:
        sizes = [
            self.random.choice(("A", "B", "C", "2", "3")) for _ in range(self.random.choice((0, 1, 2, 2, 2, 3, 4)))
        ]
        return "(" + "".join(f"{size}, " for size in sizes) + ")"

    def new(self) -> str:
        """The name of the next tensor."""
        self.count += 1
        return f"t{self.count - 1}"

    def try_on_cpu(self, statement: str) -> Exception | None:
        """Run the statement here; what it raises."""
        try:
            exec(compiled(statement), self.env)
        except Exception as error:
            return error
        return None

    def add(self, statement: str) -> None:
        """Add a statement that makes a tensor of the expression, or is one by itself."""
        self.statements.append(statement)
        self.try_on_cpu(statement)

    def _assigns_number(self, text: str) -> bool:
        """True for `x[i] = y` with a `y` of no dimensions in the memory of `x`, or with a graph for an integer `x`:
        PyTorch fills on the CPU alone."""
        found = re.fullmatch(r"(t\d+)\[.*\] = (t\d+)", text)
        if not found:
            return False
        target, value = (self.env[name] for name in found.groups())
        shared = value.untyped_storage()._cdata == target.untyped_storage()._cdata
        return bool(value.dim() == 0 and (shared or (value.requires_grad and not target.is_floating_point())))

    def propose(self, kind: str, template: str) -> bool:
        """Add a statement of the template, if it is valid or may fail."""
        text = self.fill(template)
        if self._assigns_number(text):
            return False
        makes = kind in templates.EXPRESSIONS
        statement = f"{self.new()} = {text}" if makes else text
        sizes = {name: value.size() for name, value in self.env.items() if isinstance(value, Tensor)}
        error = self.try_on_cpu(statement)
        if error is not None and (resized := [name for name, size in sizes.items() if self.env[name].size() != size]):
            # Eager resizes the target of `out=` before it refuses the call; the device does nothing.
            with torch.inference_mode(), torch.no_grad():
                for name in resized:
                    self.env[name].resize_(sizes[name])
            return False
        if error is not None and "_foreach_" in text:
            # Eager has written to the first tensors of the list; eager regions do not count that up.
            return False
        if error is not None and self.random.random() >= templates.MAY_FAIL.get(kind, 0.0):
            return False
        made = self.env.get(f"t{self.count - 1}") if makes else None
        if isinstance(made, Tensor) and made.numel() > MOST_ELEMENTS:
            del self.env[f"t{self.count - 1}"]
            return False
        self.statements.append(statement)
        return True


def _broadcasts(tensor: Tensor, other: Tensor) -> bool:
    return all(a == b or a == 1 or b == 1 for a, b in zip(tensor.shape[::-1], other.shape[::-1]))


def _multiplies(left: Tensor, right: Tensor) -> bool:
    if not right.dim() or not left.dim() or left.dtype != right.dtype:
        return False
    return left.shape[-1] == right.shape[max(right.dim() - 2, 0)]


def variants(maker: Maker, executions: int) -> tuple[dict[str, Any], ...]:
    """Numbers for each execution: the same ones at first, then others, now and then other sizes."""
    choose = maker.random
    made = [maker.variant] * min(2, executions)
    other_sizes = choose.random() < 0.3
    while len(made) < executions:
        other = {**maker.variant, **{f"n{place}": choose.choice(FLOATS) for place in range(3)}}
        if other_sizes:
            other.update(zip("ABC", (choose.choice((2, 3, 4, 5)) for _ in "ABC")))
        made.append(choose.choice((maker.variant, other, other)))
    return tuple(made)


# What threads share, and what they say to each other: not in programs of several threads.
_SHARED = re.compile(
    r"rand|drop|seed|normal|uniform|bernoulli|exponential|poisson|gumbel|rrelu|init|manual|set_|use_|func|nn\.[TM]"
    r"|dual_level"
)


def plain(seed: int, length: int, executions: int, threads: int = 1) -> Program:
    """A program of statements of all kinds."""
    name = "plain" if threads == 1 else "threads"
    maker = Maker(seed, name)
    choose = maker.random
    chosen = templates.themes(choose)
    kinds = {kind: lines for kind, (_, lines) in templates.KINDS.items()}
    if threads > 1:
        kinds = {kind: [line for line in lines if not _SHARED.search(line)] for kind, lines in kinds.items()}
        kinds["random"], kinds["late"] = kinds["pointwise"], kinds["view"]
    torch.default_generator.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for _ in range(choose.randint(1, 3)):
                maker.propose("creation", choose.choice(kinds["creation"]))
            tries = 0
            while len(maker.statements) < length and tries < 4 * length:
                tries += 1
                kind = choose.choices(*chosen)[0]
                maker.propose(kind, choose.choice(kinds[kind]))
        finally:
            reset_switches()
    return Program(f"{name}-{seed}", seed, tuple(maker.statements), variants(maker, executions), threads)


# The kinds of programs, and how many of a hundred are of each.
KINDS = {"training": 6, "jit": 8, "threads": 4, "plain": 82}


def generate(seed: int, executions: int = 4, kind: str | None = None) -> Program:
    """The program of a seed; of this kind, if one is given."""
    choose = random.Random(seed)
    length = choose.randint(4, 18)
    kind = choose.choices(list(KINDS), list(KINDS.values()))[0] if kind is None else kind
    if kind == "training":
        return training(seed, executions)
    if kind == "jit":
        return replayed(seed, executions)
    if kind == "threads":
        return plain(seed, length, 2, threads=choose.choice((2, 3)))
    return plain(seed, length, executions)
