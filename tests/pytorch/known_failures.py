"""The one table of tests of PyTorch that fail on the device, with the reason of each."""

import enum
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.pytorch.records import Record


class Kind(enum.Enum):
    """Why a test fails."""

    DEFECT = "defect"
    MISSING = "missing feature"
    ARTEFACT = "artefact of the test"
    DECISION = "by decision"


@dataclass(frozen=True)
class Known:
    """Tests of a file that fail, by patterns of `Class.method` with the names that they have on the CPU."""

    file: str
    patterns: tuple[str, ...]
    kind: Kind
    reason: str

    def matches(self, file: str, record: Record) -> bool:
        return file == self.file and any(fnmatchcase(record.name, pattern) for pattern in self.patterns)


KNOWN_FAILURES: tuple[Known, ...] = (
    Known(
        "test_indexing",
        ("NumpyTestsCPU.test_boolean_assignment_value_mismatch_cpu",),
        Kind.DECISION,
        "a write that fails on its data loses a target that was made in the same program (decision 0006)",
    ),
    Known(
        "test_tensor_creation_ops",
        ("*.test_block_diag_cpu",),
        Kind.ARTEFACT,
        "tensors of two devices: the message is that of most operators, not the one of block_diag",
    ),
    Known(
        "test_nn",
        ("TestNNDeviceTypeCPU.test_upsamplingBiMode2d_nonsupported_dtypes_*_uint8_cpu_uint8",),
        Kind.ARTEFACT,
        "the test wants an error of every device but the CPU, by name; the device computes as the CPU does",
    ),
    Known(
        "test_modules",
        ("TestModuleCPU.test_errors_nn_Embedding_*",),
        Kind.ARTEFACT,
        "the test leaves the module on the CPU: tensors of two devices are said before their dtypes",
    ),
    Known(
        "test_nn",
        ("TestNNDeviceTypeCPU.test_transformerencoderlayer_cpu_float32",),
        Kind.ARTEFACT,
        "the test wants the slow path of every device but CPU and CUDA, by name; the device computes as the CPU does",
    ),
    Known(
        "test_torch",
        ("TestTorchDeviceTypeCPU.test_broadcast_fn_map*_cpu",),
        Kind.ARTEFACT,
        "map_ and map2_ are for CPU tensors alone; the test leaves other devices out by name",
    ),
    Known(
        "test_torch",
        ("TestTorchDeviceTypeCPU.test_grad_scaler_deprecated_warning_cpu",),
        Kind.ARTEFACT,
        "the test calls the CPU's GradScaler on every device but CUDA, and wants the name of the device in its message",
    ),
    Known(
        "test_torch",
        ("TestTorchDeviceTypeCPU.test_grad_scaling_state_dict_cpu",),
        Kind.ARTEFACT,
        "names the class of tensors of the CPU",
    ),
    Known(
        "test_torch",
        ("*.test_complex_half_experimental_warning_cpu",),
        Kind.DECISION,
        "a kernel warns when it runs, and of new memory when it is written to: the test reads nothing",
    ),
    Known(
        "test_ops",
        ("TestCommonCPU.test_python_ref_errors__refs_where_cpu",),
        Kind.ARTEFACT,
        "tensors of two devices: the message is that of torch._refs on every device but the CPU",
    ),
    Known(
        "test_ops",
        ("TestCommonCPU.test_dtypes_nn_functional_multilabel_margin_loss_cpu",),
        Kind.DECISION,
        "the device computes by a cast what the CPU has no kernel for: more dtypes than the database lists",
    ),
    Known(
        "test_linalg",
        ("TestLinalgCPU.test__int4_mm_*", "TestLinalgCPU.test_compile_int4_mm_*"),
        Kind.ARTEFACT,
        "the test packs weights with another operator on every device but the CPU, by name; the CPU has none such",
    ),
    Known(
        "test_linalg",
        ("TestLinalgCPU.test_linalg_lstsq_input_checks_*",),
        Kind.ARTEFACT,
        "expects CUDA's message on every device but the CPU",
    ),
    Known(
        "test_linalg",
        ("TestLinalgCPU.test_linalg_lu_family_*",),
        Kind.DECISION,
        "catches an error that depends on data at the call; it comes at the sync (decision 0006)",
    ),
    Known(
        "test_binary_ufuncs",
        ("TestBinaryUfuncsCPU.test_pow_cpu_float16",),
        Kind.ARTEFACT,
        "the test wants the refusal of complex half on the CPU alone, by name; the device refuses it as the CPU does",
    ),
    Known(
        "test_nestedtensor",
        ("TestNestedTensorSubclassCPU.test_to_padded_tensor_compile_*",),
        Kind.ARTEFACT,
        "the test looks for calls in the code that Inductor generates; torch.compile generates none for the device",
    ),
    Known(
        "test_sparse_csr",
        ("TestSparseCSRCPU.test_block_triangular_solve_*",),
        Kind.ARTEFACT,
        "the test leaves out on the CPU, by name, what fails there; it fails on the device alike",
    ),
    Known(
        "test_sparse_csr",
        ("TestSparseCompressedCPU.test_sparse_compressed_constructor_shape_and_device_inference_*_from_list_*",),
        Kind.ARTEFACT,
        "lists without a device make a tensor of the CPU; the test leaves out CUDA alone, by name",
    ),
    Known(
        "test_sparse",
        ("TestSparseAnyCPU.test_binary_operation_mul_SparseCSR_cpu_bool",),
        Kind.ARTEFACT,
        "the database leaves out on the CPU, by name, what fails there; it fails on the device alike",
    ),
)
