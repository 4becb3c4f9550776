"""Files with recordings: where the last run's is, reading and writing them."""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from torch_ltc.config import cache_folder
from torch_ltc.debug.recording import ProgramRow, Recording, from_json
from torch_ltc.errors import RecordingError

_LAST_RUN = "last_run.json"
_HINT = "run something first: ltc run SCRIPT, or name a file that was written with --record FILE"


def last_run() -> Path | None:
    """The file of the last run; None when nothing is kept on disk."""
    folder = cache_folder()
    return Path(folder) / _LAST_RUN if folder else None


def add_recording(parser: argparse.ArgumentParser) -> None:
    """The argument that names a recording."""
    parser.add_argument(
        "recording",
        nargs="?",
        type=Path,
        metavar="RECORDING",
        help="a file that `ltc run --record FILE` or LTC_REPORT=FILE.json wrote; by default that of the last `ltc run`",
    )


def read_recording(path: Path | None) -> Recording:
    """The recording in a file, by default that of the last run; raises RecordingError."""
    found = last_run() if path is None else path
    if found is None:
        raise RecordingError("no run is kept, because the setting 'cache_dir' is 'off'", hint="name a file")
    try:
        text = found.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        what = f"there is no file {str(found)!r}" if path is not None else f"no run is kept in {found.parent}"
        raise RecordingError(what, hint=_HINT) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingError(f"cannot read {found}: {error}", hint=_HINT) from error
    return from_json(text, str(found))


def write_recording(path: Path, recording: Recording) -> None:
    """Write it in one step, so that who reads meanwhile finds the old file or the new one; raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The text of programs and the lines of the user's code are nobody else's business: mkstemp asks for 0600.
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(recording.to_json())
        os.replace(unfinished, path)
    except OSError:
        with suppress(OSError):
            os.remove(unfinished)
        raise


def find_program(recording: Recording, identity: int) -> ProgramRow:
    """The program of this number; raises RecordingError when there is none."""
    for row in recording.programs:
        if row.identity == identity:
            return row
    known = ", ".join(str(row.identity) for row in recording.programs[:20])
    more = ", ..." if len(recording.programs) > 20 else ""
    raise RecordingError(f"the recording has no program {identity}", hint=f"one of: {known}{more}")
