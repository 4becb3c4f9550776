"""Says when programs of one site are compiled again and again, as the setting `recompiles` wants it."""

from __future__ import annotations

from torch_ltc.config import settings
from torch_ltc.debug.messages import MESSAGES
from torch_ltc.debug.recording import Explanation
from torch_ltc.deferred import deferred
from torch_ltc.errors import RecompileError, RecompileWarning
from torch_ltc.source import Source

__all__ = ["recompiled"]

# What has nothing to do with what was compiled for the site before.
_NO_RECOMPILES = frozenset({"first", "backend"})


def recompiled(explanation: Explanation, number: int, site: Source) -> None:
    """A program was compiled for this site, the third one at least. Said on the user's thread, at its next sync or
    read: this may be another one."""
    if settings.recompiles == "allow" or explanation.cause in _NO_RECOMPILES:
        return
    message = MESSAGES[explanation.code]
    where = f" at {explanation.source}" if explanation.source.file else ""
    text = (
        f"{message.code} {message.name}: compiled for the {_ordinal(number)} time for the sync at {site}, because "
        f"{explanation.difference}{where} (torch_ltc.explain() says more; {message.link})"
    )
    if settings.recompiles == "error":
        deferred.add_error(RecompileError(text, hint=message.advice))
    elif _is_told(number):
        deferred.add_warning(text, RecompileWarning)


def _is_told(number: int) -> bool:
    """At the third, sixth, twelfth, ... compilation: who does not mind need not hear of each."""
    times, rest = divmod(number, 3)
    return rest == 0 and times & (times - 1) == 0


def _ordinal(number: int) -> str:
    suffix = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
