"""What is kept for each known program, and the bound on compiled ones.

An entry hangs on the tree node where its program was cut, under the program's live outputs: it is found by comparing
keys in full. The fingerprint exists for people and files; nothing is decided by it alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict

from torch_ltc.config import settings
from torch_ltc.lowering.interface import Computation
from torch_ltc.program.instruction import Call, Program, ReturnKind, Scalar
from torch_ltc.program.render import program_text

_identities = itertools.count(1)


def next_identity() -> int:
    """A number for a new program."""
    return next(_identities)


class Entry:
    """A program, its reference computation, and its compiled one while it is kept."""

    __slots__ = (
        "program",
        "runs",
        "reference",
        "compiled",
        "backend",
        "refused",
        "op_counts",
        "restored",
        "written",
        "fingerprint",
    )

    def __init__(self, program: Program) -> None:
        self.program = program
        self.runs = 0
        self.reference: Computation | None = None
        self.compiled: Computation | None = None
        # Name of the backend that made `compiled`, and of the one that could not.
        self.backend = ""
        self.refused = ""
        self.op_counts = program.op_counts()
        self.restored = inputs_to_restore(program)
        self.written = tuple(sorted(written_inputs(program, len(program.instructions))))
        self.fingerprint = b""


# Calls that cannot fail on data when their geometry is right. Any other call may: what a program writes to its inputs
# before the last of those is saved before a compiled run, so that the run can be repeated call by call when it fails.
_ARITHMETIC = (
    "add sub rsub mul neg abs sign sgn sqrt rsqrt square reciprocal exp exp2 expm1 log log2 log10 log1p sin cos "
    "tan asin acos atan atan2 sinh cosh tanh erf erfc floor ceil round trunc frac clamp clamp_min clamp_max "
    "maximum minimum lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan "
    "isinf where masked_fill sigmoid sigmoid_backward tanh_backward threshold_backward relu gelu gelu_backward "
    "silu silu_backward elu elu_backward leaky_relu leaky_relu_backward hardtanh hardtanh_backward softplus "
    "softplus_backward mish mish_backward hardswish hardswish_backward nan_to_num"
)
_FLOAT_ARITHMETIC = "div true_divide pow remainder fmod floor_divide"
_REDUCTIONS = (
    "sum mean amax amin max min argmax argmin prod var std var_mean norm linalg_vector_norm cumsum any all "
    "logsumexp _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data softmax log_softmax topk "
    "sort"
)
_LAYERS = (
    "mm bmm addmm addmv baddbmm addbmm mv dot matmul linear convolution convolution_backward native_batch_norm "
    "native_batch_norm_backward native_layer_norm native_layer_norm_backward native_group_norm "
    "native_group_norm_backward max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d "
    "avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward nll_loss_backward "
    "embedding_dense_backward mse_loss mse_loss_backward native_dropout_backward "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "mkldnn_rnn_layer mkldnn_rnn_layer_backward"
)
_MEMORY = (
    "copy_ clone fill_ zero_ fill zeros ones full empty empty_strided arange eye linspace scalar_tensor _to_copy "
    "cat stack repeat roll flip tril triu constant_pad_nd slice_backward select_backward _unsafe_view resize_ "
    "bernoulli_ normal_ uniform_"
)
_SAFE = frozenset(
    name + tail for name in f"{_ARITHMETIC} {_REDUCTIONS} {_LAYERS} {_MEMORY}".split() for tail in ("", "_")
)
_SAFE_ON_FLOATS = frozenset(name + tail for name in _FLOAT_ARITHMETIC.split() for tail in ("", "_"))


# Of those, calls that refuse a number that does not fit their dtype or their meaning.
_NUMBERED = (
    "fill full clamp clamp_min clamp_max masked_fill where scalar_tensor constant_pad_nd bernoulli normal uniform"
)
_REFUSES_NUMBERS = frozenset(name + tail for name in _NUMBERED.split() for tail in ("", "_"))


def may_fail(call: Call) -> bool:
    """True unless it is known that the call's success does not depend on data."""
    namespace, _, name = call.op._schema.name.partition("::")
    if namespace != "aten":
        return True
    if name.startswith(("_foreach_", "_fused_")):
        return False
    if name in _SAFE:
        return name in _REFUSES_NUMBERS and any(isinstance(operand, Scalar) for operand in call.args)
    returns = call.flat_returns
    if name in _SAFE_ON_FLOATS:
        specs = [item.spec for item in returns if item.spec is not None]
        return not all(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in specs)
    # A view reads no data.
    return not returns or any(item.kind is not ReturnKind.VIEW for item in returns)


def written_inputs(program: Program, calls: int) -> set[int]:
    """Input buffers that the first `calls` calls of the program write to."""
    buffer_of_value: dict[int, int] = {i.number: i.buffer for i in program.inputs}
    written: set[int] = set()
    for call in program.calls[:calls]:
        for item, number in zip(call.flat_returns, call.numbers, strict=True):
            operand = call.operands[item.operand] if item.operand >= 0 and number >= 0 else -1
            if operand in buffer_of_value:
                buffer_of_value[number] = buffer_of_value[operand]
        written.update(buffer_of_value[n] for n in call.mutated if n in buffer_of_value)
    return written


def inputs_to_restore(program: Program) -> tuple[int, ...]:
    """Positions of the inputs that the program writes to before its last call that may fail."""
    calls = program.calls
    last = max((i for i, call in enumerate(calls) if may_fail(call)), default=0)
    first: dict[int, int] = {}
    for position, instruction in enumerate(program.inputs):
        first.setdefault(instruction.buffer, position)
    return tuple(first[buffer] for buffer in sorted(written_inputs(program, last)))


def fingerprint(program: Program) -> bytes:
    """16 bytes that stand for the program's text. Not an identity: two programs may share them."""
    return hashlib.blake2b(program_text(program).encode(), digest_size=16).digest()


class ExecutableCache:
    """Least recently used bound on compiled programs, and the fingerprint table for callers that keep only bytes."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[int, Entry] = OrderedDict()
        self._by_fingerprint: dict[bytes, Entry] = {}

    def used(self, entry: Entry) -> None:
        """A compiled entry was made or used: keep it, and drop the oldest past the bound."""
        identity = entry.program.identity
        self._compiled[identity] = entry
        self._compiled.move_to_end(identity)
        while len(self._compiled) > settings.executables_bound:
            _, oldest = self._compiled.popitem(last=False)
            oldest.compiled = None

    def dropped(self, entry: Entry) -> None:
        """The entry left the tree."""
        self._compiled.pop(entry.program.identity, None)
        self._by_fingerprint.pop(entry.fingerprint, None)

    def __len__(self) -> int:
        return len(self._compiled)

    def publish(self, entry: Entry) -> bytes:
        """Bytes by which `find` gives back exactly this entry, whatever other fingerprints are."""
        if not entry.fingerprint:
            digest = base = fingerprint(entry.program)
            attempt = 0
            while digest in self._by_fingerprint:
                attempt += 1
                digest = hashlib.blake2b(base + attempt.to_bytes(8, "little"), digest_size=16).digest()
            entry.fingerprint = digest
            self._by_fingerprint[digest] = entry
        return entry.fingerprint

    def find(self, digest: bytes) -> Entry | None:
        """The entry published under these bytes."""
        return self._by_fingerprint.get(digest)

    def clear(self) -> None:
        """Forget compiled programs and fingerprints."""
        for entry in self._compiled.values():
            entry.compiled = None
        self._compiled.clear()
        self._by_fingerprint.clear()


executables = ExecutableCache()
