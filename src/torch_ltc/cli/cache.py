"""`ltc cache`: compiled programs serialized on disk for later processes.

Every action is right while other processes use the folder: files appear and go in one step, and a process whose file is
gone compiles again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch_ltc.cli.output import add_json, age_text, command, count, note, pairs, parse_size, print_json, table
from torch_ltc.compile.disk_cache import Store, Stored, read_key
from torch_ltc.config import cache_folder, settings
from torch_ltc.errors import LtcError
from torch_ltc.formatting import count_text, size_text
from torch_ltc.lowering.versions import versions_text

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache, and what its key says. `usable` means by this version of the package and of PyTorch."""

    file: Stored
    backend: str
    torch: str
    device: str
    usable: bool

    @property
    def program(self) -> str:
        """A description of the compiled program. The kind is "p" or "s", instructions, a point, outputs."""
        instructions, _, outputs = self.file.kind[1:].partition(".")
        sizes = "any sizes" if self.file.kind.startswith("s") else "fixed sizes"
        return f"{count_text(int(instructions), 'instruction')}, {count_text(int(outputs), 'output')}, {sizes}"

    def data(self, now_s: float) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "file": os.path.basename(self.file.path),
            "size_bytes": self.file.size_bytes,
            "unused_s": round(max(now_s - self.file.used_s, 0.0), 1),
            "backend": self.backend,
            "torch": self.torch,
            "device": self.device,
            "program": self.program,
            "usable": self.usable,
        }


def _entry(file: Stored) -> Entry:
    key = read_key(file.path)
    lines = key.split("\n")
    backend = next((position for position, line in enumerate(lines) if line.startswith("backend ")), None)
    named = lines[backend].removeprefix("backend ") if backend is not None else "unknown"
    device = lines[backend + 1] if backend is not None and backend + 1 < len(lines) else "unknown"
    torch = lines[0].split()[1] if lines[0].startswith("torch ") else "unknown"
    return Entry(file, named.split()[0] if named.split() else "unknown", torch, device, key.startswith(versions_text()))


def _store() -> Store:
    folder = cache_folder()
    if not folder:
        raise LtcError("nothing is kept on disk, because the setting 'cache_dir' is 'off'", hint="unset LTC_CACHE_DIR")
    return Store(folder, settings.cache_bytes)


def _entries(store: Store) -> list[Entry]:
    """All finished files, the one used last first."""
    return [_entry(file) for file in reversed(store.files()) if file.finished]


def _add_options(parser: argparse.ArgumentParser) -> None:
    words = parser.add_subparsers(title="what to do", metavar="ls|stats|prune|clear", required=True)
    ls = words.add_parser("ls", help="list the files", description="List what is kept, what was used last first.")
    ls.add_argument("--most", type=count, default=50, metavar="N", help="print at most N rows (%(default)s); 0: all")
    stats = words.add_parser("stats", help="sum up", description="Say how much is kept, of what, and since when.")
    prune = words.add_parser(
        "prune", help="remove some files", description="Remove files that match one of the options given."
    )
    prune.add_argument(
        "--max-bytes", type=_size, metavar="SIZE", help="the longest unused ones, until SIZE is left, as 500M"
    )
    prune.add_argument("--older-than", type=_days, metavar="DAYS", help="those that were not used for DAYS")
    prune.add_argument(
        "--unusable", action="store_true", help="those that this version of torch_ltc and PyTorch cannot use"
    )
    prune.add_argument("--dry-run", action="store_true", help="remove nothing, say what would be removed")
    clear = words.add_parser("clear", help="remove all files", description="Remove everything that is kept.")
    clear.add_argument("--yes", action="store_true", help="do not ask")
    for each, what in ((ls, _ls), (stats, _stats), (prune, _prune), (clear, _clear)):
        add_json(each)
        each.set_defaults(what=what)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 1000000, 500M or 2G") from error


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    # Nor is NaN.
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days; write it as 30 or 0.5")
    return days


@command(
    "cache",
    "look at the compiled programs that are kept on disk, or remove them",
    "Compiled programs are kept on disk, so that a later process does not compile them again. They may be removed at "
    "any time, also while other processes use them.",
    _add_options,
)
def _run(options: argparse.Namespace) -> int:
    status: int = options.what(options)
    return status


