"""Rules for the run-time numbers of a program: which number of the call, of an optimizer, or which constant each is.

A rule is never guessed from one recording. Every recording strikes out the rules that it contradicts; a replay uses a
number only where all rules that are left agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_ltc.lowering.lower import same_number

__all__ = [
    "Context",
    "NumberRules",
    "Trials",
    "WatchedFloat",
    "looked_at",
    "optimizer_numbers",
    "watched_rates",
]

# Named numbers of one call.
Context = Mapping[Any, float | int]
Rule = Callable[[Context], Any]


def _constant(value: Any) -> Rule:
    return lambda context: value


def _named(name: Any) -> Rule:
    return lambda context: context[name]


def _negated(name: Any) -> Rule:
    return lambda context: -context[name]


def optimizer_numbers(name: Any, group: Mapping[str, Any], step: float | None) -> dict[Any, float]:
    """The numbers that PyTorch's optimizers make of the options of one group and the number of the step."""
    rate: Any = group.get("lr")
    if type(rate) not in (int, float):
        return {}
    numbers: dict[Any, float] = {(name, "lr"): rate}
    decay = group.get("weight_decay")
    if decay:
        numbers[name, "1 - lr * weight_decay"] = 1 - rate * decay
    betas = group.get("betas")
    if betas is not None and step is not None:
        first, second = betas
        rest1, rest2 = 1 - first**step, 1 - second**step
        numbers.update(
            {
                (name, "bias_correction1"): rest1,
                (name, "bias_correction2"): rest2,
                (name, "sqrt(bias_correction1)"): rest1**0.5 if rest1 > 0 else 0.0,
                (name, "sqrt(bias_correction2)"): rest2**0.5 if rest2 > 0 else 0.0,
                (name, "step_size"): rate / rest1 if rest1 else 0.0,
            }
        )
    return numbers


_to_float = float.__float__


