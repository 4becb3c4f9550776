"""The loss of the physical device: an error after which it runs nothing any more, in this process.

A failed assertion in a kernel, or an access to memory that is not there, ends the context of a CUDA device. It is
noticed late, by whichever call comes next; every call after it fails with the same words. The first error is kept here
with the lines that may have caused it, and whatever is asked of the device later is answered with it.
"""

from __future__ import annotations

import re
from collections import deque

from torch_ltc.errors import DeviceLostError, LtcError
from torch_ltc.hooks import Hook
from torch_ltc.program.effects import may_fail
from torch_ltc.program.instruction import Call, Program

__all__ = ["DeviceLoss", "device_loss", "device_lost"]

_FATAL = re.compile(
    r"(?:CUDA|HIP) error: (?:device-side assert|an illegal (?:memory access|instruction)|unspecified launch failure"
    r"|misaligned address|uncorrectable ECC|the launch timed out)"
)
# Programs whose kernels may still be running when the next call is made.
_MOST_RUNNING = 8
_MOST_NAMED = 5

device_lost = Hook[[], None]("device lost", "when the physical device runs nothing any more", listed=False)


class DeviceLoss:
    """The error that ended the device, if one did, and the programs that ran last."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if nothing had happened: for tests, which have no device to lose."""
        self.error: DeviceLostError | None = None
        self._ran: deque[Program] = deque(maxlen=_MOST_RUNNING)

    def begin(self, program: Program) -> None:
        """A program is about to run. Raises when the device is lost."""
        if self.error is not None:
            raise self.error.untraced()
        if program.device.type != "cpu":
            self._ran.append(program)

    def told(self, error: BaseException, program: Program | None = None) -> LtcError | None:
        """The error to raise in the place of this one, which came of this program, if it says that the device is lost;
        else None."""
        found: BaseException | None = error
        while found is not None and not (isinstance(found, RuntimeError) and _FATAL.search(str(found))):
            found = found.__cause__
        if found is None:
            return None
        if self.error is None:
            running = [program] if program is not None else []
            running += [each for each in reversed(self._ran) if each is not program]
            self.error = _error(found, running)
            device_lost()
        return self.error.untraced()


def _error(error: BaseException, running: list[Program]) -> DeviceLostError:
    # A kernel that looks at its data may end the device; others do not, in all likelihood.
    calls = [call for program in running for call in program.calls]
    suspects = [call for call in calls if may_fail(call)] or calls[:1]
    lines = list(dict.fromkeys(map(_line, suspects)))[:_MOST_NAMED]
    named = "".join(f"\n    {line}" for line in lines)
    made = DeviceLostError(
        f"the physical device is lost: {str(error).partition(chr(10))[0]}\n"
        f"  calls that were running and look at their data:{named or ' none that is known'}",
        source=str(suspects[0].source) if suspects else None,
        hint="correct that line, and start the process anew; CUDA_LAUNCH_BLOCKING=1 tells which of several it is",
    )
    made.__cause__ = error
    return made


def _line(call: Call) -> str:
    return f"{call.name} at {call.source.describe()}"


device_loss = DeviceLoss()
