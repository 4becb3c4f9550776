"""Recording kernels, one per operator overload, made from its schema.

A kernel is a stub until it has been called a few times. Then source text is made for its schema, with no loop over
arguments in it, and the stub's code object is replaced: from then on, the dispatcher runs the specialised code
directly.

What a specialised kernel does, for a call with one fresh result:
  1. look up each tensor's value number (an attribute; the recorder's slow path when it is missing or stale),
  2. compare the key (operator, numbers, static arguments) with the tree child that came next last time,
  3. make the result tensor from the spec on that child.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch_ltc.config import forced_fallback_ops, settings
from torch_ltc.device.fallback import run_eagerly
from torch_ltc.device.tensors import make_results, new_tensors
from torch_ltc.native.library import extension
from torch_ltc.native.recording import native
from torch_ltc.pytorch.private import (
    META_KEY,
    OpOverload,
    as_strided,
    create_empty_tensor,
    function_modes,
    include_key,
    refuse_data_pointer,
    use_meta,
)
from torch_ltc.record.arguments import freeze
from torch_ltc.record.buffer import Buffer, storage_of
from torch_ltc.record.native_nodes import link_call
from torch_ltc.record.operator import DEFAULT, Argument, Kind, Operator
from torch_ltc.record.recorder import recorder
from torch_ltc.shapes.inference import CannotInfer

Kernel = Callable[..., Any]

# How many calls of an operator are recorded the general way, which costs some microseconds more: specialising takes as
# long as dozens of them, and the first step should not wait for it.
_GENERAL_CALLS = 16


def record(operator: Operator, values: tuple[Any, ...]) -> Any:
    """Record one call the general way. Runs it eagerly when it cannot be recorded."""
    if settings.force_fallback and is_forced(operator):
        return run_eagerly(operator, values, _FORCED_REASON)
    try:
        with recorder.lock:
            try:
                key = recorder.key_of(operator, values)
                child = recorder.node.next
                if child.key != key:
                    child = recorder.advance(key, operator, values)
                return finish(child, operator, values)
            except BaseException:
                recorder.numbers.clear()
                raise
    except CannotInfer as reason:
        return run_eagerly(operator, values, str(reason))


def finish(child: Any, operator: Operator, values: tuple[Any, ...]) -> Any:
    """Step to `child` and make whatever the call returns."""
    if recorder.numbers:
        recorder.check_numbers(child, operator, values)
    if operator.random:
        recorder.random = True
    if operator.located:
        recorder.note_line(child)
    if native is not None:
        link_call(recorder.node, child, operator, values)
    first = recorder.step(child)
    return make_results(child, operator, values, first)


def _namespace(operator: Operator) -> dict[str, Any]:
    return {
        "operator": operator,
        "record": record,
        "recorder": recorder,
        # Half the cost of a `with` statement, on every call.
        "acquire": recorder.lock.acquire,
        "release": recorder.lock.release,
        "operand": recorder.operand,
        "operands": recorder.operands,
        "target": recorder.target,
        "targets": recorder.targets,
        "scalar": recorder.scalar,
        "check_device": recorder.device,
        "keep": recorder.add_buffer if native is not None else recorder.buffers.append,
        "numbers": recorder.numbers,
        "DEFAULT": DEFAULT,
        "finish": finish,
        "create": extension.empty_tensor if extension else create_empty_tensor,
        "refuse": refuse_data_pointer,
        "new_tensors": new_tensors,
        "as_strided": as_strided,
        "use_meta": use_meta,
        "include_key": include_key,
        "META_KEY": META_KEY,
        "function_modes": function_modes,
        "storage_of": storage_of,
        "Buffer": Buffer,
        "freeze": freeze,
        "CannotInfer": CannotInfer,
        "run_eagerly": run_eagerly,
        "FORCED": _FORCED_REASON,
    }


def make_kernel(op: OpOverload) -> Kernel:
    """The kernel to register for `op`: a stub that specialises itself once it has been called a few times."""
    operator = Operator(op)
    if operator.dynamic:
        return eager_kernel(operator, "its result's shape depends on data")
    if operator.random:
        raise ValueError(f"{operator.name} takes a generator: see device/random_ops.py")

    calls = itertools.count(1)

    def specialise(*args: Any, **kwargs: Any) -> Any:
        if next(calls) <= _GENERAL_CALLS:
            return record(operator, operator.values(args, kwargs))
        code = compile_kernel(operator)
        template: dict[str, Any] = {}
        exec(code, template)
        made: FunctionType = template["kernel"]
        # The schema's own default objects: the kernel recognises them by identity.
        stub.__kwdefaults__ = {a.name: a.default for a in operator.arguments if a.keyword_only}
        stub.__defaults__ = tuple(a.default for a in operator.arguments if not a.keyword_only)
        stub.__code__ = made.__code__
        return stub(*args, **kwargs)

    namespace = _namespace(operator)
    namespace["specialise"] = specialise
    namespace.update({f"d{i}": a.default for i, a in enumerate(operator.arguments)})
    stub = FunctionType(_STUB, namespace, operator.name)
    stub.operator = operator  # type: ignore[attr-defined]
    # The first one is the dispatcher's.
    _stubs.setdefault(operator.name, (stub, operator))
    return stub


def _stub(*args: Any, **kwargs: Any) -> Any:
    return specialise(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def _general_stub(*args: Any, **kwargs: Any) -> Any:
    return record(operator, operator.values(args, kwargs))  # type: ignore[name-defined]  # noqa: F821


# With the hit path in C++, kernels in Python see new calls alone, and stay general.
_STUB = (_stub if native is None else _general_stub).__code__


def eager_kernel(operator: Operator, reason: str) -> Kernel:
    """A kernel that records nothing: the call runs at once, after a sync."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run_eagerly(operator, operator.values(args, kwargs), reason)

    kernel.operator = operator  # type: ignore[attr-defined]
    kernel.unrecorded = True  # type: ignore[attr-defined]
    return kernel


