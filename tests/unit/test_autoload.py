"""Autoload: at `import torch` the device gets its name, and nothing more until it is touched."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings

import pytest

from torch_ltc.errors import UnsupportedTorchError, UntestedTorchWarning
from torch_ltc.pytorch.versions import check_torch_version

# What PyTorch does at the end of its import where the package is installed, and what a script sees then.
PREPARE = """
import os
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import sys, time
import torch
import torch_ltc_autoload
began = time.perf_counter()
torch_ltc_autoload.autoload()
duration_s = time.perf_counter() - began
assert "torch_ltc" not in sys.modules
"""


def run(script: str) -> list[str]:
    """The lines that the script prints after the preparation, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_autoload_claims_the_name_and_imports_nothing() -> None:
    lines = run(
        """
        print(torch.device("ltc"))
        print(torch._C._get_privateuse1_backend_name())
        print(torch.ones(2).sum().item())
        torch.manual_seed(1)
        print("torch_ltc" in sys.modules)
        print(duration_s)
        """
    )
    assert lines[:4] == ["ltc", "ltc", "2.0", "False"]
    # Reported, not judged: a timing is no test.
    print(f"autoload took {float(lines[4]) * 1e3:.2f} ms")


def test_batches_are_pinned_before_the_package_is_loaded_and_after() -> None:
    lines = run(
        """
        def batches():
            loader = torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2, pin_memory=True)
            return [batch.tolist() for batch in loader], torch.ones(1).pin_memory().tolist()

        print(batches(), "torch_ltc" in sys.modules)
        torch.ltc.synchronize()
        print(batches(), "torch_ltc" in sys.modules)
        """
    )
    assert lines == [
        "([[0.0, 1.0], [2.0, 3.0]], [1.0]) False",
        "([[0.0, 1.0], [2.0, 3.0]], [1.0]) True",
    ]


@pytest.mark.parametrize(
    "touch",
    [
        "torch.ones(2).to('ltc')",
        "torch.tensor([1.0, 1.0], device='ltc')",
        pytest.param("torch.ones(2, device='ltc')", marks=pytest.mark.slow),
        pytest.param("torch.nn.Linear(2, 2).to('ltc').weight", marks=pytest.mark.slow),
        pytest.param("torch.empty(2, device=torch.device('ltc', 0)).fill_(1)", marks=pytest.mark.slow),
        pytest.param("torch.ltc.synchronize() or torch.ones(2, device='ltc')", marks=pytest.mark.slow),
        pytest.param("torch.randn(2, device='ltc')", marks=pytest.mark.slow),
    ],
)
def test_first_touch_loads_the_package_and_works(touch: str) -> None:
    lines = run(
        f"""
        x = {touch}
        print("torch_ltc" in sys.modules, x.device)
        print((x + 1).cpu().shape[0])
        import torch_ltc
        print(torch.ltc.__name__, torch.ltc.device_count())
        """
    )
    assert lines[0] == "True ltc:0"
    assert lines[1] == "2"
    assert lines[2].endswith("1")


def test_the_module_answers_after_autoload() -> None:
    assert run(
        "print(torch.ltc.is_available(), torch.ltc.device_count(), torch.accelerator.current_accelerator())"
    ) == ["True 1 ltc"]


def test_a_slot_taken_by_another_package_is_left_alone() -> None:
    script = """
    import os
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    torch.utils.rename_privateuse1_backend("other")
    import torch_ltc_autoload
    torch_ltc_autoload.autoload()
    print(torch._C._get_privateuse1_backend_name())
    try:
        import torch_ltc
    except RuntimeError as error:
        print(str(error).splitlines()[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == ["other", "the device slot that torch_ltc uses is taken by 'other'"], done.stderr


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cpu", "2.14.1", "2.15.0", "2.15.0a0+git1234"])
def test_tested_versions_are_accepted_without_a_word(version: str) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        check_torch_version(version)
    assert shown == []


@pytest.mark.parametrize("version", ["2.16.0", "2.20.1+cu130", "3.0.0"])
def test_newer_versions_are_tried_with_a_warning(version: str) -> None:
    with pytest.warns(UntestedTorchWarning, match=r"was tested with PyTorch 2.11 to 2.15, found") as shown:
        check_torch_version(version)
    assert [version in str(one.message) for one in shown] == [True]


@pytest.mark.parametrize("version", ["2.9.0", "2.10.1+cu128", "1.13.1"])
def test_older_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(UnsupportedTorchError, match=r"needs PyTorch 2.11 or newer, found") as caught:
        check_torch_version(version)
    assert version in str(caught.value)
    assert "pip install 'torch>=2.11,<2.16'" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_the_first_program_is_recorded_without_a_full_garbage_collection() -> None:
    code = """
import gc
import torch, torch_ltc
full = []
gc.callbacks.append(lambda phase, info: full.append(1) if phase == "start" and info["generation"] == 2 else None)
assert gc.isenabled()
x = y = torch.ones(16).to("ltc")
for _ in range(3000):
    y = y + x
assert y[0].item() == 3001.0
print(len(full))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr
