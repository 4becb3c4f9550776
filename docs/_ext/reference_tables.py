"""Settings, metrics, errors, messages and changes in PyTorch, from the code, in place of `<!-- made: NAME -->`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch_ltc.backends.inductor.private
import torch_ltc.backends.inductor.random_state
import torch_ltc.backends.torchscript.private  # noqa: F401, entries of backends are added when these are imported
from torch_ltc import errors
from torch_ltc.config import SETTINGS
from torch_ltc.debug.messages import MESSAGES
from torch_ltc.metrics import COUNTERS, METRICS
from torch_ltc.pytorch.entries import Risk
from torch_ltc.pytorch.table import compatibility_table, interface_table

if TYPE_CHECKING:
    from sphinx.application import Sphinx

PLACE = re.compile(r"^<!-- made: (\w+) -->$", re.MULTILINE)
UNITS = {"ns": "time", "bytes": "bytes", "": "number"}


def settings_text() -> str:
    """One entry per setting, in the order of the code."""
    return "\n".join(
        f"```{{setting}} {name}\n{setting.doc}\n\n"
        f"Default `{setting.default!r}`; {setting.allowed()}. Environment variable `{setting.variable}`.\n```\n"
        for name, setting in SETTINGS.items()
    )


def counters_text() -> str:
    """A table of the counters."""
    return "| name | counts |\n|---|---|\n" + "".join(f"| `{name}` | {doc} |\n" for name, doc in COUNTERS.items())


def samples_text() -> str:
    """A table of what is measured, with units."""
    rows = "".join(f"| `{name}` | {UNITS[unit]} | {doc} |\n" for name, (unit, doc) in METRICS.items())
    return f"| name | unit | measures |\n|---|---|---|\n{rows}"


def errors_text() -> str:
    """A section per class of errors and warnings, in the order of the source."""
    parts = []
    for thing in vars(errors).values():
        if inspect.isclass(thing) and issubclass(thing, (errors.LtcError, errors.LtcWarning)):
            bases = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
            parts.append(f"## {thing.__name__}\n\nA kind of {bases}.\n\n{inspect.getdoc(thing)}\n")
    return "\n".join(parts)


def messages_text() -> str:
    """A section per id, whose anchor is the id in small letters: texts of the program link to it."""
    return "\n".join(
        f"## {code}\n\n**{known.name}.** {known.means}\n\nWhat to do: {known.advice}\n"
        for code, known in sorted(MESSAGES.items())
    )


def risks_text() -> str:
    """A list of the words of the column `risk`."""
    return "".join(f"- *{risk.name.lower()}*: {risk.value}\n" for risk in Risk)


TEXTS: dict[str, Callable[[], str]] = {
    "settings": settings_text,
    "counters": counters_text,
    "samples": samples_text,
    "errors": errors_text,
    "messages": messages_text,
    "changes": compatibility_table,
    "interfaces": interface_table,
    "risks": risks_text,
}


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the places of a page that is being read."""
    source[0] = PLACE.sub(lambda place: TEXTS[place[1]](), source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the hook, and settings as things that have entries in the index."""
    app.add_object_type("setting", "setting", indextemplate="pair: %s; setting")
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
