"""Rules for the run-time numbers of a program: which number of the call, of an optimizer, or which constant each is.

A rule is never guessed from one recording. Every recording strikes out the rules that it contradicts; a replay uses a
number only where all rules that are left agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_ltc.lowering.lower import same_number

__all__ = ["Context", "NumberRules", "WatchedFloat", "optimizer_numbers"]

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


class WatchedFloat(float):
    """A number that notes whether anything but an operator was told its value."""

    inspected = False


def _noting(name: str) -> Any:
    original = getattr(float, name)

    def method(self: WatchedFloat, *args: Any) -> Any:
        self.inspected = True
        return original(self, *args)

    return method


_LOOKS = (
    "lt le gt ge eq ne bool hash int trunc floor ceil round repr str format add radd sub rsub mul rmul truediv "
    "rtruediv floordiv rfloordiv mod rmod pow rpow abs divmod"
)
for _name in _LOOKS.split():
    if hasattr(float, f"__{_name}__"):
        setattr(WatchedFloat, f"__{_name}__", _noting(f"__{_name}__"))


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
