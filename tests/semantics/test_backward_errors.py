"""An exception in a hook ends the backward pass, not the process."""

from tests.semantics.support import run_script

SCRIPT = """
import torch, torch_ltc

def fail(_):
    raise ZeroDivisionError("in the hook")

REGISTER = {
    "tensor": lambda x, y: y.register_hook(fail),
    "leaf": lambda x, y: x.register_hook(fail),
    "accumulated": lambda x, y: x.register_post_accumulate_grad_hook(fail),
}
for name, register in REGISTER.items():
    x = torch.ones(3).to("ltc").requires_grad_()
    y = x * 2
    register(x, y)
    try:
        (y * y).sum().backward()
    except ZeroDivisionError as error:
        print(name, "raised", error, flush=True)
    z = torch.ones(2).to("ltc").requires_grad_()
    (z * 3).sum().backward()
    print(z.grad.tolist(), flush=True)
"""


def test_an_exception_in_a_hook_is_raised_by_backward() -> None:
    # In one process, whose output says how far it came if it dies.
    assert run_script(SCRIPT).splitlines() == [
        *["tensor raised in the hook", "[3.0, 3.0]"],
        *["leaf raised in the hook", "[3.0, 3.0]"],
        *["accumulated raised in the hook", "[3.0, 3.0]"],
    ]
