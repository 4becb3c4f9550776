"""The one table of what the original's tests say of it that is otherwise here on purpose, with the reason of each.

A test runs with these words in the place of the original's; everything else in it holds as it stands.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """Words of a test file, the words that hold here, and why."""

    file: str
    original: str
    here: str
    reason: str


_TEXT = "the text of a program is another"
_COUNTERS = "names of counters"
_GENERATOR = "a generator of the caller's is drawn from at once: another seed is not another program"

DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "test_functionalization",
        "torch._C._unsafe_reset_storage(model.fc1.weight)",
        "pass",
        "a tensor has one storage, which cannot be taken from it as on the CPU; there is no second one to reset",
    ),
    Difference(
        "test_functionalization",
        "assert sync_tensors == 2",
        "assert sync_tensors == 1",
        "no second tensor is synced for a functional wrapper, which is not there",
    ),
    Difference(
        "test_functionalization",
        "%0 = [Float[3]] lazy_tensors::device_data(), device=CPU0, ROOT=0",
        "%0: float32[3] = input(buffer=0)",
        _TEXT,
    ),
    Difference(
        "test_functionalization",
        "%0 = [Float[3]] lazy_tensors::device_data(), device=CPU0",
        "%0: float32[3] = input(buffer=0)",
        _TEXT,
    ),
    Difference(
        "test_functionalization",
        "%1 = [BFloat16[3]] aten::_to_copy(%0), dtype=BFloat16, layout=null, device=null, pin_memory=null, "
        "non_blocking=0, memory_format=null, ROOT=0",
        "%1: bfloat16[3] ROOT=0 = aten::_to_copy(%0, dtype=torch.bfloat16, non_blocking=False)  "
        "# test_functionalization.py:84 LazyFuncionalizationTest.test_data_assign",
        _TEXT,
    ),
    Difference("test_generator", "uncached_compile == 2", "uncached_compile == 1", _GENERATOR),
    Difference("test_generator", " cached_compile == 1", " cached_compile == 2", _GENERATOR),
    Difference(
        "test_generator",
        "latest_graph = torch._C._lazy_ts_backend._get_latest_computation_graph()",
        "return  # the seed is in no graph",
        _GENERATOR,
    ),
    Difference("test_meta_kernel", ".*not a lazy tensor.*", "to be on the same device", "the message is eager's"),
    Difference("test_ts_opinfo", 'yaml_ts["symint"]', "[]", f"{_COUNTERS}: no suffix _symint"),
    Difference(
        "test_ts_opinfo", 'FALLBACK_LIST = {"clamp"}', "FALLBACK_LIST = set()", f"{_COUNTERS}: clamp is recorded"
    ),
    Difference(
        "test_ts_opinfo",
        'f"{prefix}::{op.name}{symint_suffix}" in',
        "f\"{prefix}::{dict(norm='linalg_vector_norm', uniform='uniform_').get(op.name, op.name)}\" in",
        f"{_COUNTERS}: norm and uniform are linalg_vector_norm and uniform_",
    ),
    Difference(
        "test_ts_opinfo",
        "b, atol=1e-4",
        "b, atol=1e-4, equal_nan=True",
        "a sample that 2.6 did not have: the deviation of no elements is NaN on eager, too",
    ),
)


def reworded(file: str, text: str) -> str:
    """The text of a test file of the original with the words that hold here."""
    for each in DIFFERENCES:
        if each.file == file:
            if each.original not in text:
                raise ValueError(f"{file} does not say {each.original!r}")
            text = text.replace(each.original, each.here)
    return text
