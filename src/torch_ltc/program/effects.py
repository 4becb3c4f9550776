"""Calls that may fail on data although their shapes are right.

Where it is not known that a call cannot, it may. What a program writes to its inputs before the last such call is
saved before a compiled run, so that the run can be repeated call by call when it fails; and such calls note their
line at every recording.
"""

from __future__ import annotations

from torch_ltc.program.instruction import Call, Scalar

# Operators whose result size depends on the value of a number.
SIZED_BY_SCALARS = frozenset({"aten::arange", "aten::range"})

_ARITHMETIC = (
    "add sub rsub mul neg abs sign sgn sqrt rsqrt square reciprocal exp exp2 expm1 log log2 log10 log1p sin cos "
    "tan asin acos atan atan2 sinh cosh tanh erf erfc floor ceil round trunc frac clamp clamp_min clamp_max "
    "maximum minimum lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan "
    "isinf where masked_fill sigmoid sigmoid_backward tanh_backward threshold_backward relu gelu gelu_backward "
    "silu silu_backward elu elu_backward leaky_relu leaky_relu_backward hardtanh hardtanh_backward softplus "
    "softplus_backward mish mish_backward hardswish hardswish_backward nan_to_num bitwise_and bitwise_or bitwise_xor "
    "bitwise_not xlogy"
)
_FLOAT_ARITHMETIC = "div true_divide pow remainder fmod floor_divide"
_REDUCTIONS = (
    "sum mean amax amin max min argmax argmin prod var std var_mean norm linalg_vector_norm cumsum any all "
    "logsumexp _softmax _softmax_backward_data _safe_softmax _log_softmax _log_softmax_backward_data softmax "
    "log_softmax topk sort"
)
_LAYERS = (
    "mm bmm addmm addmv baddbmm addbmm mv dot matmul linear linear_backward matmul_backward "
    "convolution convolution_backward native_batch_norm native_batch_norm_backward "
    "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training "
    "native_layer_norm "
    "native_layer_norm_backward native_group_norm "
    "native_group_norm_backward max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d "
    "avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward nll_loss_backward "
    "embedding_dense_backward mse_loss mse_loss_backward native_dropout_backward smooth_l1_loss "
    "smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy_with_logits "
    "upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
    "mkldnn_rnn_layer mkldnn_rnn_layer_backward"
)
_MEMORY = (
    "copy_ clone fill_ zero_ fill zeros ones full empty empty_strided arange eye linspace scalar_tensor _to_copy "
    "cat stack repeat roll flip tril triu constant_pad_nd slice_backward select_backward _unsafe_view resize_ "
    "copy zero slice_scatter select_scatter"
)
_SAFE = frozenset(
    name + tail for name in f"{_ARITHMETIC} {_REDUCTIONS} {_LAYERS} {_MEMORY}".split() for tail in ("", "_")
)
_SAFE_ON_FLOATS = frozenset(name + tail for name in _FLOAT_ARITHMETIC.split() for tail in ("", "_"))


# Of those, calls that refuse a number that does not fit their dtype or their meaning.
_NUMBERED = "fill full clamp clamp_min clamp_max masked_fill where scalar_tensor constant_pad_nd"
_REFUSES_NUMBERS = frozenset(name + tail for name in _NUMBERED.split() for tail in ("", "_"))


# Draws whose parameters are numbers, which are checked at the call; a tensor of probabilities may be wrong.
_DRAWS = frozenset(
    f"{name}_"
    for name in ("bernoulli", "uniform", "normal", "random", "exponential", "geometric", "cauchy", "log_normal")
)


def is_safe_view(call_schema: object) -> bool:
    """True when everything an operator returns is a view: it reads no data."""
    returns = getattr(call_schema, "returns", ())
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def operator_may_fail(name: str, schema: object) -> bool:
    """True unless it is known that no call of this operator ("aten::add") fails on data, whatever its dtypes."""
    namespace, _, plain = name.partition("::")
    if namespace != "aten":
        return True
    if plain.startswith(("_foreach_", "_fused_")) or is_safe_view(schema):
        return False
    return plain not in _SAFE or plain in _REFUSES_NUMBERS


def _says_so(call: Call) -> bool:
    """True for an operator of this package whose last argument says whether the call may fail."""
    arguments = call.op._schema.arguments
    return call.op.namespace == "torch_ltc" and bool(arguments) and arguments[-1].name == "may_fail"


def may_fail(call: Call) -> bool:
    """True unless it is known that this call's success does not depend on data."""
    name = call.op._schema.name
    plain = name.removeprefix("aten::")
    if _says_so(call):
        return bool(call.args[-1])
    if not operator_may_fail(name, call.op._schema):
        return False
    if plain in _SAFE:
        return any(isinstance(operand, Scalar) for operand in call.args)
    if plain in _DRAWS:
        return len(call.operands) > 1
    if plain in _SAFE_ON_FLOATS:
        specs = [item.spec for item in call.flat_returns if item.spec is not None]
        return not all(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in specs)
    return True