def on_cpu(op: OpOverload, ours: Kernel) -> Kernel:
    """`ours` when programs run on the CPU, else PyTorch's own composition."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs) if settings.device_type == "cpu" else op.decompose(*args, **kwargs)

    return kernel


# ---- source text --------------------------------------------------------------------------------------------------


def compile_kernel(operator: Operator) -> CodeType:
    """Code of a module that defines `kernel` for this operator's schema."""
    return compile(kernel_source(operator), f"<torch_ltc kernel {operator.name}>", "exec")


def kernel_source(operator: Operator) -> str:
    """Source text of the specialised kernel."""
    lines = [
        f"def kernel({_signature(operator)}):",
        "    try:",
        "        acquire()",
        "        try:",
        "            base = recorder.base",
    ]
    parts = []
    for index, argument in enumerate(operator.arguments):
        part = _argument_lines(argument, index, lines)
        if part:
            parts.append(part)
    values = "(" + "".join(f"{_name(a)}, " for a in operator.arguments) + ")"
    lines += [
        f"            key = (operator, {''.join(part + ', ' for part in parts)})",
        "            child = recorder.node.next",
        "            if child.key != key:",
        f"                child = recorder.advance(key, operator, {values})",
    ]
    lines += _result_lines(operator, values)
    lines += [
        "        except BaseException:",
        "            numbers.clear()",
        "            raise",
        "        finally:",
        "            release()",
        "    except CannotInfer as reason:",
        f"        return run_eagerly(operator, {values}, str(reason))",
    ]
    return "\n".join(lines) + "\n"


def _name(argument: Argument) -> str:
    return f"a_{argument.name}"


def _signature(operator: Operator) -> str:
    # Positional arguments may come by position only; keyword-only ones come by their own names.
    parts: list[str] = []
    starred = False
    for argument in operator.arguments:
        if argument.keyword_only and not starred:
            parts.append("*")
            starred = True
        name = argument.name if argument.keyword_only else _name(argument)
        parts.append(f"{name}=None")
    return ", ".join(parts)


def _argument_lines(argument: Argument, index: int, lines: list[str]) -> str:
    """Append the statements that make this argument's key part; return the part's name, or nothing."""
    name, kind, pad, part = _name(argument), argument.kind, " " * 12, f"k{index}"
    if argument.keyword_only:
        lines.append(f"{pad}{name} = {argument.name}")
    if kind is Kind.TENSOR:
        if argument.optional:
            lines.append(f"{pad}{part} = getattr({name}, '_ltc', -1) - base")
        else:
            lines += [
                f"{pad}try:",
                f"{pad}    {part} = {name}._ltc - base",
                f"{pad}except AttributeError:",
                f"{pad}    {part} = -1",
            ]
        slow = "target" if argument.written else "operand"
        lines += [f"{pad}if {part} < 0:", f"{pad}    {part} = {slow}({name}, operator)"]
    elif kind is Kind.TENSORS:
        lines.append(f"{pad}{part} = {'targets' if argument.written else 'operands'}({name}, operator)")
    elif kind is Kind.SCALAR:
        lines.append(f"{pad}{part} = DEFAULT if {name} is d{index} else scalar({name})")
    elif kind is Kind.SCALARS:
        lines.append(f"{pad}{part} = tuple([scalar(s) for s in {name}])")
    elif kind is Kind.STATIC_SCALAR:
        lines.append(f"{pad}{part} = (type({name}), {name})")
    elif kind is Kind.DEVICE:
        lines.append(f"{pad}{part} = check_device({name})")
    elif kind is Kind.STATIC:
        return f"(tuple({name}) if {name}.__class__ is list else {name})"
    else:
        return ""
    return part


_PAD = " " * 12


