"""Stable ids of the messages of `explain`, warnings and the doctor, each with a paragraph of docs/messages.md.

An id never changes its meaning and is never used again: users search for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One id: `code` as "LTC104", a short `name`, what it `means`, and what to do about it (`advice`)."""

    code: str
    name: str
    means: str
    advice: str

    @property
    def link(self) -> str:
        """Its paragraph in the documentation."""
        return f"docs/messages.md#{self.code.lower()}"


MESSAGES: dict[str, Message] = {}


def message(code: str, name: str, means: str, advice: str) -> Message:
    """Define an id; a second one with the same code or name is an error."""
    if code in MESSAGES or any(known.name == name for known in MESSAGES.values()):
        raise ValueError(f"the message {code} {name} is defined twice")
    made = MESSAGES[code] = Message(code, name, means, advice)
    return made
