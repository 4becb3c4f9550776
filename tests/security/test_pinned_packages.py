"""The digests of pinned packages: an index that serves another file is noticed."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from scripts import audit

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def wheel(folder: Path, text: str) -> Path:
    """A package of one file."""
    folder.mkdir()
    made = folder / "pinned_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("pinned_thing.py", text)
        archive.writestr(
            "pinned_thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pinned-thing\nVersion: 1.0\n"
        )
        archive.writestr("pinned_thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("pinned_thing-1.0.dist-info/RECORD", "")
    return made


def test_every_pinned_package_has_its_digests() -> None:
    assert audit.differences(REQUIREMENTS) == []


def test_another_file_under_the_same_name_and_version_is_refused(tmp_path: Path) -> None:
    honest, planted = wheel(tmp_path / "honest", "x = 1"), wheel(tmp_path / "planted", "x = 2")
    listed = tmp_path / "hashes.txt"
    listed.write_text(f"pinned-thing==1.0 --hash=sha256:{hashlib.sha256(honest.read_bytes()).hexdigest()}\n")

    def status(folder: Path) -> int:
        return audit.download(listed, tmp_path / "got", "--no-index", "--find-links", str(folder))

    assert status(planted.parent) != 0
    assert status(honest.parent) == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "one: 1.0 is pinned, hashes.txt has none with 0 digests"),
        ("one==1.1 --hash=sha256:00\n", "one: 1.0 is pinned, hashes.txt has 1.1 with 1 digests"),
        ("one==1.0\n", "one: 1.0 is pinned, hashes.txt has 1.0 with 0 digests"),
        ("one==1.0 --hash=sha256:00\ntwo==2.0 --hash=sha256:00\n", "two is not pinned"),
    ],
)
def test_a_list_of_digests_that_has_fallen_behind_is_noticed(tmp_path: Path, line: str, said: str) -> None:
    for name in audit.LISTS:
        (tmp_path / name).write_text("one==1.0\ntorch==2.13.0\n")
    (tmp_path / audit.HASHES).write_text(line)
    assert audit.differences(tmp_path) == [said]
