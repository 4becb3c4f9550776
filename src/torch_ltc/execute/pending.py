"""The pending program as a value, without cutting it; and running a known program again on other inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_ltc.compile.program_cache import CachedProgram, executables, next_identity
from torch_ltc.compile.tier_policy import TierPolicy
from torch_ltc.errors import LtcError
from torch_ltc.execute.executor import Uses, executor
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.run import execute_entry
from torch_ltc.execute.sync import physical, touched
from torch_ltc.lowering.backend_data import BackendData, alias_physical
from torch_ltc.lowering.interface import Arguments, Held
from torch_ltc.program.instruction import Call, Program
from torch_ltc.program.spec import Spec, spec_of
from torch_ltc.program.tree import Node
from torch_ltc.record.buffer import Buffer, buffer_of, physical_device
from torch_ltc.record.recorder import recorder


def pending_entry_for(tensors: Sequence[torch.Tensor]) -> CachedProgram:
    """The cache entry of the pending program with exactly these tensors as outputs."""
    with recorder.lock:
        numbers = []
        for tensor in tensors:
            if tensor.device.type != "ltc":
                raise LtcError(f"expected tensors on ltc, got one on {tensor.device}", hint="move it with .to('ltc')")
            numbers.append(recorder.value_of(buffer_of(tensor), spec_of(tensor)) - recorder.base)
        # Asked for by value, not by liveness: a key of its own beside those of syncs.
        key = (-1, *numbers)
        leaf = recorder.node
        entry: CachedProgram | None = leaf.programs.get(key)
        if entry is None:
            instructions = tuple([n.instruction for n in recorder.tree.path(leaf) if n.instruction is not None])
            values = recorder.count - recorder.base
            program = Program(
                next_identity(),
                instructions,
                tuple(numbers),
                recorder.scalar_count,
                values,
                recorder.random,
                physical_device(),
            )
            entry = CachedProgram(program, recorder.torch_state)
            recorder.tree.keep_program(leaf, key, entry)
        return entry


def pending_program(tensors: Sequence[torch.Tensor]) -> Program:
    """The pending program with these tensors as outputs."""
    return pending_entry_for(tensors).program


def pending_numbers() -> list[object]:
    """The run-time numbers of the pending program."""
    with recorder.lock:
        return list(recorder.scalars)


def pending_inputs() -> tuple[list[int], list[object]]:
    """Identity and present value of each input of the pending program: tensors, then numbers under identity -1."""
    with recorder.lock:
        used = [n.instruction for n in recorder.tree.path(recorder.node)]
        program = Program(0, tuple([i for i in used if i is not None]), (), 0, 0, False)
        inputs = recorder.inputs
        pairs = [(inputs[i.buffer], i.spec) for i in program.inputs]
        numbers: list[object] = list(recorder.scalars)
        uses = Uses([buffer for buffer, _ in pairs], ())
        future = executor.submit(lambda: [physical(buffer, spec) for buffer, spec in pairs], uses, wait=False)
    return [buffer.identity for buffer, _ in pairs] + [-1] * len(numbers), [*executor.result_of(future), *numbers]


def uncomputed(tensor: torch.Tensor) -> str:
    """The state of a tensor that is not computed: "pending", or "queued" behind other programs, with the call that
    makes it; empty when it is computed. Neither syncs nor waits."""
    buffer = buffer_of(tensor)
    with recorder.lock:
        if not touched(buffer):
            return "" if buffer.job is None or buffer.job.done() else f"queued: {spec_of(tensor)}"
        maker = _latest_call(buffer)
    made = "" if maker is None else f", {maker.name} at {maker.source}"
    return f"pending: {spec_of(tensor)}{made}"


def _latest_call(buffer: Buffer) -> Call | None:
    """The pending call that made the buffer or wrote to it last. With the recorder's lock held."""
    own = buffer.number - recorder.base
    numbers = {own}
    numbers.update(number - recorder.base for number in buffer.view_numbers(recorder.base))
    node: Node | None = recorder.node
    while node is not None:
        call = node.instruction
        if isinstance(call, Call) and ((own >= 0 and own in call.numbers) or not numbers.isdisjoint(call.mutated)):
            return call
        node = node.parent
    return None


def publish(tensors: Sequence[torch.Tensor]) -> bytes:
    """Bytes that stand for the pending program with these outputs; `run_published` takes them."""
    return executables.publish(pending_entry_for(tensors))


def run_published(
    digest: bytes, inputs: Sequence[object], generator: torch.Generator | None = None
) -> list[torch.Tensor]:
    """Run the program behind `digest` on physical inputs, as `pending_inputs` lists them. Inputs that it writes to are
    written in place. It draws from `generator`, by default the device's own."""
    entry = executables.find(digest)
    if entry is None:
        raise LtcError(
            f"no program is known under {digest.hex()}", hint="take the bytes from get_graph_hash in this process"
        )
    expected = entry.program.inputs
    if len(inputs) != len(expected) + entry.program.scalars:
        raise LtcError(f"the program takes {len(expected) + entry.program.scalars} inputs, got {len(inputs)}")
    tensors: list[Held] = []
    for instruction, given in zip(expected, inputs, strict=False):
        if not isinstance(given, torch.Tensor) or given.dtype is not instruction.spec.dtype:
            raise LtcError(f"the program takes {instruction.spec} here, got {given!r:.80}")
        if tuple(given.size()) != instruction.spec.size:
            raise LtcError(f"the program takes {instruction.spec} here, got a tensor of size {tuple(given.size())}")
        tensors.append(_fitting(given.detach(), instruction.spec))
    scalars = list(inputs[len(expected) :])
    device = physical_device()

    def work() -> list[torch.Tensor]:
        arguments = Arguments(tensors, scalars, generator or device_random.generator, device)
        outcome = execute_entry(entry, arguments, TierPolicy.current())
        if outcome.failures:
            raise outcome.failures[0]
        results = [held.tensor() if isinstance(held, BackendData) else held for held in outcome.results]
        return [result for result in results if isinstance(result, torch.Tensor)]

    return executor.call(work)


def _fitting(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor itself when its layout is the recorded one, else a copy in that layout."""
    if spec_of(tensor) is spec:
        return tensor
    return alias_physical(torch.empty(0, dtype=tensor.dtype, device=tensor.device), spec).copy_(tensor)
