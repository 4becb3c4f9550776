"""The short way of a replay, for a call that is a compiled function of tensors and changes no Python state.

`native/steady.cpp` does what `Plan.run` does, in one go, as long as everything is as it was at the last replay. This
module says which calls are of that kind, and does what is left to Python: keep the books, and see to runs that fail.
"""

from __future__ import annotations

from typing import Any

from torch_ltc.closures import end_step
from torch_ltc.compile.program_cache import executables
from torch_ltc.config import settings
from torch_ltc.events import ExecuteEvent, SyncReason, tell
from torch_ltc.execute.executor import executor
from torch_ltc.execute.memory import memory
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.replay import Replayed
from torch_ltc.execute.run import all_lost, has_to_save, recovered
from torch_ltc.execute.sync import tell_sync
from torch_ltc.lowering.functional_computation import DirectCall, FunctionalComputation
from torch_ltc.lowering.interface import Arguments
from torch_ltc.native.library import extension
from torch_ltc.record.buffer import Buffer
from torch_ltc.record.recorder import recorder
from torch_ltc.replay.recorded_call import Argument, Made

__all__ = ["steady_replay"]

# In place of an output, as steady.cpp has it: an object, or an argument at a place counted from there.
_CONSTANT = -1
_FIRST_ARGUMENT = -2


def steady_replay(
    program: Replayed,
    arguments: tuple[Any, ...],
    unchanged: Any,
    inputs: list[Any],
    given: list[tuple[int, int]],
    leaves: list[Any],
    rebuild: Any,
) -> Any:
    """The replay in one go of a call that binds nothing but tensors that it returns; None where that is not possible.

    `unchanged` are its guards, `given` the places of its inputs that are arguments.
    """
    policy, executable = program.ran_here or (None, None)
    if extension is None or policy is None or executable is None:
        return None
    computation = executable.computation
    if not isinstance(computation, FunctionalComputation):
        return None
    direct = computation.direct
    made = [leaf.spec for leaf in leaves if isinstance(leaf, Made)]
    whole = [spec for _, spec in program.entry.outputs]
    if direct is None or not made or has_to_save(program.entry, executable):
        return None
    if any(spec.conj or spec.neg for spec in made + whole):
        return None
    rest = _Rest(program, policy, executable, computation)
    return extension.Steady(
        {
            "call": extension.SameCall(arguments),
            "unchanged": unchanged,
            "entry": program.entry,
            "executable": executable,
            "settings": settings,
            "recorder": recorder,
            "executor": executor,
            "worker": executor.cpu_worker,
            "begin": executor.enter_here,
            "end": executor.end_here,
            "inputs": inputs,
            "positions": program.entry.input_buffers,
            "specs": program.entry.input_specs,
            "buffer_class": Buffer,
            "makers": list(program.entry.origins),
            "rebuild": rebuild,
            "note": rest.note,
            "unusual": rest.unusual,
            "given": given,
            "output_specs": whole,
            "leaves": [_leaf(leaf) for leaf in leaves],
            **_parts(direct),
        }
    )


def _parts(direct: DirectCall) -> dict[str, Any]:
    return {
        "function": direct.function,
        "takes": direct.takes,
        "outputs": direct.outputs,
        "updates": direct.updates,
        "count": direct.count,
    }


def _leaf(leaf: Any) -> tuple[int, Any]:
    if isinstance(leaf, Made):
        return leaf.output, leaf.spec
    if isinstance(leaf, Argument):
        return _FIRST_ARGUMENT - leaf.position, None
    return _CONSTANT, leaf


class _Rest:
    """What C++ leaves to Python. It does not refer to the function that is replayed."""

    def __init__(self, program: Replayed, policy: Any, executable: Any, computation: FunctionalComputation) -> None:
        self._program = program
        self._entry = program.entry
        self._makers = list(program.entry.makers)
        self._policy = policy
        self._backend: str = policy.backend.name
        self._executable = executable
        self._computation = computation

    def note(self, outputs: list[Buffer], began_s: float, took_s: float, failed: bool) -> None:
        """Keep the books of a run, and end the step."""
        entry = self._entry
        entry.runs += 1
        executables.touch(entry)
        memory.run += 1
        memory.hold_made(outputs, self._makers)
        memory.end_run()
        tell(ExecuteEvent, entry.program.identity, self._backend, took_s, failed, False, 0.0)
        tell_sync(entry, SyncReason.JIT, True, len(outputs), 0.0, began_s)
        executor.raise_deferred()
        end_step()

    def unusual(
        self, inputs: list[Buffer], outputs: list[Buffer], held: list[Any], results: Any, error: BaseException | None
    ) -> bool:
        """See to a run that raised, or whose results are not to be passed on as they are. True when it has failed."""
        entry = self._entry
        device = entry.program.device
        arguments = Arguments(held, [], device_random.generator, device, None, replaceable=True, plain=True)
        interrupt: KeyboardInterrupt | None = None
        try:
            try:
                if error is not None:
                    raise error
                outcome = self._computation.finish(arguments, results)
            except Exception as failure:
                outcome = recovered(entry, self._executable, arguments, self._policy, failure)
        except BaseException as lost:
            outcome = all_lost(entry, lost)
            interrupt = lost if isinstance(lost, KeyboardInterrupt) else None
        self._program.in_place.install(outcome, inputs, outputs)
        if interrupt is not None:
            raise interrupt
        return bool(outcome.failures)
