"""The settings: typed, documented, validated on assignment, and the only reader of the environment.

Settings are plain attributes of one object, `settings`, because recording reads some of them for every operation. What
each may hold stands in one table (`SETTINGS`), from which validation, `describe()` and the documentation are made.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal

from torch_ltc.errors import SettingError
from torch_ltc.hooks import Hook

__all__ = [
    "SETTINGS",
    "Origin",
    "Setting",
    "Settings",
    "cache_folder",
    "foreign_variable",
    "forced_fallback_ops",
    "get_force_fallback",
    "native_folder",
    "own_variables",
    "set_force_fallback",
    "set_reuse_ir",
    "settings",
]

Value = str | int | bool

_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"0", "false", "no", "off", ""})


class Origin(Enum):
    """The origin of a setting's value."""

    DEFAULT = "default"  # nobody chose: the value in the table
    ENVIRONMENT = "env"  # the environment variable, when the package was imported
    CODE = "code"  # assigned by the program, or by a scope that is open


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its type, range, default, variable and meaning."""

    name: str
    default: Value
    variable: str
    doc: str
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    # The package reads it once, when it is imported: later assignments are refused.
    at_import: bool = False
    # How the text of the environment variable is read, where it is not the plain form of the value.
    read: Callable[[str], Value] | None = None

    def allowed(self) -> str:
        """The accepted values, in words."""
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        if isinstance(self.default, bool):
            return "True or False"
        if isinstance(self.default, int):
            return "an integer" if self.minimum is None else f"an integer of at least {self.minimum}"
        return "a string"

    def accepts(self, value: object) -> bool:
        """True when the setting accepts `value`."""
        # bool is a subclass of int: a flag is no count, and a count is no flag.
        if type(value) is not type(self.default):
            return False
        if isinstance(value, int) and self.minimum is not None:
            return value >= self.minimum
        return not self.choices or value in self.choices

    def parse(self, text: str) -> Value:
        """The value that the environment variable's `text` stands for; raises SettingError when it is none."""
        value = self._parse_plain(text) if self.read is None else self.read(text)
        if not self.accepts(value):
            raise SettingError(
                f"the environment variable {self.variable} holds {text!r}, which the setting '{self.name}' cannot be",
                hint=f"set {self.variable} to {self._allowed_text()}, or unset it",
            )
        return value

    def _parse_plain(self, text: str) -> Value:
        if isinstance(self.default, bool):
            return _read_flag(text, otherwise=text)
        if isinstance(self.default, int):
            try:
                return int(text)
            except ValueError:
                return text
        return text

    def _allowed_text(self) -> str:
        if self.read is not None or isinstance(self.default, bool):
            return "1 or 0"
        return self.allowed()


def _read_flag(text: str, otherwise: Value) -> Value:
    word = text.strip().lower()
    if word in _TRUE_WORDS:
        return True
    return False if word in _FALSE_WORDS else otherwise


