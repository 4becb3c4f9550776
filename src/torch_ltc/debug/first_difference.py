"""The first difference between two programs, in the user's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_ltc.program.instruction import Call, Input, Instruction, Program, Scalar, Value
from torch_ltc.program.spec import Spec
from torch_ltc.program.text import operand_text
from torch_ltc.source import UNKNOWN, Source

# Arguments whose change means that a module went from training to evaluation or back.
_MODES = frozenset({"training", "train", "use_input_stats"})
_SIZES = frozenset({"size", "sizes", "shape", "output_size", "input_size", "self_size", "length", "n"})


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference: the short name of the cause, a sentence, and the user's line."""

    cause: str
    text: str
    source: Source


def first_difference(old: Program, new: Program) -> Difference | None:
    """The first difference of `new` from `old`; None where there is none but in length."""
    if old.device != new.device:
        text = f"the physical device was {old.device} and is now {new.device}"
        return Difference("device", text, _first_source(new))
    for place, (before, now) in enumerate(zip(old.instructions, new.instructions)):
        found = _instructions_differ(before, now, old, new, place)
        if found is not None:
            return found
    if len(old.instructions) != len(new.instructions):
        return None
    return _live_differs(old, new)


def _first_source(program: Program) -> Source:
    return program.calls[0].source if program.calls else UNKNOWN


def _instructions_differ(
    before: Instruction, now: Instruction, old: Program, new: Program, place: int
) -> Difference | None:
    if isinstance(before, Input) and isinstance(now, Input) and before.buffer == now.buffer:
        return _specs_differ(before.spec, now.spec, now, new)
    if isinstance(before, Call) and isinstance(now, Call) and before.op is now.op:
        found = _arguments_differ(before, now)
        if found is None or _line(before) == _line(now):
            return found
    was, now_is = _next_call(old.instructions[place:]), _next_call(new.instructions[place:])
    if was is None or now_is is None:
        return None
    if was.op is now_is.op and _line(was) == _line(now_is):
        other = Difference("inputs", f"{now_is.name} takes another tensor than before", now_is.source)
        found = _arguments_differ(was, now_is)
        return found if found is not None and found.cause == "inputs" else other
    return _calls_differ(was, now_is, old, new)


def _next_call(instructions: Sequence[Instruction]) -> Call | None:
    return next((one for one in instructions if isinstance(one, Call)), None)


def _line(call: Call) -> tuple[str, int]:
    """The line that a call is there for: that of the forward call, in a backward pass."""
    source = call.source.forward or call.source
    return (source.file, source.line)


# ---- inputs ---------------------------------------------------------------------------------------------------------


def _specs_differ(before: Spec, now: Spec, instruction: Input, program: Program) -> Difference | None:
    if before == now:
        return None
    user = program.first_users().get(instruction.number)
    used = "" if user is None else f", used by {user.name}"
    what = f"input {program.inputs.index(instruction)} ({now!r}{used})"
    source = UNKNOWN if user is None else user.source
    if before.dtype is not now.dtype:
        text = f"the dtype of {what} was {_plain(before.dtype)}, is now {_plain(now.dtype)}"
        return Difference("dtype", text, source)
    if len(before.size) != len(now.size):
        text = f"{what} had {len(before.size)} dimensions, has now {len(now.size)}"
        return Difference("size", text, source)
    for dimension, (was, size) in enumerate(zip(before.size, now.size)):
        if was != size:
            return Difference("size", f"size {dimension} of {what} was {was}, is now {size}", source)
    if before.stride != now.stride:
        text = f"the strides of {what} were {_numbers(before.stride)}, are now {_numbers(now.stride)}"
        return Difference("layout", text, source)
    if before.offset != now.offset:
        text = f"the offset of {what} was {before.offset}, is now {now.offset}"
        return Difference("layout", text, source)
    return Difference("layout", f"{what} is conjugated or negated in another way", source)


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def _numbers(values: Sequence[object]) -> str:
    return "[" + ", ".join(map(str, values)) + "]"


