"""Checks that an index serves the very files that were looked at when the versions were pinned.

    python scripts/audit.py            # download every pinned package, and compare with requirements/hashes.txt
    python scripts/audit.py --write    # write that list anew, after versions have changed

The list has the digests of all files that fit CPython 3.11 on 64-bit Linux, as the public index names them. PyTorch and
torchvision are left out: which of their builds is installed (CPU, CUDA of some version) is for whoever installs to
choose, and each has a digest of its own.
"""

from __future__ import annotations

import argparse
import html
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LISTS = ("constraints.txt", "ecosystem.txt", "mutation.txt", "torch.txt", "vision.txt")
HASHES = "hashes.txt"
INDEX = "https://pypi.org/simple"
CHOSEN_BUILDS = ("torch", "torchvision")
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(40, 4, -1)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
_LINK = re.compile(r'<a href="([^"#]*/([^"#/]+))#sha256=([0-9a-f]{64})"')
_HEAD = """\
# Digests of every pinned package but PyTorch and torchvision, for CPython 3.11 on 64-bit Linux; 'make audit' compares
# them with what an index serves. Made by 'python scripts/audit.py --write'.
"""


def pinned(folder: Path) -> dict[str, str]:
    """Name and version of all packages that the lists pin; raises ValueError where two lists differ."""
    found: dict[str, str] = {}
    for name in LISTS:
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                package, _, version = line.partition("==")
                package = canonicalize_name(package)
                if found.setdefault(package, version) != version:
                    raise ValueError(f"{package} is pinned to {found[package]} and, in {name}, to {version}")
    return {name: version for name, version in found.items() if name not in CHOSEN_BUILDS}


def hashed(file: Path) -> dict[str, tuple[str, set[str]]]:
    """Name, version and digests of a list with digests."""
    found: dict[str, tuple[str, set[str]]] = {}
    for line in file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            written, *digests = line.split(" --hash=sha256:")
            requirement = Requirement(written)
            (version,) = requirement.specifier
            found[canonicalize_name(requirement.name)] = (version.version, {digest.strip() for digest in digests})
    return found


def differences(folder: Path) -> list[str]:
    """Packages that one of the lists has alone, or in another version, or without a digest."""
    wanted, listed = pinned(folder), hashed(folder / HASHES)
    wrong = [f"{name} is not pinned" for name in sorted(set(listed) - set(wanted))]
    for name, version in sorted(wanted.items()):
        have, digests = listed.get(name, ("none", set()))
        if have != version or not digests:
            wrong.append(f"{name}: {version} is pinned, {HASHES} has {have} with {len(digests)} digests")
    return wrong


def _tags() -> set[Tag]:
    return {*cpython_tags((3, 11), platforms=_PLATFORMS), *compatible_tags((3, 11), "cp311", _PLATFORMS)}


def digests_of(page: str, version: str, tags: set[Tag]) -> dict[str, str]:
    """Digests by file name of the wheels on a page of an index that are of a version and fit."""
    found = {}
    for _, file, digest in _LINK.findall(html.unescape(page)):
        try:
            _, have, _, fits = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue
        if str(have) == version and fits & tags:
            found[file] = digest
    return found


def write(folder: Path) -> None:
    """Make the list anew from the public index."""
    tags = _tags()
    lines = [_HEAD]
    for name, version in sorted(pinned(folder).items()):
        with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as answer:
            found = digests_of(answer.read().decode(), version, tags)
        if not found:
            raise LookupError(f"the index has no wheel of {name} {version} that fits")
        each = " \\\n    ".join(f"--hash=sha256:{digest}" for digest in sorted(set(found.values())))
        lines.append(f"{name}=={version} \\\n    {each}\n")
    (folder / HASHES).write_text("".join(lines), encoding="utf-8")


def download(file: Path, into: Path, *options: str) -> int:
    """Fetch all that a list names, without anything it does not name; pip refuses a file with another digest."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--require-hashes",
               "--no-deps", "--only-binary", ":all:", "--dest", str(into), "--requirement", str(file)]  # fmt: skip
    return subprocess.run([*command, *options], check=False).returncode


def main() -> int:
    """Write the list, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make the list anew")
    parser.add_argument("--folder", type=Path, default=ROOT / "requirements")
    options = parser.parse_args()
    if options.write:
        write(options.folder)
    if wrong := differences(options.folder):
        print("\n".join(wrong), "try: python scripts/audit.py --write", sep="\n", file=sys.stderr)
        return 1
    status = download(options.folder / HASHES, ROOT / "build" / "audit")
    print("every file is one of those listed" if status == 0 else "not every file is one of those listed")
    return status


if __name__ == "__main__":
    sys.exit(main())