class WatchedFloat(float):
    """A number that notes whether anything but an operator was told its value. What reads it in C, as `math.sin` does,
    goes unnoticed: see `Trials`."""

    # The number that this one was made of.
    origin: WatchedFloat | None = None
    _inspected = False

    @property
    def inspected(self) -> bool:
        """True when somebody was told."""
        return self._inspected

    def note(self) -> None:
        """Somebody was told."""
        self._inspected = True
        if self.origin is not None:
            self.origin.note()

    def plain(self) -> float:
        """The number as it was given."""
        self.note()
        return _to_float(self)

    def derived(self, value: Any) -> Any:
        """A number that was made of this one: who is told of it is told of this one."""
        if type(value) is not float:
            return value
        made = type(self)(value)
        made.origin = self
        return made

    def __neg__(self) -> Any:
        return self.derived(float.__neg__(self))

    def __pos__(self) -> WatchedFloat:
        return self

    def conjugate(self) -> WatchedFloat:
        """The number itself."""
        return self

    @property
    def real(self) -> WatchedFloat:
        """The number itself."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return float, (self.plain(),)


def _noting(name: str) -> Any:
    original = getattr(float, name)

    def method(self: WatchedFloat, *args: Any) -> Any:
        self.note()
        return original(self, *args)

    return method


_LOOKS = (
    "lt le gt ge eq ne bool hash int float trunc floor ceil round repr str format add radd sub rsub mul rmul truediv "
    "rtruediv floordiv rfloordiv mod rmod pow rpow abs divmod rdivmod getnewargs"
)
for _name in (*(f"__{name}__" for name in _LOOKS.split()), "is_integer", "hex", "as_integer_ratio"):
    if hasattr(float, _name):
        setattr(WatchedFloat, _name, _noting(_name))


class WatchedRate(WatchedFloat):
    """A learning rate, of which optimizers make other numbers."""


def _deriving(name: str) -> Any:
    original = getattr(float, name)

    def method(self: WatchedRate, *args: Any) -> Any:
        return self.derived(original(self, *args))

    return method


for _name in ["add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow"]:
    setattr(WatchedRate, f"__{_name}__", _deriving(f"__{_name}__"))


@contextmanager
def watched_rates(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[dict[Any, WatchedRate]]:
    """In this block the learning rates of the optimizers note who looks at them; by name."""
    rates: dict[Any, WatchedRate] = {}
    given: list[tuple[dict[str, Any], WatchedRate, float]] = []
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if type(rate) is float:
                group["lr"] = rates[(number, index), "lr"] = WatchedRate(rate)
                given.append((group, group["lr"], rate))
    try:
        yield rates
    finally:
        for group, watched, rate in given:
            if group.get("lr") is watched:
                group["lr"] = rate
            elif isinstance(group.get("lr"), WatchedFloat):
                group["lr"] = group["lr"].plain()


def looked_at(context: Context) -> dict[Any, float | int]:
    """Those of the named numbers that a function can look at: its arguments, and learning rates."""
    return {name: value for name, value in context.items() if type(name) is int or name[1] == "lr"}


class Trials:
    """The values that numbers had in recordings that agree. A value that was not among them is replayed where two
    others were, one of them of its kind: a function may do something else for a negative number, or none at all.
    """

    def __init__(self) -> None:
        self._values: dict[Any, list[float]] = {}

    def observe(self, numbers: Context, agree: bool) -> None:
        """One more recording, which agrees with the last one or not."""
        if not agree:
            self._values.clear()
        for name, value in numbers.items():
            if not self.covers(name, value):
                self._values.setdefault(name, []).append(value)

    def covers(self, name: Any, value: float) -> bool:
        """True when a replay with this value is right."""
        known = self._values.get(name, [])
        if any(same_number(value, each) for each in known):
            return True
        return len(known) > 1 and any(_kind_of(value) == _kind_of(each) for each in known)


def _kind_of(value: float) -> tuple[object, ...]:
    return type(value), value == value, value == 0, math.isinf(value), math.copysign(1.0, value)


class NumberRules:
    """The rules for the numbers of one program that are left."""

    def __init__(self) -> None:
        self._rules: list[list[Rule]] = []
        self._context: dict[Any, float | int] = {}
        self._numbers: list[object] = []
        self._kinds: list[tuple[Any, type]] = []
        # Names of zeros: two of other signs are equal.
        self._zeros: list[Any] = []

    def observe(self, numbers: Sequence[object], context: Context) -> None:
        """One more recording, with the named numbers of its call."""
        if not self._rules:
            self._rules = [self._candidates(number, context) for number in numbers]
        for rules, number in zip(self._rules, numbers, strict=True):
            rules[:] = [rule for rule in rules if _agrees(rule, context, number)]
        self._context, self._numbers = dict(context), list(numbers)
        self._kinds = _kinds(context)
        self._zeros = [name for name, value in context.items() if value == 0]

    @staticmethod
    def _candidates(number: object, context: Context) -> list[Rule]:
        rules = [_constant(number)]
        for name, value in context.items():
            if type(value) is type(number):
                rules += [make(name) for make in (_named, _negated)]
        return rules

    @property
    def unexplained(self) -> list[int]:
        """Numbers that no rule explains."""
        return [slot for slot, rules in enumerate(self._rules) if not rules]

    def numbers(self, context: Context) -> list[object] | None:
        """The numbers of a call with this context; None where that is not certain."""
        if context == self._context and all(same_number(context[name], self._context[name]) for name in self._zeros):
            return list(self._numbers)
        if _kinds(context) != self._kinds:
            # A learning rate that is a tensor now, or an integer.
            return None
        made: list[object] = []
        for rules in self._rules:
            if not rules:
                return None
            value = rules[0](context)
            if len(rules) > 1 and not all(same_number(rule(context), value) for rule in rules[1:]):
                return None
            made.append(value)
        return made


def _kinds(context: Context) -> list[tuple[Any, type]]:
    return [(name, type(value)) for name, value in context.items()]


def _agrees(rule: Rule, context: Context, number: object) -> bool:
    try:
        return same_number(rule(context), number)
    except KeyError:
        return False