def _read_cuda_flag(text: str) -> Value:
    flag = _read_flag(text, otherwise=text)
    return flag if isinstance(flag, str) else ("cuda" if flag else "cpu")


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "backend",
            "auto",
            "LTC_BACKEND",
            "The backend that compiles hot programs: 'auto' measures what there is and keeps the fastest for each "
            "program; 'interpreter', 'torchscript', 'inductor', 'xla', 'null', or another that is installed.",
        ),
        Setting(
            "numerics",
            "equal",
            "LTC_NUMERICS",
            "What the backend 'auto' chooses from: forms whose results are 'equal' to eager's to the bit, or also "
            "those that are 'close' to them, which takes a compiler.",
            choices=("equal", "close"),
        ),
        Setting(
            "backend_failure",
            "warn",
            "LTC_BACKEND_FAILURE",
            "What to do when a backend cannot compile or run a program or one of its calls: 'warn' and run that part "
            "with PyTorch's kernels, or raise an 'error'.",
            choices=("warn", "error"),
        ),
        Setting(
            "native",
            "auto",
            "LTC_NATIVE",
            "Whether the extension in C++ is used: 'auto' when `ltc build` has compiled it, '1' always, or '0' never. "
            "Read when the package is imported.",
            choices=("auto", "0", "1"),
            at_import=True,
        ),
        Setting(
            "device_type",
            "cpu",
            "LTC_TS_CUDA",
            "The physical device that programs run on; LTC_TS_CUDA=1 means 'cuda'.",
            choices=("cpu", "cuda"),
            read=_read_cuda_flag,
        ),
        Setting(
            "device_ordinal",
            0,
            "LTC_DEVICE_ORDINAL",
            "The index of the physical device among those of its type.",
            minimum=0,
        ),
        Setting(
            "cuda_graphs",
            "auto",
            "LTC_CUDA_GRAPHS",
            "Whether programs on a CUDA device are captured as CUDA graphs and replayed: 'auto' when they are hot, "
            "'always' at the second execution, or 'off'.",
            choices=("auto", "always", "off"),
        ),
        Setting(
            "graph_bytes",
            0,
            "LTC_GRAPH_BYTES",
            "The most bytes that captured CUDA graphs may hold; those that were not used for longest are dropped. 0 is "
            "half of the device's memory.",
            minimum=0,
        ),
        Setting(
            "rank_check",
            1,
            "LTC_RANK_CHECK",
            "How often the ranks of a process group compare the collectives that they are about to run: before every "
            "so many programs that have some; ranks that differ raise. 0: never. All ranks need the same.",
            minimum=0,
        ),
        Setting(
            "fallback",
            "warn",
            "LTC_FALLBACK",
            "What to do when an operation must run eagerly: 'allow', 'warn' once per operation, or raise an 'error'.",
            choices=("allow", "warn", "error"),
        ),
        Setting(
            "force_fallback",
            "",
            "LTC_FORCE_FALLBACK",
            "Operations that always run eagerly, as 'aten::add', several separated by ','.",
        ),
        Setting(
            "eager_regions",
            "auto",
            "LTC_EAGER_REGIONS",
            "Whether calls run at once, on the CPU, instead of being recorded: 'auto' while a loop reads about as "
            "often as it computes, 'always', or 'off'. Needs the extension in C++.",
            choices=("auto", "always", "off"),
        ),
        Setting(
            "sync_after_optimizer",
            True,
            "LTC_SYNC_AFTER_OPTIMIZER",
            "Whether optimizer.step() ends with a sync, so that a training step is one program.",
        ),
        Setting(
            "pending_bound",
            20_000,
            "LTC_PENDING_BOUND",
            "The number of pending instructions at which a sync happens by itself.",
            minimum=1,
        ),
        Setting(
            "tree_bound",
            1_000_000,
            "LTC_TREE_BOUND",
            "The most nodes that the prefix tree keeps before it is pruned.",
            minimum=1,
        ),
        Setting(
            "executables_bound",
            1024,
            "LTC_EXECUTABLES_BOUND",
            "The most compiled programs that are kept; the least recently used one goes first.",
            minimum=1,
        ),
        Setting(
            "hot_after",
            2,
            "LTC_HOT_AFTER",
            "The execution of a program at which the backend compiles it; the interpreter runs it before that.",
            minimum=2,
        ),
        Setting(
            "tiers",
            "background",
            "LTC_TIERS",
            "When programs are compiled: hot ones in the 'background' while the interpreter goes on, hot ones "
            "'blocking' when they are due, or with 'off' every program before its first run.",
            choices=("background", "blocking", "off"),
        ),
        Setting(
            "promotion",
            True,
            "LTC_PROMOTION",
            "Whether numbers and sizes that change between otherwise equal programs become run-time inputs of one "
            "compiled program.",
        ),
        Setting(
            "cache_dir",
            "",
            "LTC_CACHE_DIR",
            "The folder in which compiled programs are kept for later processes; empty for 'torch_ltc' in the user's "
            "cache folder, 'off' for none.",
        ),
        Setting(
            "cache_bytes",
            2 << 30,
            "LTC_CACHE_BYTES",
            "The most bytes that cache_dir may hold; what was not used for longest goes first.",
            minimum=0,
        ),
        Setting(
            "queue_bound",
            8,
            "LTC_QUEUE_BOUND",
            "The number of programs queued but not yet run at which sync() waits.",
            minimum=1,
        ),
        Setting(
            "closure_queue_bound",
            100,
            "LTC_MAX_ASYNC_QUEUE",
            "The number of asynchronous step closures queued but not yet run at which adding one waits.",
            minimum=1,
        ),
        Setting(
            "recompiles",
            "warn",
            "LTC_RECOMPILES",
            "What to do from the third compilation for one site on: 'allow' it, 'warn' at the third, sixth, twelfth "
            "and so on, or raise an 'error' at each.",
            choices=("allow", "warn", "error"),
        ),
        Setting(
            "tensor_repr",
            "values",
            "LTC_TENSOR_REPR",
            "What repr and print show of a tensor that is not computed yet: its 'values', which syncs, or 'pending', "
            "which does not.",
            choices=("values", "pending"),
        ),
        Setting(
            "check",
            "off",
            "LTC_CHECK",
            "What is checked after each run of a program: 'nan' finds the first operation that makes a NaN or an "
            "infinity, 'validate' compares what a backend computed with the interpreter, 'all' does both, 'invariants' "
            "verifies what must hold of the device's own state at each sync, or 'off'.",
            choices=("off", "nan", "validate", "all", "invariants"),
        ),
        Setting(
            "repro_dir",
            "",
            "LTC_REPRO_DIR",
            "A folder in which a script that repeats the failure is written for every program that fails to compile or "
            "to run; empty for none.",
        ),
        Setting(
            "report",
            "",
            "LTC_REPORT",
            "A file that is written when the process ends: the report as a page, or, if its name ends in '.json', the "
            "recording that a report can be made from; empty for none.",
        ),
        Setting(
            "save_tensors_file",
            "",
            "LTC_SAVE_TENSORS_FILE",
            "A file to which the text of every synced program is appended; empty for none.",
        ),
        Setting(
            "save_tensors_format",
            "text",
            "LTC_SAVE_TENSORS_FMT",
            "The form in which save_tensors_file is written.",
            choices=("text", "dot", "backend"),
        ),
    )
}


