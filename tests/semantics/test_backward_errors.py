"""An exception in a hook ends the backward pass, not the process."""

import subprocess
import sys

import pytest

SCRIPT = """
import torch, torch_ltc

def fail(_):
    raise ZeroDivisionError("in the hook")

x = torch.ones(3).to("ltc").requires_grad_()
y = x * 2
{register}
try:
    (y * y).sum().backward()
except ZeroDivisionError as error:
    print("raised", error)
z = torch.ones(2).to("ltc").requires_grad_()
(z * 3).sum().backward()
print(z.grad.tolist())
"""


@pytest.mark.parametrize(
    "register",
    ["y.register_hook(fail)", "x.register_hook(fail)", "x.register_post_accumulate_grad_hook(fail)"],
    ids=["tensor", "leaf", "accumulated"],
)
def test_an_exception_in_a_hook_is_raised_by_backward(register: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(register=register)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["raised in the hook", "[3.0, 3.0]"]
