"""PyTorch's files of tests that are run, and how much of each."""

FULL = (
    "test_view_ops", "test_indexing", "test_shape_ops", "test_torch", "test_tensor_creation_ops",
    "test_scatter_gather_ops", "test_sort_and_select", "test_autograd", "test_nn", "test_modules", "test_optim",
    "test_serialization", "test_type_promotion",
)  # fmt: skip
"""Files of which every test is run."""
SAMPLED = (
    "test_foreach", "test_binary_ufuncs", "test_unary_ufuncs", "test_reductions", "test_linalg", "test_ops",
    "test_ops_gradients", "test_ops_fwd_gradients", "test_spectral_ops", "test_complex", "test_masked",
    "test_segment_reductions", "test_numpy_interop", "test_native_mha", "test_transformers", "test_expanded_weights",
    "test_nestedtensor", "nn/test_convolution", "nn/test_pooling", "nn/test_dropout", "nn/test_embedding",
    "nn/test_multihead_attention", "test_sparse", "test_sparse_csr", "test_dlpack", "test_legacy_vmap", "test_testing",
)  # fmt: skip
"""Files of which some tests are run, chosen by seed."""
LAZY = tuple(
    f"lazy/test_{name}"
    for name in ("bindings", "debug_util", "extract_compiled_graph", "functionalization", "generator", "meta_kernel",
                 "reuse_ir", "step_closures", "ts_opinfo")
)  # fmt: skip
"""The tests of the original, with `torch._lazy` replaced by this package."""
FILES = (*FULL, *SAMPLED, *LAZY)