class Settings:
    """All settings as attributes: reading one is a plain attribute read, assigning one validates it.

    Shared by all threads: a change, also one made by `scope`, is seen by every thread at its next read.
    """

    backend: str
    numerics: Literal["equal", "close"]
    backend_failure: Literal["warn", "error"]
    native: Literal["auto", "0", "1"]
    device_type: Literal["cpu", "cuda"]
    device_ordinal: int
    cuda_graphs: Literal["auto", "always", "off"]
    graph_bytes: int
    rank_check: int
    fallback: Literal["allow", "warn", "error"]
    force_fallback: str
    eager_regions: Literal["auto", "always", "off"]
    sync_after_optimizer: bool
    pending_bound: int
    tree_bound: int
    executables_bound: int
    hot_after: int
    tiers: Literal["background", "blocking", "off"]
    promotion: bool
    cache_dir: str
    cache_bytes: int
    queue_bound: int
    closure_queue_bound: int
    recompiles: Literal["allow", "warn", "error"]
    tensor_repr: Literal["values", "pending"]
    check: Literal["off", "nan", "validate", "all", "invariants"]
    repro_dir: str
    report: str
    save_tensors_file: str
    save_tensors_format: Literal["text", "dot", "backend"]

    _assignments: int
    _origins: dict[str, Origin]
    _changed: dict[str, Hook[[], None]]

    def __init__(self) -> None:
        """Read the environment; raises SettingError when a variable holds a value that cannot be."""
        object.__setattr__(self, "_assignments", 0)
        object.__setattr__(self, "_origins", {})
        changed = {name: Hook[[], None](name, "when the setting is assigned", listed=False) for name in SETTINGS}
        object.__setattr__(self, "_changed", changed)
        self.reload_environment()

    def __setattr__(self, name: str, value: object) -> None:
        self._check(name, value)
        self._put(name, value, Origin.CODE)

    def __delattr__(self, name: str) -> None:
        setting = _find(name)
        raise SettingError(f"the setting '{name}' cannot be deleted", hint=f"assign its default, {setting.default!r}")

    @property
    def assignments(self) -> int:
        """How often a setting was assigned: while it is the same, so are all settings."""
        return self._assignments

    def names(self) -> tuple[str, ...]:
        """The names of all settings, in the order of the table."""
        return tuple(SETTINGS)

    def origin(self, name: str) -> Origin:
        """The origin of the present value of the setting `name`."""
        return self._origins[_find(name).name]

    @contextmanager
    def scope(self, **changes: Value) -> Iterator["Settings"]:
        """Give settings other values inside a `with` block, and what they had before on leaving it.

        All changes are checked before the first is made. Assignments made inside the block to the same settings end
        with it too.
        """
        for name, value in changes.items():
            self._check(name, value)
        before = [(name, getattr(self, name), self._origins[name]) for name in changes]
        try:
            for name, value in changes.items():
                self._put(name, value, Origin.CODE)
            yield self
        finally:
            for name, value, origin in before:
                self._put(name, value, origin)

    def reload_environment(self) -> None:
        """Forget every assignment: each setting takes its environment variable, or else its default."""
        values: list[tuple[str, Value, Origin]] = []
        for name, setting in SETTINGS.items():
            text = os.environ.get(setting.variable)
            if text is None:
                values.append((name, setting.default, Origin.DEFAULT))
            else:
                values.append((name, setting.parse(text), Origin.ENVIRONMENT))
        for name, value, origin in values:
            self._put(name, value, origin)

    def describe(self) -> str:
        """A table of all settings: name, value, where it came from, environment variable, what it means."""
        rows = [("setting", "value", "from", "variable", "meaning")]
        rows += [
            (name, repr(getattr(self, name)), self._origins[name].value, setting.variable, setting.doc)
            for name, setting in SETTINGS.items()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[4]]) for row in rows)

    def __repr__(self) -> str:
        chosen = [name for name in SETTINGS if self._origins[name] is not Origin.DEFAULT]
        return f"Settings({', '.join(f'{name}={getattr(self, name)!r}' for name in chosen)})"

    def _check(self, name: str, value: object) -> None:
        setting = _find(name)
        if not setting.accepts(value):
            raise SettingError(f"the setting '{name}' cannot be {value!r}", hint=f"give it {setting.allowed()}")
        if setting.at_import and value != getattr(self, name):
            raise SettingError(
                f"the setting '{name}' is read once, when the package is imported",
                hint=f"set {setting.variable}={value} before that",
            )

    def _put(self, name: str, value: object, origin: Origin) -> None:
        before = (getattr(self, name, None), self._origins.get(name, origin))
        object.__setattr__(self, name, value)
        object.__setattr__(self, "_assignments", self._assignments + 1)
        self._origins[name] = origin
        try:
            self._changed[name]()
        except Exception:
            object.__setattr__(self, name, before[0])
            object.__setattr__(self, "_assignments", self._assignments + 1)
            self._origins[name] = before[1]
            raise

    def watch(self, name: str, changed: Callable[[], None]) -> None:
        """Call `changed()` after every assignment to the setting `name`; when it raises, the old value comes back."""
        self._changed[_find(name).name].add(changed)


