"""The one table of tests of PyTorch that fail on the device, with the reason of each."""

import enum
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.pytorch.records import Record


class Kind(enum.Enum):
    """Why a test fails."""

    DEFECT = "defect"
    MISSING = "missing feature"
    ARTEFACT = "artefact of the test"


@dataclass(frozen=True)
class Known:
    """Tests of a file that fail, by patterns of `Class.method` with the names that they have on the CPU."""

    file: str
    patterns: tuple[str, ...]
    kind: Kind
    reason: str

    def matches(self, file: str, record: Record) -> bool:
        return file == self.file and any(fnmatchcase(record.name, pattern) for pattern in self.patterns)


KNOWN_FAILURES: tuple[Known, ...] = ()
