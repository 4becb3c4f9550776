"""The settings: validation, environment, scopes, description."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from torch_ltc import config
from torch_ltc.config import SETTINGS, Origin, settings
from torch_ltc.errors import SettingError


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts from the defaults, and leaves the settings as they were."""
    before = [(name, getattr(settings, name), settings.origin(name)) for name in settings.names()]
    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    settings.reload_environment()
    yield
    for name, value, origin in before:
        settings._put(name, value, origin)


def test_defaults_are_those_of_the_table() -> None:
    for name, setting in SETTINGS.items():
        assert getattr(settings, name) == setting.default
        assert settings.origin(name) is Origin.DEFAULT
        assert setting.accepts(setting.default)


def test_annotations_and_table_name_the_same_settings() -> None:
    annotated = [name for name in config.Settings.__annotations__ if not name.startswith("_")]
    assert annotated == list(SETTINGS) == list(settings.names())
    # One more needs a reason; eager regions were the last (decision 0047).
    assert len(annotated) <= 30


def test_reading_is_a_plain_attribute_read() -> None:
    assert "__getattribute__" not in vars(config.Settings)
    assert "__getattr__" not in vars(config.Settings)
    assert all(name in vars(settings) for name in settings.names())


def test_assignment_changes_value_and_origin() -> None:
    settings.pending_bound = 7
    assert settings.pending_bound == 7
    assert settings.origin("pending_bound") is Origin.CODE


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("fallback", "never", "one of 'allow', 'warn', 'error'"),
        ("device_type", "tpu", "one of 'cpu', 'cuda'"),
        ("hot_after", 1, "an integer of at least 2"),
        ("pending_bound", 0, "an integer of at least 1"),
        ("device_ordinal", -1, "an integer of at least 0"),
        ("pending_bound", True, "an integer of at least 1"),
        ("pending_bound", 2.0, "an integer of at least 1"),
        ("sync_after_optimizer", 1, "True or False"),
        ("backend", None, "a string"),
    ],
)
def test_wrong_value_is_refused_with_the_allowed_ones(name: str, value: object, allowed: str) -> None:
    before = getattr(settings, name)
    with pytest.raises(SettingError) as caught:
        setattr(settings, name, value)
    assert str(caught.value) == f"the setting '{name}' cannot be {value!r}\n  try: give it {allowed}"
    assert getattr(settings, name) == before


def test_unknown_setting_is_refused_with_the_known_names() -> None:
    with pytest.raises(SettingError, match=r"no setting 'fallbck'\n  try: one of backend, .*fallback"):
        settings.fallbck = "allow"
    with pytest.raises(SettingError, match="no setting 'colour'"):
        settings.origin("colour")
    with pytest.raises(SettingError, match="cannot be deleted"):
        del settings.backend


def test_scope_restores_value_and_origin() -> None:
    settings.hot_after = 5
    with settings.scope(hot_after=9, fallback="error") as inner:
        assert inner is settings
        assert (settings.hot_after, settings.fallback) == (9, "error")
        settings.hot_after = 11
    assert (settings.hot_after, settings.fallback) == (5, "warn")
    assert settings.origin("hot_after") is Origin.CODE
    assert settings.origin("fallback") is Origin.DEFAULT


def test_scope_restores_after_an_exception() -> None:
    with pytest.raises(KeyError), settings.scope(hot_after=9):
        raise KeyError
    assert settings.hot_after == 2


def test_scope_makes_no_change_when_one_of_them_is_wrong() -> None:
    with pytest.raises(SettingError), settings.scope(hot_after=9, fallback="never"):
        pytest.fail("entered")
    assert settings.hot_after == 2


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("LTC_TS_CUDA", "1", "device_type", "cuda"),
        ("LTC_TS_CUDA", "0", "device_type", "cpu"),
        ("LTC_SYNC_AFTER_OPTIMIZER", "off", "sync_after_optimizer", False),
        ("LTC_MAX_ASYNC_QUEUE", "3", "closure_queue_bound", 3),
        ("LTC_FORCE_FALLBACK", "aten::add", "force_fallback", "aten::add"),
        ("LTC_SAVE_TENSORS_FMT", "dot", "save_tensors_format", "dot"),
    ],
)
def test_environment_is_read(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, name: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    settings.reload_environment()
    assert getattr(settings, name) == value
    assert settings.origin(name) is Origin.ENVIRONMENT


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("LTC_TS_CUDA", "maybe", "1 or 0"),
        ("LTC_HOT_AFTER", "1", "an integer of at least 2"),
        ("LTC_HOT_AFTER", "many", "an integer of at least 2"),
        ("LTC_FALLBACK", "never", "one of 'allow', 'warn', 'error'"),
        ("LTC_SYNC_AFTER_OPTIMIZER", "perhaps", "1 or 0"),
    ],
)
def test_wrong_environment_is_refused_by_its_name_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, allowed: str
) -> None:
    settings.backend = "interpreter"
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingError) as caught:
        settings.reload_environment()
    assert f"{variable} holds {text!r}" in str(caught.value)
    assert f"set {variable} to {allowed}, or unset it" in str(caught.value)
    assert settings.backend == "interpreter"


def test_describe_lists_every_setting_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LTC_QUEUE_BOUND", "4")
    settings.reload_environment()
    settings.fallback = "allow"
    rows = {line.split()[0]: line.split() for line in settings.describe().splitlines()}
    assert list(rows) == ["setting", *settings.names()]
    assert rows["queue_bound"][1:4] == ["4", "env", "LTC_QUEUE_BOUND"]
    assert rows["fallback"][1:4] == ["'allow'", "code", "LTC_FALLBACK"]
    assert rows["backend"][1:4] == ["'auto'", "default", "LTC_BACKEND"]
    assert repr(settings) == "Settings(fallback='allow', queue_bound=4)"


def test_force_fallback_functions_of_the_original() -> None:
    assert config.get_force_fallback() == ""
    config.set_force_fallback("aten::add, aten::mul,")
    assert config.get_force_fallback() == settings.force_fallback == "aten::add, aten::mul,"
    assert config.forced_fallback_ops() == {"aten::add", "aten::mul"}
    config.set_force_fallback("")
    assert config.forced_fallback_ops() == frozenset()


def test_set_reuse_ir_is_accepted_and_changes_nothing() -> None:
    before = settings.describe()
    assert config.set_reuse_ir(True) is None  # type: ignore[func-returns-value]
    assert settings.describe() == before


def test_lower_layers_do_not_import_torch() -> None:
    # The files are run outside of the package, whose __init__ does import torch.
    code = (
        "import sys, types; package = types.ModuleType('torch_ltc'); package.__path__ = [sys.argv[1]];"
        "sys.modules['torch_ltc'] = package;"
        "import torch_ltc.closures, torch_ltc.config, torch_ltc.errors, torch_ltc.events, torch_ltc.metrics;"
        "sys.exit('torch' in sys.modules)"
    )
    folder = config.__file__.rpartition("config.py")[0]
    assert subprocess.run([sys.executable, "-c", code, folder], check=False).returncode == 0


def test_a_setting_of_the_import_cannot_be_assigned_later() -> None:
    settings.native = settings.native
    with pytest.raises(
        SettingError, match=r"'native' is read once, when the package is imported\n.*LTC_NATIVE=0 before"
    ):
        settings.native = "0"
    with pytest.raises(SettingError, match="is read once"), settings.scope(native="1"):
        pass
