"""The backend without JAX: it can be named, and says what is missing."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_imports_jax_before_the_backend_is_used() -> None:
    out = run(
        """
        import sys, torch, torch_ltc
        from torch_ltc.lowering.registry import registry
        import torch_ltc.backends.xla
        print("xla" in registry.names(), "jax" in sys.modules)
        """
    )
    assert out.split() == ["True", "False"]


def test_without_jax_the_error_says_what_to_install() -> None:
    out = run(
        """
        import sys
        sys.modules["jax"] = None
        import torch, torch_ltc
        try:
            torch_ltc.use_backend("xla")
        except torch_ltc.errors.BackendError as error:
            print(error)
        x = torch.ones(2, device="ltc")
        print((x + 1).tolist())
        """
    )
    assert "pip install 'torch-ltc[xla]'" in out
    assert "[2.0, 2.0]" in out
