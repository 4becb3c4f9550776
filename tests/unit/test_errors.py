"""The error classes: messages, hierarchy, documentation."""

import inspect
import pickle

import pytest

from torch_ltc import errors

CLASSES = [
    thing
    for thing in vars(errors).values()
    if inspect.isclass(thing) and issubclass(thing, (errors.LtcError, errors.LtcWarning))
]


def test_message_says_what_where_and_what_to_try() -> None:
    error = errors.FallbackError("aten::nonzero would run eagerly", source="train.py:41 in select", hint="torch.where")
    assert str(error) == "aten::nonzero would run eagerly\n  recorded at train.py:41 in select\n  try: torch.where"
    assert error.source == "train.py:41 in select"


def test_message_without_source_and_hint_is_the_first_line_alone() -> None:
    assert str(errors.BackendError("no such device")) == "no such device"


def test_execution_error_carries_op_and_shapes() -> None:
    error = errors.PoisonedTensorError(
        "aten::embedding failed", op="aten::embedding", input_shapes=["float32[10, 4]", "int64[3]"], source="a.py:1"
    )
    assert isinstance(error, errors.ExecutionError)
    assert (error.op, error.input_shapes) == ("aten::embedding", ("float32[10, 4]", "int64[3]"))
    assert str(error) == "aten::embedding failed\n  inputs: float32[10, 4], int64[3]\n  recorded at a.py:1"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.SettingError, ValueError),
        (errors.UnknownBackendError, ValueError),
        (errors.UnsupportedTorchError, ImportError),
        (errors.ExecutionError, RuntimeError),
    ],
)
def test_errors_are_also_the_builtin_that_callers_expect(error: type, builtin: type) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, RuntimeError)


def test_errors_survive_pickling() -> None:
    error = errors.ExecutionError("failed", op="aten::mm", input_shapes=["f[1]"], source="a.py:2", hint="less")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.op, copy.input_shapes, copy.source, copy.hint) == ("aten::mm", ("f[1]",), "a.py:2", "less")


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_class_is_a_manual_page(error: type) -> None:
    page = inspect.cleandoc(error.__doc__ or "")
    assert "\n\nWhen: " in page
    assert "What to do: " in page.replace("\n", " ")
