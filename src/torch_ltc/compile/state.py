"""The compile state machine: one per program and backend.

                     hot                    thread is free               installed
    INTERPRETED -------------> QUEUED ----------------------> COMPILING ------------> COMPILED
         ^                       |                                |                       |
         |       cancelled, no executable fits, evicted           |                       |
         +-----------------------+--------------------------------+-----------------------+
                                 |                                |                       |
                                 +---- refused ----> REFUSED <----+------ failed to run --+

`tier_policy` drives it at each execution of the program, `jobs` from the thread that compiles. A program that another
program's executable fits becomes COMPILED without a job of its own, and so does one whose artifact is on disk.
"""

from __future__ import annotations

import enum

from torch_ltc.errors import LtcError
from torch_ltc.events import StateEvent, emit

__all__ = ["TRANSITIONS", "CompileStatus", "State"]


class State(enum.Enum):
    """A stage on a program's way to compiled code."""

    INTERPRETED = "the interpreter runs it: it is not hot yet, or no executable fits it"
    QUEUED = "the interpreter runs it; its compile job waits for a thread"
    COMPILING = "the interpreter runs it; its compile job is under way"
    COMPILED = "the backend's executable runs it"
    REFUSED = "the interpreter runs it for good: the backend cannot compile or run it"


TRANSITIONS = {
    State.INTERPRETED: frozenset({State.QUEUED, State.COMPILED, State.REFUSED}),
    State.QUEUED: frozenset({State.COMPILING, State.COMPILED, State.INTERPRETED, State.REFUSED}),
    State.COMPILING: frozenset({State.COMPILED, State.INTERPRETED, State.REFUSED}),
    State.COMPILED: frozenset({State.INTERPRETED, State.QUEUED, State.REFUSED}),
    State.REFUSED: frozenset(),
}


class CompileStatus:
    """The state of one program on one backend, why it is in it, and the error of a refusal."""

    __slots__ = ("program", "backend", "state", "reason", "error")

    def __init__(self, program: int, backend: str) -> None:
        self.program = program
        self.backend = backend
        self.state = State.INTERPRETED
        self.reason = "not hot yet"
        self.error: LtcError | None = None

    def move(self, to: State, reason: str) -> None:
        """Change the state and tell listeners. A transition that the diagram lacks is ignored: the executor and a
        compile thread may both have news, and REFUSED is final."""
        if to is self.state or to not in TRANSITIONS[self.state]:
            return
        self.state, self.reason = to, reason
        emit(StateEvent(self.program, self.backend, to.name.lower(), reason))

    def refuse(self, error: LtcError) -> None:
        """Leave the program to the interpreter for good."""
        self.error = error.untraced()
        self.move(State.REFUSED, str(error).partition("\n")[0])