def _ls(options: argparse.Namespace) -> int:
    entries, now_s = _entries(_store()), time.time()
    shown = entries[: options.most] if options.most else entries
    if options.json:
        print_json([entry.data(now_s) for entry in shown])
        return 0
    rows = [("size", "last use", "backend", "torch", "usable", "program", "file")]
    rows += [
        (
            size_text(entry.file.size_bytes),
            age_text(now_s - entry.file.used_s),
            entry.backend,
            entry.torch,
            "yes" if entry.usable else "no",
            entry.program,
            os.path.basename(entry.file.path),
        )
        for entry in shown
    ]
    print(table(rows, "rr") if shown else "nothing is kept")
    if len(shown) < len(entries):
        note(f"{len(entries) - len(shown)} more; --most 0 prints all")
    return 0


def _stats(options: argparse.Namespace) -> int:
    store = _store()
    files, entries, now_s = store.files(), _entries(store), time.time()
    total = sum(file.size_bytes for file in files)
    usable = [entry for entry in entries if entry.usable]
    by_backend = Counter(entry.backend for entry in entries)
    unfinished = sum(not file.finished for file in files)
    unused_s = now_s - files[0].used_s if files else 0.0
    if options.json:
        figures = {"folder": store.folder, "files": len(entries), "size_bytes": total, "bound_bytes": store.bound_bytes}
        figures |= {"usable": len(usable), "unfinished": unfinished, "longest_unused_s": round(unused_s, 1)}
        print_json({**figures, "by_backend": dict(by_backend)})
        return 0
    share = f"{total / store.bound_bytes:.0%} of" if store.bound_bytes else "bound"
    shown = {
        "folder": store.folder,
        "size": f"{size_text(total)}, {share} {size_text(store.bound_bytes)} (setting cache_bytes)",
        "files": str(len(entries)),
        "usable by this version": f"{len(usable)}, {size_text(sum(entry.file.size_bytes for entry in usable))}",
        "being written": str(unfinished),
        "longest unused": age_text(unused_s) if files else "-",
    }
    print(pairs({**shown, **{f"of {name}": str(number) for name, number in sorted(by_backend.items())}}))
    return 0


def _prune(options: argparse.Namespace) -> int:
    if options.max_bytes is None and options.older_than is None and not options.unusable:
        raise LtcError("nothing was said to be removed", hint="--max-bytes SIZE, --older-than DAYS or --unusable")
    store = _store()
    files, now_s = [file for file in store.files() if file.finished], time.time()
    chosen: dict[str, Stored] = {}
    if options.older_than is not None:
        chosen |= {file.path: file for file in files if file.used_s < now_s - options.older_than * _DAY_S}
    if options.unusable:
        chosen |= {file.path: file for file in files if not _entry(file).usable}
    if options.max_bytes is not None:
        left = sum(file.size_bytes for file in files if file.path not in chosen)
        for file in files:
            if left <= options.max_bytes:
                break
            if file.path not in chosen:
                chosen[file.path] = file
                left -= file.size_bytes
    return _remove(store, list(chosen.values()), options)


def _clear(options: argparse.Namespace) -> int:
    store = _store()
    files = store.files()
    if files and not options.yes and not _confirmed(files, store.folder):
        return 1
    return _remove(store, files, options)


def _confirmed(files: list[Stored], folder: str) -> bool:
    if not sys.stdin.isatty():
        raise LtcError("not removed: there is no terminal to ask on", hint="ltc cache clear --yes")
    total = size_text(sum(file.size_bytes for file in files))
    print(
        f"Remove {count_text(len(files), 'file')} ({total}) from {folder}? [y/N] ", end="", file=sys.stderr, flush=True
    )
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    note("nothing was removed")
    return False


def _remove(store: Store, files: Iterable[Stored], options: argparse.Namespace) -> int:
    """Remove the files and say so; one that is gone already is fine, one that cannot be removed is a failure."""
    dry = getattr(options, "dry_run", False)
    removed = removed_bytes = failed = 0
    for file in files:
        if not dry:
            store.drop(file.path)
            if os.path.exists(file.path):
                failed += 1
                continue
        removed += 1
        removed_bytes += file.size_bytes
    if options.json:
        print_json({"removed": removed, "removed_bytes": removed_bytes, "failed": failed, "dry_run": dry})
    else:
        verb = "would remove" if dry else "removed"
        print(f"{verb} {count_text(removed, 'file')} ({size_text(removed_bytes)}) in {store.folder}")
    if failed:
        note(f"{count_text(failed, 'file')} could not be removed")
    return 1 if failed else 0