def _find(name: str) -> Setting:
    setting = SETTINGS.get(name)
    if setting is None:
        raise SettingError(f"there is no setting '{name}'", hint="one of " + ", ".join(SETTINGS))
    return setting


settings = Settings()


def cache_folder() -> str:
    """The folder that `cache_dir` names; empty when nothing is to be kept on disk."""
    if settings.cache_dir == "off":
        return ""
    if settings.cache_dir:
        return os.path.abspath(os.path.expanduser(settings.cache_dir))
    return user_folder()


def user_folder() -> str:
    """The folder of this user for the package, whatever `cache_dir` says."""
    return _user_folder(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))


def native_folder() -> str:
    """The folder that `ltc build` compiles the extension into, whatever `cache_dir` says of compiled programs."""
    return os.path.join(user_folder(), "native")


@lru_cache(maxsize=16)
def _user_folder(caches: str | None, home: str | None) -> str:
    return os.path.join(caches or os.path.join(os.path.expanduser("~"), ".cache"), "torch_ltc")


def foreign_variable(name: str) -> str:
    """A variable of another package's; empty when it is not set."""
    return os.environ.get(name, "")


def rank() -> int | None:
    """The number of this process among all of a run, where `torchrun` started it."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() and "WORLD_SIZE" in os.environ else None


def local_rank() -> int | None:
    """The number of this process among those of its machine, where `torchrun` started it."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else None


def local_size() -> int:
    """The number of processes of a run on this machine, where `torchrun` started them; else 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(text), 1) if text.isdigit() else 1


def own_variables() -> dict[str, str]:
    """Every variable that begins as ours do, whether a setting has it or not."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("LTC_")}


@lru_cache(maxsize=16)
def _split_ops(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(",") if word.strip())


def forced_fallback_ops() -> frozenset[str]:
    """The operations that `force_fallback` names, split."""
    return _split_ops(settings.force_fallback)


def get_force_fallback() -> str:
    """The operations that always run eagerly, as the setting `force_fallback` holds them."""
    return settings.force_fallback


def set_force_fallback(configval: str) -> None:
    """Name the operations that always run eagerly, as "aten::add", several separated by ','; "" for none."""
    settings.force_fallback = configval


def set_reuse_ir(val: bool) -> None:
    """Accepted and without effect: what was recorded before is always reused, by the prefix tree.

    Kept so that scripts written for `torch._lazy.config` run; there is nothing to switch off, because reuse compares
    every instruction in full.
    """
    del val
