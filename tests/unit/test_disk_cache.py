"""Files of compiled programs: what is found again, and what is a miss."""

from __future__ import annotations

import io
import logging
import os
import pickle
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_ltc.compile.disk_cache import Key, Store
from torch_ltc.config import cache_folder, settings
from torch_ltc.lowering import serialize
from torch_ltc.lowering.registry import registry
from torch_ltc.lowering.serialize import load_executable
from torch_ltc.private_files import is_private_folder
from torch_ltc.program.instruction import Program

KEY = Key("s3.1", "versions\nprogram one")
BOUND = 1 << 20


def stored(folder: Path, data: bytes = b"compiled") -> tuple[Store, Path]:
    store = Store(str(folder), BOUND)
    assert store.put(KEY, "any", data)
    [path] = folder.iterdir()
    return store, path


def found(store: Store, key: Key = KEY) -> list[bytes]:
    return [data for _, data in store.find(key)]


def test_what_was_put_is_found_by_another_store(tmp_path: Path) -> None:
    stored(tmp_path / "cache")
    assert found(Store(str(tmp_path / "cache"), BOUND)) == [b"compiled"]


def test_nothing_is_found_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "cache"), BOUND)
    assert found(store) == []
    assert not store.may_have(KEY.brief)
    assert not (tmp_path / "cache").exists()


def test_without_a_folder_nothing_is_kept() -> None:
    store = Store("", BOUND)
    assert not store.put(KEY, "any", b"compiled")
    assert found(store) == []


def test_a_kind_that_no_file_has_is_ruled_out_without_its_text(tmp_path: Path) -> None:
    store, _ = stored(tmp_path)
    assert store.may_have("s3.1")
    assert not store.may_have("s4.1")


def test_files_of_storees_are_seen(tmp_path: Path) -> None:
    store = Store(str(tmp_path), BOUND)
    assert not store.may_have(KEY.brief)
    stored(tmp_path)
    assert store.may_have(KEY.brief)


def test_variants_of_one_key_are_kept_side_by_side_and_replaced_by_name(tmp_path: Path) -> None:
    store = Store(str(tmp_path), BOUND)
    store.put(KEY, "for 8", b"first")
    store.put(KEY, "for any", b"second")
    store.put(KEY, "for 8", b"third")
    assert sorted(found(store)) == [b"second", b"third"]


def test_the_key_is_compared_in_full_and_not_by_its_hash(tmp_path: Path) -> None:
    store, path = stored(tmp_path)
    other = Key(KEY.brief, "versions\nprogram two")
    os.rename(path, tmp_path / path.name.replace(KEY.name, other.name))
    assert found(store, other) == []


@pytest.mark.parametrize("damage", ["empty", "short", "long", "flipped", "foreign", "folder"])
def test_a_damaged_file_is_a_miss(tmp_path: Path, damage: str) -> None:
    store, path = stored(tmp_path)
    whole = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        flipped = whole[:-1] + bytes([whole[-1] ^ 1])
        bodies = {"empty": b"", "short": whole[:-3], "long": whole + b"x", "flipped": flipped, "foreign": b"#!" + whole}
        path.write_bytes(bodies[damage])
    assert found(store) == []


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_to_is_not_read(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, path = stored(tmp_path)
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert found(store) == []
    assert "others may write to it" in caplog.text


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = stored(tmp_path)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert found(store) == []


def test_files_are_for_this_user_alone(tmp_path: Path) -> None:
    _, path = stored(tmp_path / "cache")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 3_000)
    keys = [Key("s1.1", f"program {n}") for n in range(3)]
    for age, key in enumerate(keys[:2]):
        store.put(key, "", b"x" * 1_000)
        [path] = tmp_path.glob(f"{key.name}*")
        os.utime(path, (age + 1, age + 1))
    # Used now: the second is the older one from here on.
    assert found(store, keys[0])
    store.put(keys[2], "", b"x" * 1_000)
    assert [bool(found(store, key)) for key in keys] == [True, False, True]


def test_the_bound_holds_after_each_of_many_files(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 20_000)
    for n in range(60):
        assert store.put(Key("s1.1", f"program {n}"), "", b"x" * 1_000)
        assert found(store, Key("s1.1", f"program {n}"))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000


def test_a_file_as_large_as_the_bound_stays_alone(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 1_050)
    keys = [Key("s1.1", f"program {n}") for n in range(2)]
    for age, key in enumerate(keys):
        assert store.put(key, "", b"x" * 950)
        [path] = tmp_path.glob(f"{key.name}*")
        os.utime(path, (age + 1, age + 1))
    assert [bool(found(store, key)) for key in keys] == [False, True]


def test_files_are_written_and_found_without_a_look_at_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = Store(str(tmp_path), BOUND), []
    scandir = os.scandir

    def counted(path: str) -> Iterator[os.DirEntry[str]]:
        seen.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    for n in range(20):
        key = Key("s1.1", f"program {n}")
        store.put(key, "", b"x" * 1_000)
        assert found(store, key)
    assert len(seen) == 1


def test_what_is_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    store = Store(str(tmp_path), 500)
    assert not store.put(KEY, "", b"x" * 1_000)
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_that_was_never_finished_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "s3.1-abc.ltc.4711.1"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    store = Store(str(tmp_path), BOUND)
    store.put(KEY, "", b"compiled")
    assert not left.exists()


