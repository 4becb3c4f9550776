"""The pending program: where recording stands in the tree, and what it has touched.

There is one recorder for the device. Several threads may record one program, and a step's forward and backward
belong to one program, so the recorder is shared by all threads and guarded by `lock`. Kernels hold it while they
record.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torch_ltc.config import settings
from torch_ltc.errors import DeviceMismatchError
from torch_ltc.hooks import Hook
from torch_ltc.native.recording import native
from torch_ltc.program.effects import may_fail
from torch_ltc.program.instruction import (
    Call,
    Input,
    ObservedLayout,
    ReturnKind,
    Returns,
)
from torch_ltc.program.spec import Spec, spec_of
from torch_ltc.program.tree import Key, Node, Tree
from torch_ltc.pytorch.switches import TorchState
from torch_ltc.record.arguments import (
    NUMBER_TYPES,
    freeze,
    operand_tensors,
    plain_number,
    result_numbers,
    statics_of,
    storage_groups,
)
from torch_ltc.record.buffer import Buffer, buffer_of, new_buffer, physical_device, storage_of
from torch_ltc.record.call_site import UNKNOWN, Source, call_source, current_source
from torch_ltc.record.call_template import CallTemplates
from torch_ltc.record.forward_lines import ForwardLines
from torch_ltc.record.native_nodes import link_empty, link_input
from torch_ltc.record.operands import CallOperands, make_operands
from torch_ltc.record.operator import DEFAULT, Kind, Operator
from torch_ltc.record.ordinal import ordinal
from torch_ltc.record.path_values import PathValues
from torch_ltc.record.pending_state import PendingState
from torch_ltc.record.result_specs import cache_result_specs
from torch_ltc.shapes.inference import Inferred, OperandIndex, infer
from torch_ltc.shapes.rules import apply_rule

aten = torch.ops.aten

# Operators that take indices or factors from the CPU, as PyTorch's other devices do.
_CPU_OPERANDS = frozenset(
    {
        "aten::index.Tensor",
        "aten::index_put_",
        "aten::index_put",
        "aten::_index_put_impl_",
        "aten::_unsafe_index.Tensor",
        "aten::_foreach_addcdiv.Tensor",
        "aten::_foreach_addcdiv_.Tensor",
        "aten::_foreach_addcmul.Tensor",
        "aten::_foreach_addcmul_.Tensor",
    }
)
# Operators that take integers from the CPU, which is what indices are.
_CPU_INDICES = frozenset(
    f"aten::index_fill{written}.int_{value}" for written in ("", "_") for value in ("Scalar", "Tensor")
)
# How many values of an operator's run-time numbers are checked against its meta kernel before they are trusted.
_CHECKED_SCALARS = 8

_AS_STRIDED = Operator(aten.as_strided.default)
_VIEW_DTYPE = Operator(aten.view.dtype)
_VIEW_AS_REAL = Operator(aten.view_as_real.default)
_CONJ = Operator(aten._conj.default)
_NEG_VIEW = Operator(aten._neg_view.default)
_EMPTY = Operator(aten.empty_strided.default)
_DEVICE = torch.device("cpu")
# Looking these up in the enumeration takes a third of the time of making a key.
_TENSOR, _STATIC, _SCALAR = Kind.TENSOR, Kind.STATIC, Kind.SCALAR
# As native/buffer_bindings.cpp says it of what is no tensor of the device.
_NO_BUFFER = -2


# How many instructions are looked at to see that a program does nothing.
_MOST_VIEWS = 8

# Cuts the pending program: recording knows nothing of execution.
pending_full = Hook[[], None]("pending program full", "before a call that would exceed the setting pending_bound")


class _InputMarker:
    def __repr__(self) -> str:
        return "input"


_INPUT = _InputMarker()


def _is_idle(instruction: object) -> bool:
    """True for an instruction that computes nothing: an input, or a view."""
    if isinstance(instruction, Call):
        kinds = {item.kind for item in instruction.flat_returns}
        return kinds == {ReturnKind.VIEW}
    return isinstance(instruction, Input)


def device_mismatch(tensor: torch.Tensor, operator: Operator | None) -> DeviceMismatchError:
    """The error of a call that has a tensor of another device where it cannot."""
    what = operator.name if operator is not None else "an operation"
    return DeviceMismatchError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{ordinal.device} and {tensor.device}! (in {what})",
        source=str(current_source()),
        hint="move the tensor with .to('ltc')",
    )


def check_foreign(tensor: torch.Tensor, operator: Operator | None) -> None:
    """Refuse a tensor of another device among those of the device, but on the CPU what PyTorch's other devices take
    from there: zero-dimensional tensors and indices."""
    name = operator.name if operator is not None else ""
    allowed = tensor.dim() == 0 or name in _CPU_OPERANDS or (tensor.dtype is torch.int64 and name in _CPU_INDICES)
    if tensor.device.type != "cpu" or not allowed:
        raise device_mismatch(tensor, operator)


if TYPE_CHECKING or native is None:  # noqa: SIM108
    _State = PendingState
else:
    _State = native.PendingState


class Recorder(_State):
    """The pending program.

    A tensor's `_ltc` attribute is the absolute number of its value: below `base`, it is stale. It is only a cache; the
    truth is the buffer on the storage plus the tensor's spec.
    """

    __slots__ = (
        *(("lock",) if native is None else ()),
        "tree",
        "numbers",
        "bound",
        "lines",
        "path_values",
        "templates",
        "awaited",
        "undivided",
        "forward",
        "torch_state",
    )

    def __init__(self) -> None:
        super().__init__()
        if native is None:
            self.lock = threading.RLock()
        self.tree = Tree()
        self.torch_state = TorchState.current()
        self.tree.select(self.torch_state)
        self.path_values = PathValues(self.tree.root)
        self.templates = CallTemplates()
        # Numbers of the call being recorded; they join `scalars` once the call is known to be right.
        self.numbers: list[Any] = []
        # What wants to be told when the pending program has been queued; see `async_item`.
        self.awaited: list[Any] = []
        self.forward = ForwardLines()
        self.node = self.tree.root
        self.bound = settings.pending_bound
        # True while calls are recorded that must be in one program, which they may make longer than the bound.
        self.undivided = False
        self.reset()

    def reset(self) -> None:
        """Begin the next program."""
        self.forward.end(self.node)
        self.base = self.count
        self.node = self.tree.root
        self.clear()
        # The present line of each call that may fail, by the identity of its instruction: the line kept with the
        # instruction is that of its first recording.
        self.lines: dict[int, Source] = {}
        self.numbers.clear()
        self.random = False
        self.started = 0.0
        if self.bound != settings.pending_bound:
            # Known paths are followed without looking at the bound: paths made under another bound must go.
            self.bound = settings.pending_bound
            self.tree.clear()
            self.node = self.tree.root

    def forget_views(self) -> bool:
        """Begin the next program if the pending one does nothing: a few views of inputs. False when it does something,
        or is long. Code that reads a tensor element by element would make it longer and longer."""
        with self.lock:
            node = self.node
            if not 0 < node.depth <= _MOST_VIEWS or self.awaited:
                return False
            while node.parent is not None:
                if not _is_idle(node.instruction):
                    return False
                node = node.parent
            self.reset()
            return True

    def enter_state(self, state: TorchState) -> None:
        """Record in another state of PyTorch's global switches from now on. Nothing is pending."""
        self.torch_state = state
        self.templates.clear()
        self.tree.select(state)
        self.node = self.tree.root

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Let others record meanwhile: around every wait for a worker, which may need the lock to go on.

        Whoever waits while a caller of theirs holds the lock (a listener, inside a kernel or a read) finds the pending
        program changed afterwards.
        """
        lock: Any = self.lock
        if not lock._is_owned():
            yield
            return
        held = lock._release_save()
        try:
            yield
        finally:
            lock._acquire_restore(held)

    @property
    def empty(self) -> bool:
        """True when nothing is pending."""
        return self.node.parent is None

    # ---- operands -------------------------------------------------------------------------------------------------

    def operand(self, value: Any, operator: Operator | None = None) -> Any:
        """The key part for a tensor argument: its value number, or the type of a Python number in its place."""
        if value is None:
            return None
        if native is not None:
            found: int = native.number_of(value)
            if found >= 0:
                return found
            if found == _NO_BUFFER:
                return self._other_operand(value, operator)
            return self.value_of(buffer_of(value), spec_of(value)) - self.base
        try:
            buffer: Buffer = storage_of(value).handle  # type: ignore[attr-defined]
        except (AttributeError, TypeError, NotImplementedError):
            return self._other_operand(value, operator)
        # The tensor's own number comes first: after a resize, buffer and spec alone do not tell it from a view.
        number: int = getattr(value, "_ltc", -1)
        if number < self.base:
            number = value._ltc = self.value_of(buffer, spec_of(value))
        return number - self.base

    def target(self, value: Any, operator: Operator) -> Any:
        """The key part for a tensor argument that the call writes: of a CPU tensor, only a copy would be written."""
        if value is not None and value.device.type != "ltc":
            raise device_mismatch(value, operator)
        return self.operand(value, operator)

    def operands(self, values: Any, operator: Operator) -> tuple[Any, ...] | None:
        """The key part for a list of tensors."""
        return self._parts(values, operator, self.operand)

    def targets(self, values: Any, operator: Operator) -> tuple[Any, ...] | None:
        """The key part for a list of tensors that the call writes."""
        return self._parts(values, operator, self.target)

    def _parts(self, values: Any, operator: Operator, slow: Callable[[Any, Operator], Any]) -> tuple[Any, ...] | None:
        if values is None:
            return None
        parts: list[Any] = []
        if native is not None:
            return tuple([slow(value, operator) for value in values])
        for value in values:
            number = getattr(value, "_ltc", -1) - self.base
            parts.append(number if number >= 0 else slow(value, operator))
        return tuple(parts)

    def _other_operand(self, value: Any, operator: Operator | None) -> Any:
        """The key part for what is no tensor of this device."""
        kind = type(value)
        if kind in NUMBER_TYPES:
            self.numbers.append(value)
            return kind
        if value.device.type != "ltc":
            return self._foreign(value, operator)
        # It has no buffer, and that is an error.
        return self.value_of(buffer_of(value), spec_of(value)) - self.base

    def value_of(self, buffer: Buffer, spec: Spec) -> int:
        """The absolute number of the value that is `buffer` seen as `spec`, recording a view or an input if need be."""
        base = self.base
        number = buffer.value_of(spec, base)
        if number >= 0:
            return number
        if buffer.number >= base:
            return self._derive(buffer, spec)
        if buffer.data is None and buffer.number < 0:
            self._define_empty(buffer)
            return buffer.number if buffer.spec is spec else self._derive(buffer, spec)
        return self._input(buffer, spec)

    def remember_view(self, buffer: Buffer, spec: Spec, number: int) -> None:
        """Let later lookups of this spec on this buffer find value `number`."""
        buffer.remember_view(spec, self.base, number)

    def _input(self, buffer: Buffer, spec: Spec) -> int:
        index = self.input_place(buffer)
        key = (_INPUT, index, spec)
        node = self.node
        child = node.next
        if child.key != key:
            found = self.tree.find(node, key)
            if found is None:
                found = Node(key, node, Input(index, spec, self.count - self.base, UNKNOWN))
                found.made = 1
                self.tree.add(found)
            child = found
        if native is not None:
            link_input(node, child, index, spec)
        if not self.started:
            self.begin()
        number: int = self.step_input(child, buffer)
        self.remember_view(buffer, spec, number)
        return number

    def _define_empty(self, buffer: Buffer) -> None:
        spec = buffer.spec
        statics = (spec.size, spec.stride, spec.dtype, None, True)
        values = (spec.size, spec.stride, spec.dtype, None, _DEVICE, None)
        child = self._internal((_EMPTY, *statics), _EMPTY, values, ())
        if native is not None:
            link_empty(self.node, child, spec)
        self.step_empty(child, buffer)

    def _derive(self, buffer: Buffer, spec: Spec) -> int:
        """Record the views that lead from the buffer's defining value to `spec`."""
        number, have = buffer.number, buffer.spec
        if have.dtype is not spec.dtype:
            if have.dtype.is_complex and have.dtype.to_real() is spec.dtype:
                number, have = self._view(_VIEW_AS_REAL, number, have)
            else:
                widest = max(have.dtype.itemsize, spec.dtype.itemsize)
                if have.dtype.itemsize != spec.dtype.itemsize and (have.stride[-1:] != (1,) or have.offset % widest):
                    # Elements of another size can be seen where the last dimension is dense: all memory in a row.
                    size = buffer.size_bytes // widest * widest // have.dtype.itemsize
                    number, have = self._view(_AS_STRIDED, number, have, (size,), (1,), 0)
                number, have = self._view(_VIEW_DTYPE, number, have, spec.dtype)
        if (have.size, have.stride, have.offset) != (spec.size, spec.stride, spec.offset):
            number, have = self._view(_AS_STRIDED, number, have, spec.size, spec.stride, spec.offset)
        if have.conj != spec.conj:
            number, have = self._view(_CONJ, number, have)
        if have.neg != spec.neg:
            number, have = self._view(_NEG_VIEW, number, have)
        self.remember_view(buffer, spec, number)
        return number

    def _view(self, operator: Operator, number: int, have: Spec, *statics: Any) -> tuple[int, Spec]:
        key = (operator, number - self.base, *statics)
        child = self._internal(key, operator, (OperandIndex(0), *statics), (have,))
        return self.step_call(child, []), child.spec

    def _internal(self, key: Key, operator: Operator, values: tuple[Any, ...], specs: tuple[Spec, ...]) -> Node:
        """The child for a call that the recorder itself needs."""
        child = self.tree.find(self.node, key)
        if child is None:
            child = self._extend(key, operator, values, specs)
        if not self.started:
            self.begin()
        return child

    def _foreign(self, tensor: torch.Tensor, operator: Operator | None) -> int:
        """A CPU tensor among lazy ones: a zero-dimensional one, or an index, is uploaded as it is now."""
        check_foreign(tensor, operator)
        return self._input(*self.adopt(tensor)) - self.base

    def adopt(self, tensor: torch.Tensor) -> tuple[Buffer, Spec]:
        """A new buffer with a copy of this CPU tensor, as it is now."""
        data = tensor.detach().clone(memory_format=torch.contiguous_format)
        data = data.to(physical_device())
        spec = spec_of(data)
        return new_buffer(spec, data=data), spec

    # ---- steps ----------------------------------------------------------------------------------------------------

    def step(self, child: Node) -> int:
        """Move to the child of a call: its run-time numbers become numbers of the program; its values are numbered from
        the returned number on."""
        if not self.started:
            self.begin()
        number: int = self.step_call(child, self.numbers)
        self.numbers.clear()
        return number

    def key_of(self, operator: Operator, values: tuple[Any, ...]) -> Key:
        """The key of a call, made argument by argument: the slow way, for calls without a kernel of their own."""
        parts: list[Any] = [operator]
        for argument, kind, value in zip(operator.arguments, operator.kinds, values, strict=True):
            if kind is _TENSOR:
                parts.append((self.target if argument.written else self.operand)(value, operator))
            elif kind is _STATIC:
                parts.append(freeze(value))
            elif kind is _SCALAR:
                # Identity: a default that was filled in, not a number that happens to equal it.
                parts.append(DEFAULT if value is argument.default else self.scalar(value))
            elif kind is Kind.TENSORS:
                parts.append((self.targets if argument.written else self.operands)(value, operator))
            elif kind is Kind.SCALARS:
                parts.append(tuple([self.scalar(item) for item in value]))
            elif kind is Kind.STATIC_SCALAR:
                parts.append((type(value), value))
            elif kind is Kind.DEVICE:
                parts.append(self.device(value))
        return tuple(parts)

    def device(self, value: torch.device | None) -> bool:
        """The key part for a device argument, which can only name the one device there is."""
        if value is None:
            return False
        if value.type != "ltc" or not ordinal.is_own(value.index):
            raise DeviceMismatchError(ordinal.refusal(value), hint="use device='ltc'")
        return True

    def scalar(self, value: Any) -> type:
        """The key part for a run-time number."""
        kind = type(value)
        if kind not in NUMBER_TYPES:
            value = plain_number(value)
            kind = type(value)
        self.numbers.append(value)
        return kind

    def advance(self, key: Key, operator: Operator, values: tuple[Any, ...]) -> Node:
        """The child for this call, found or made. Raises what eager would raise for wrong arguments.

        Whoever calls this clears `numbers` when anything raises before the call is taken.
        """
        if self.node.depth >= self.bound and not self.undivided:
            self.numbers.clear()
            pending_full()
            key = self.key_of(operator, values)
        child = self.tree.find(self.node, key)
        if child is None:
            child = self._extend(key, operator, values)
        if not self.started:
            self.begin()
        return child

    def begin(self) -> None:
        """The first call of a program."""
        self.started = time.perf_counter()
        self.forward.begin()

    def preview(self, operator: Operator, values: tuple[Any, ...]) -> Inferred:
        """Shape inference of a call that is not recorded."""
        tensors = operand_tensors(operator, values)
        return self._infer(operator, values, [spec_of(t) for t in tensors], storage_groups(tensors), ())

    def note_line(self, child: Node) -> None:
        """Remember the line that records this call now, if it may fail."""
        if child.located:
            self.lines[id(child.instruction)] = current_source()

    def check_numbers(self, child: Node, operator: Operator, values: tuple[Any, ...]) -> None:
        """Ask the meta kernel whether the numbers of the call are acceptable, if they were not seen before."""
        seen, numbers = child.checked, tuple(self.numbers)
        if seen is None or numbers in seen:
            return
        if len(seen) >= _CHECKED_SCALARS:
            child.checked = None
            return
        operands = self._operands_of(child.key, operator, values)
        if self._by_rule(operator, operands) is None:
            tensors = operand_tensors(operator, values)
            self._infer(operator, values, [spec_of(t) for t in tensors], storage_groups(tensors), numbers)
        seen.add(numbers)

    def _extend(
        self, key: Key, operator: Operator, values: tuple[Any, ...], specs: Sequence[Spec] | None = None
    ) -> Node:
        """A new child for this call. `specs` are those of its operands, where there are no tensors to ask."""
        path = self.path_values
        path.follow(self.node)
        signature = self.templates.signature(key, operator, self.numbers, path.specs, path.roots)
        template = None if signature is None else self.templates.find(signature)
        if template is not None:
            source, sequence = self._site(values)
            first = self.count - self.base
            call = template.instruction(key, operator, self.scalar_count, first, source, sequence)
            child = Node(key, self.node, call)
            template.describe(child)
        else:
            child = self._infer_child(key, operator, values, specs, signature)
        if operator.checks_numbers and self.numbers:
            child.checked = {tuple(self.numbers)}
        if operator.located:
            child.located = may_fail(child.instruction)  # type: ignore[arg-type]
        return self.tree.add(child)

    def _infer_child(
        self, key: Key, operator: Operator, values: tuple[Any, ...], specs: Sequence[Spec] | None, signature: Key | None
    ) -> Node:
        """As yet nobody's child, for a call of which no template is known."""
        operands = self._operands_of(key, operator, values)
        returns = self._by_rule(operator, operands)
        if returns is None:
            signature = None
            returns = self._by_pytorch(operator, values, specs)
        first = self.count - self.base
        numbers = result_numbers(returns, first)
        source, sequence = self._site(values)
        call = Call(
            operator.op,
            operands.args,
            operands.kwargs,
            operands.operands,
            returns,
            first,
            source,
            operator.random,
            numbers,
            ObservedLayout(),
            sequence,
        )
        child = Node(key, self.node, call)
        child.made = len(numbers) - numbers.count(-1)
        cache_result_specs(child, returns, operands.operands, self.path_values.specs)
        if signature is not None:
            self.templates.keep(signature, child, call)
        return child

    def _site(self, values: tuple[Any, ...]) -> tuple[Source, int | None]:
        """The line of a call that is recorded for the first time, and the number of its autograd node."""
        source = call_source(2)
        if source.backward:
            return self.forward.line_of(source, self.node), None
        return source, self.forward.number_of(values) if torch.is_grad_enabled() else None

    def _operands_of(self, key: Key, operator: Operator, values: tuple[Any, ...]) -> CallOperands:
        self.path_values.follow(self.node)
        return make_operands(key, operator, values, self.scalar_count, self.path_values.specs)

    def _by_rule(self, operator: Operator, operands: CallOperands) -> Returns | None:
        """The returns of the call by shape rule, or None."""
        if operator.rule is None:
            return None
        for position in operator.required:
            if operands.shape_args[position] is None:
                return None
        specs, groups = self.path_values.of(operands.operands, groups=bool(operator.written))
        return apply_rule(operator.rule, operands.shape_args, specs, groups)

    def _by_pytorch(self, operator: Operator, values: tuple[Any, ...], specs: Sequence[Spec] | None) -> Returns:
        """The returns of the call, inferred by PyTorch."""
        # Numbers take part where they are checked: what is remembered of other numbers says nothing about these.
        numbers = tuple(self.numbers) if operator.checks_numbers else ()
        if specs is not None:
            return self._infer(operator, values, specs, range(len(specs)), numbers).returns
        tensors = operand_tensors(operator, values)
        return self._infer(operator, values, [spec_of(t) for t in tensors], storage_groups(tensors), numbers).returns

    def _infer(self, operator: Operator, values: tuple[Any, ...], specs: Any, groups: Any, numbers: Any) -> Inferred:
        """Ask for the call's returns with tensors replaced by their place among the operands."""
        places = iter(range(len(specs)))

        def place(value: Any) -> Any:
            return OperandIndex(next(places)) if isinstance(value, (torch.Tensor, OperandIndex)) else value

        args: list[Any] = []
        for argument, value in zip(operator.arguments, values, strict=True):
            if argument.kind is Kind.TENSOR:
                args.append(place(value))
            elif argument.kind is Kind.TENSORS and value is not None:
                args.append([place(item) for item in value])
            elif argument.kind is Kind.DROPPED:
                args.append(None)
            else:
                args.append(value)
        signature = (operator, tuple(specs), tuple(groups), numbers, statics_of(operator, values))
        split = operator.positional
        kwargs = {a.name: v for a, v in zip(operator.arguments[split:], args[split:], strict=True)}
        return infer(operator.op, args[:split], kwargs, specs, groups, signature)


recorder = Recorder()
recorder.set_note_line(recorder.note_line)
recorder.set_begin(recorder.begin)
settings.watch("device_type", recorder.templates.clear)
# The child finds the lock free, and nothing half recorded.
os.register_at_fork(
    before=recorder.lock.acquire, after_in_parent=recorder.lock.release, after_in_child=recorder.lock.release
)
