"""Files in the disk cache that somebody else has written, changed or put there."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_ltc.backends.torchscript import TorchScriptBackend
from torch_ltc.compile import disk_cache
from torch_ltc.compile.disk_cache import Key, Store
from torch_ltc.lowering.serialize import dump_data, load_own_data
from torch_ltc.private_files import user_key

KEY = Key("s2.1", "versions\nprogram one")
OTHER = Key("s2.1", "versions\nprogram two")
BOUND = 1 << 20


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's, with a key of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    user_key.cache_clear()
    yield tmp_path / "home" / "torch_ltc"
    user_key.cache_clear()


def stored(folder: Path, key: Key = KEY, data: bytes = b"compiled") -> Path:
    """The one file of a folder that holds this artifact."""
    assert Store(str(folder), BOUND).put(key, "", data)
    (path,) = folder.glob(f"{key.name}*")
    return path


def found(folder: Path, key: Key = KEY) -> list[bytes]:
    return [data for _, data in Store(str(folder), BOUND).find(key)]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_nothing_is_read_from_a_folder_that_others_may_write_to(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path / "cache")
    assert found(tmp_path / "cache") == [b"compiled"]
    (tmp_path / "cache").chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path / "cache") == []
    assert "others may write to its folder" in caplog.text


def test_nothing_is_read_from_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "cache")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert found(tmp_path / "cache") == []


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    path = stored(tmp_path / "cache")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert found(tmp_path / "cache") == []


def test_a_hard_link_to_another_artifact_is_not_this_one(tmp_path: Path) -> None:
    other = stored(tmp_path / "cache", OTHER, b"other")
    os.link(other, tmp_path / "cache" / other.name.replace(OTHER.name, KEY.name))
    assert found(tmp_path / "cache") == []
    assert found(tmp_path / "cache", OTHER) == [b"other"]


def test_a_file_with_a_right_digest_but_without_the_key_is_not_read(tmp_path: Path) -> None:
    path = stored(tmp_path / "cache")
    text, data = KEY.text.encode(), b"tampered"
    head = disk_cache._HEAD.pack(len(text), len(data), hashlib.sha256(text + data).digest())
    path.write_bytes(b"".join((disk_cache._MAGIC, head, text, data)))
    assert found(tmp_path / "cache") == []


def test_a_file_that_was_copied_from_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "cache")
    assert found(tmp_path / "cache") == [b"compiled"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another home"))
    assert found(tmp_path / "cache") == []


def test_the_key_is_secret_and_stays_the_same(home: Path) -> None:
    key = user_key(str(home))
    assert len(key) == 32
    assert stat.S_IMODE((home / "key").stat().st_mode) == 0o600
    assert [path.name for path in home.iterdir()] == ["key"]
    user_key.cache_clear()
    assert user_key(str(home)) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_or_write_is_none(home: Path, mode: int) -> None:
    user_key(str(home))
    (home / "key").chmod(mode)
    user_key.cache_clear()
    assert user_key(str(home)) == b""


def test_where_no_key_can_be_kept_the_cache_works_for_whoever_can_read_it(tmp_path: Path, home: Path) -> None:
    home.parent.mkdir()
    home.write_text("no folder")
    stored(tmp_path / "cache")
    assert found(tmp_path / "cache") == [b"compiled"]


class Exploit:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 7",)


@pytest.mark.parametrize(
    "value", [Exploit(), os.system, pickle.loads, Path("x")], ids=["call", "system", "loads", "path"]
)
def test_what_a_backend_keeps_is_made_of_its_own_classes(value: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="is no part of a serialized executable"):
        load_own_data(pickle.dumps(value), TorchScriptBackend)


def test_data_of_a_backend_is_read_back() -> None:
    data = ([1, "two", 3.0], {"size": (2, 3)})
    assert load_own_data(dump_data(data), TorchScriptBackend) == data