# ---- calls ----------------------------------------------------------------------------------------------------------


def _arguments_differ(before: Call, now: Call) -> Difference | None:
    names = [argument.name for argument in now.op._schema.arguments]
    old = [*before.args, *before.kwargs.values()]
    new = [*now.args, *now.kwargs.values()]
    for name, was, value in zip(names, old, new):
        found = _operands_differ(name, was, value)
        if found is not None:
            cause, text = found
            return Difference(cause, f"{text} of {now.name}" if cause != "inputs" else f"{now.name} {text}", now.source)
    if [item.spec for item in before.flat_returns] != [item.spec for item in now.flat_returns]:
        return Difference("layout", f"{now.name} gives a result with another layout", now.source)
    return None


def _operands_differ(name: str, was: object, now: object) -> tuple[str, str] | None:
    """The cause and the text of a difference in one argument."""
    if was == now and type(was) is type(now):
        return None
    if isinstance(was, Scalar) and isinstance(now, Scalar):
        if was.type is now.type:
            return None
        return "number", f"the number '{name}' was of type {was.type.__name__}, is now {now.type.__name__}: an argument"
    if isinstance(was, tuple) and isinstance(now, tuple) and _holds_values(was, now):
        if len(was) != len(now):
            return "inputs", f"takes {len(now)} tensors as '{name}', took {len(was)}"
        return "inputs", f"takes another tensor in '{name}'"
    if isinstance(was, Value) or isinstance(now, Value):
        return "inputs", f"takes another tensor as '{name}'"
    if isinstance(was, Scalar) or isinstance(now, Scalar):
        return "number", f"the number '{name}' was {operand_text(was)}, is now {operand_text(now)}: an argument"
    cause = "mode" if name in _MODES else "dtype" if name == "dtype" else "size" if name in _SIZES else "argument"
    return cause, f"the argument '{name}' was {_plain(operand_text(was))}, is now {_plain(operand_text(now))}:"


def _holds_values(*lists: tuple[object, ...]) -> bool:
    return any(isinstance(item, Value) for items in lists for item in items)


def _calls_differ(was: Call, now: Call, old: Program, new: Program) -> Difference:
    """Another operator, or the same one for another line."""
    before = {(call.op, _line(call)) for call in old.calls}
    after = {(call.op, _line(call)) for call in new.calls}
    inserted = (now.op, _line(now)) not in before
    removed = (was.op, _line(was)) not in after
    cause = "mode" if _is_random_line(was, old, new) or _is_random_line(now, new, old) else "operation"
    if inserted and not removed:
        return Difference(cause, f"{now.name} was not there before", now.source)
    if removed and not inserted:
        return Difference(cause, f"{was.name} is no longer there", was.source)
    return Difference(cause, f"{now.name} is where {was.name} was", now.source)


def _is_random_line(call: Call, program: Program, other: Program) -> bool:
    """True when the line of a call, inside of a module, draws random numbers in its program and not in the other:
    dropout, in training. Outside of modules it is more often the making of parameters."""
    line = _line(call)
    if not (call.source.forward or call.source).module:
        return False
    drawn = any(one.random and _line(one) == line for one in program.calls)
    return drawn and not any(one.random and _line(one) == line for one in other.calls)


# ---- results --------------------------------------------------------------------------------------------------------


def _live_differs(old: Program, new: Program) -> Difference | None:
    for outputs, others, text in (
        (new.outputs, old.outputs, "is held when the program ends, and was not before"),
        (old.outputs, new.outputs, "is no longer held when the program ends"),
    ):
        held = sorted(set(outputs) - set(others))
        maker = next((call for call in new.calls if held and held[0] in call.numbers), None)
        if maker is not None:
            more = f" (and {len(held) - 1} more)" if len(held) > 1 else ""
            return Difference("live", f"the result of {maker.name}{more} {text}", maker.source)
    return None