def _result_lines(operator: Operator, values: str) -> list[str]:
    """Statements after the key was found: the quick way for the common results, else `finish`."""
    schema = operator.op._schema
    check = [f"{_PAD}if numbers:", f"{_PAD}    recorder.check_numbers(child, operator, {values})"]
    note = [f"{_PAD}recorder.note_line(child)"] if operator.located else []
    written = [a for a in operator.arguments if a.written]
    general = f"return finish(child, operator, {values})"
    declared = [str(returned.type) for returned in schema.returns]
    if len(declared) > 1 and set(declared) == {"Tensor"} and not written:
        return _several_results(general, [*check, *note])
    if len(declared) != 1:
        return [_PAD + general]
    alias_info = schema.returns[0].alias_info
    if len(written) == 1 and written[0].kind is Kind.TENSOR and alias_info is not None and alias_info.is_write:
        return [*check, *note, *_step(""), f"{_PAD}return {_name(written[0])}"]
    if declared[0] != "Tensor" or written:
        return [_PAD + general]
    if alias_info is None:
        return _fresh_result(general, check, note)
    base = operator.arguments[0]
    if base.kind is not Kind.TENSOR or base.optional or note:
        return [_PAD + general]
    return _view_result(general, check, _name(base))


def _step(made: str) -> list[str]:
    """Take the call: as `PendingState.step_call`. An interrupt may come at the end of any call: there is none between
    the first change and the last."""
    values = [f"{_PAD}number = recorder.count", f"{_PAD}recorder.count = number + {made}"] if made else []
    return [
        f"{_PAD}if numbers:",
        f"{_PAD}    recorder.scalars += numbers",
        f"{_PAD}recorder.node = child",
        *values,
        f"{_PAD}if numbers:",
        f"{_PAD}    numbers.clear()",
    ]


def _several_results(general: str, before: list[str]) -> list[str]:
    return [
        f"{_PAD}if child.plan is None:",
        f"{_PAD}    {general}",
        *before,
        *_step("child.made"),
        f"{_PAD}return new_tensors(child, number)",
    ]


def _fresh_result(general: str, check: list[str], note: list[str]) -> list[str]:
    return [
        *check,
        f"{_PAD}size = child.size",
        f"{_PAD}if size is None:",
        f"{_PAD}    {general}",
        *note,
        *_step("1"),
        f"{_PAD}result = create(size, child.dtype)",
        # The extension's tensors have an address.
        *([] if extension else [f"{_PAD}refuse(result)"]),
        f"{_PAD}storage_of(result).handle = buffer = Buffer()",
        f"{_PAD}buffer.number = number",
        f"{_PAD}buffer.spec = child.spec",
        f"{_PAD}keep(buffer)",
        f"{_PAD}result._ltc = number",
        f"{_PAD}return result",
    ]


def _view_result(general: str, check: list[str], base: str) -> list[str]:
    return [
        f"{_PAD}spec = child.plan",
        f"{_PAD}if spec is None or function_modes():",
        f"{_PAD}    {general}",
        *check,
        *_step("1"),
        f"{_PAD}try:",
        f"{_PAD}    use_meta(True)",
        f"{_PAD}    result = as_strided({base}, spec.size, spec.stride, spec.offset)",
        f"{_PAD}finally:",
        f"{_PAD}    include_key(META_KEY, False)",
        f"{_PAD}    use_meta(False)",
        f"{_PAD}buffer = storage_of(result).handle",
        f"{_PAD}if buffer.views is None or buffer.views_base != recorder.base:",
        f"{_PAD}    buffer.views = {{}}",
        f"{_PAD}    buffer.views_base = recorder.base",
        f"{_PAD}buffer.views[spec] = result._ltc = number",
        f"{_PAD}return result",
    ]


# ---- the setting force_fallback -------------------------------------------------------------------------------------

_stubs: dict[str, tuple[FunctionType, Operator]] = {}
_forced: set[str] = set()
# Operators whose kernels try the hit path in C++ first.
native_operators: list[Operator] = []
_FORCED_REASON = "the setting force_fallback names it"


def is_forced(operator: Operator) -> bool:
    """True when the setting `force_fallback` names this operator, with or without its overload."""
    names = forced_fallback_ops()
    return operator.name in names or operator.op._schema.name in names


def _forced_stub(*args: Any, **kwargs: Any) -> Any:
    return run_eagerly(operator, operator.values(args, kwargs), FORCED)  # type: ignore[name-defined]  # noqa: F821


def apply_forced_fallback() -> None:
    """Let the kernels that the setting names run eagerly, and the others record again."""
    for name, (stub, operator) in _stubs.items():
        wanted = is_forced(operator)
        if wanted and name not in _forced:
            stub.__code__ = _forced_stub.__code__
            _forced.add(name)
        elif not wanted and name in _forced:
            stub.__code__ = _STUB
            _forced.discard(name)
    for operator in native_operators:
        operator.native.python_only = is_forced(operator)


settings.watch("force_fallback", apply_forced_fallback)