def test_a_folder_that_cannot_be_written_to_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    store = Store(str(blocked / "cache"), BOUND)
    with caplog.at_level(logging.WARNING):
        assert not store.put(KEY, "", b"compiled")
        assert not store.put(KEY, "", b"compiled")
        assert found(store) == []
    assert caplog.text.count("cannot write to") == 1


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Nor is it waited for."""
    _, path = stored(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    script = f"""
        from torch_ltc.compile.disk_cache import Key, Store, read_key
        assert list(Store({str(tmp_path)!r}, 1 << 20).find(Key({KEY.brief!r}, {KEY.text!r}))) == []
        assert read_key({str(path)!r}) == ""
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60, check=False).returncode == 0


def test_a_folder_is_private_if_nobody_else_can_write_to_it_or_rename_it(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True, mode=0o700)
    os.chmod(tmp_path / "above", 0o755)
    os.symlink(folder, tmp_path / "link")
    assert is_private_folder(str(folder))
    assert is_private_folder(str(tmp_path / "link"))
    os.chmod(folder, 0o770)
    assert not is_private_folder(str(folder))
    os.chmod(folder, 0o755)
    os.chmod(tmp_path / "above", 0o777)
    assert not is_private_folder(str(folder))
    os.chmod(tmp_path / "above", 0o1777)
    assert is_private_folder(str(folder))
    assert not is_private_folder(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "value",
    [os.system, subprocess.Popen, pickle.loads, torch.load, torch.ops],
    ids=["system", "Popen", "loads", "load", "ops"],
)
def test_what_is_no_part_of_an_executable_is_not_unpickled(value: object) -> None:
    backend = registry.get("torchscript")
    program = Program(identity=1, instructions=(), outputs=(), scalars=0, values=0, random=False)
    named = pickle.dumps(value) if value is not torch.ops else b"ctorch\nops\n."
    with pytest.raises(pickle.UnpicklingError, match="is no part of a serialized executable"):
        load_executable(backend, program, named)
    with pytest.raises(pickle.UnpicklingError, match="is no part of a serialized executable"):
        load_executable(backend, program, pickle.dumps(([], named)))
    hidden = b"\x80\x04\x8c\x1ctorch_ltc.lowering.serialize\x8c\x0cpickle.loads\x93."
    with pytest.raises(pickle.UnpicklingError, match="is no part of a serialized executable"):
        load_executable(backend, program, pickle.dumps(([], hidden)))


@pytest.mark.parametrize(
    "value", [torch.contiguous_format, torch.channels_last, torch.strided, torch.bfloat16], ids=str
)
def test_values_of_pytorch_are_parts_of_an_executable(value: object) -> None:
    backend = registry.get("torchscript")
    program = Program(identity=1, instructions=(), outputs=(), scalars=0, values=0, random=False)
    file = io.BytesIO()
    serialize._ExecutablePickler(file, backend, program, []).dump([value, torch.device("cpu"), torch.Size([2])])
    data = io.BytesIO(file.getvalue())
    read = serialize._ExecutableUnpickler(data, backend, program, []).load()
    assert read == [value, torch.device("cpu"), torch.Size([2])]
    assert read[0] is value


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    store = Store(str(tmp_path), BOUND)
    monkeypatch.setattr(os, "replace", full)
    assert not store.put(KEY, "", b"compiled")
    assert list(tmp_path.iterdir()) == []


def test_a_write_without_memory_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: str) -> None:
        raise MemoryError

    store = Store(str(tmp_path), BOUND)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(MemoryError):
            store.put(KEY, "any", b"compiled")
    assert list(tmp_path.iterdir()) == []
    assert store.put(KEY, "any", b"compiled")


def test_files_of_a_folder_that_may_only_be_read_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = stored(tmp_path)

    def refused(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refused)
    assert found(store) == [b"compiled"]


def test_threads_and_processes_may_share_a_folder(tmp_path: Path) -> None:
    script = f"""
        from torch_ltc.compile.disk_cache import Key, Store
        store = Store({str(tmp_path)!r}, 4_000)
        for n in range(40):
            store.put(Key("s1.1", f"program {{n % 5}}"), "", bytes([n % 5]) * 1_000)
            for _, data in store.find(Key("s1.1", f"program {{n % 3}}")):
                assert data == bytes([n % 3]) * 1_000, data[:10]
    """
    children = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)]) for _ in range(2)]
    store = Store(str(tmp_path), 4_000)

    def use() -> None:
        for n in range(40):
            store.put(Key("s1.1", f"program {n % 4}"), "", bytes([n % 4]) * 1_000)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5_500
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".ltc"]


def test_the_folder_is_that_of_the_setting_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with settings.scope(cache_dir=""):
        assert cache_folder() == str(tmp_path / "torch_ltc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    with settings.scope(cache_dir=""):
        assert cache_folder() == str(tmp_path / ".cache" / "torch_ltc")
    with settings.scope(cache_dir="~/mine"):
        assert cache_folder() == str(tmp_path / "mine")
    with settings.scope(cache_dir="off"):
        assert cache_folder() == ""
