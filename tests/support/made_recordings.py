"""A recording made by hand, of any size, with any names in it."""

from __future__ import annotations

from torch_ltc.debug.recording import (
    BufferRow,
    CompileRow,
    Explanation,
    FallbackRow,
    Finding,
    Line,
    Memory,
    ProgramRow,
    Recording,
    SettingRow,
    Span,
    SyncRow,
)
from torch_ltc.source import UNKNOWN, Source

STEP_S = 0.004


def line_of(file: str, line: int, function: str = "train", module: str = "") -> Source:
    return Source(file, line, function, module=module)


def program_lines(file: str, batch: int, extra: bool) -> tuple[Line, ...]:
    """A small training step; `extra` puts a call in the middle, which renumbers what follows."""
    forward = line_of(file, 12, "forward", "Net.hidden")
    backward = Source(file, 30, "train", backward=True, module="Net.hidden", forward=forward)
    lines = [
        Line(f"%0: float32[{batch},64] = input(buffer=0)", UNKNOWN),
        Line("%1: float32[32,64] = input(buffer=1)", UNKNOWN),
        Line(f"%2: float32[{batch},32] = aten::linear(%0, %1)", forward),
        Line(f"%3: float32[{batch},32] = aten::relu(%2)", forward),
    ]
    if extra:
        lines.append(Line(f"%4: float32[{batch},32] = aten::mul.Tensor(%3, $0:float)", line_of(file, 14, "forward")))
    at = len(lines)
    lines += [
        Line(f"%{at}: float32[] ROOT=0 = aten::sum(%{at - 1})", line_of(file, 29)),
        Line(f"%{at + 1}: float32[{batch},32] stride=(0,0) view = aten::expand(%{at}, [{batch}, 32])", backward),
        Line(f"%{at + 2}: float32[{batch},32] = aten::threshold_backward(%{at + 1}, %3, $1:int)", backward),
        Line(f"%{at + 3}: float32[32,64] ROOT=1 = aten::mm(%{at + 2}, %0)", backward),
        Line(f"input 1 becomes %{at + 3}", UNKNOWN),
    ]
    return tuple(lines)


def explanation(program: int, nearest: int, file: str) -> Explanation:
    return Explanation(
        program,
        "LTC104",
        "size",
        nearest,
        f"input 0 is float32[{16 + program},64], in program {nearest} it is float32[{16 + nearest},64]",
        line_of(file, 12, "forward", "Net.hidden"),
        promoted="dimension 0 of input 0",
        advice="pad the last batch, or drop it",
    )


def programs(file: str, amount: int) -> tuple[ProgramRow, ...]:
    return tuple(
        ProgramRow(
            identity=number,
            calls=7 + number % 2,
            inputs=2,
            outputs=2,
            site=line_of(file, 31),
            reason="an optimizer finished its step",
            first=line_of(file, 12, "forward", "Net.hidden"),
            syncs=40 - number,
            runs=40 - number,
            interpreted=1,
            failed=0,
            backend="torchscript",
            compiles=1,
            loads=0,
            record_s=0.002 * number,
            compile_s=0.05 / number,
            run_s=0.1 / number,
            refused="",
            lines=program_lines(file, 16 + number, number % 2 == 0),
            explanation=explanation(number, number - 1, file) if number > 1 else None,
        )
        for number in range(1, amount + 1)
    )


def spans(steps: int, label: str) -> tuple[Span, ...]:
    """Six spans a step: recording, sync, copy with a wait in it, a run, and now and then a compilation."""
    made: list[Span] = []
    for step in range(steps):
        begin, program = step * STEP_S, 1 + step % 3
        made += [
            Span("record", "user", begin, 0.0020, step, program, label),
            Span("sync", "user", begin + 0.0020, 0.0002, step, program, label),
            Span("copy", "user", begin + 0.0022, 0.0016, step, program, label, 4),
            Span("wait", "user", begin + 0.0022, 0.0014, step, program, label),
            Span("run", "worker", begin + 0.0022, 0.0013, step, program, label),
        ]
        if step % 5 == 2:
            made.append(Span("compile", "compiler", begin + 0.001, 0.007, step, program, label))
    return tuple(made)


def made_recording(steps: int = 40, file: str = "/home/user/train.py", name: str = "train.py") -> Recording:
    """A run of `steps` steps; `file` is the user's file and `name` stands wherever else a name may stand."""
    known = programs(file, 5)
    return Recording(
        command=("python", name),
        started="2026-03-01T10:00:00",
        duration_s=steps * STEP_S,
        steps=steps,
        versions={"torch_ltc": "0.1.0", "torch": "2.13.0", "python": "3.11.2", "name": name},
        settings=(SettingRow("backend", "torchscript", "default"), SettingRow("report", name, "env")),
        programs=known,
        spans=spans(steps, name),
        syncs=(
            SyncRow(
                line_of(file, 31), "sync", "an optimizer finished its step", steps, steps, 0.01, 0, (1, 2, 3, 4, 5)
            ),
            SyncRow(line_of(file, 32, name), "read", "item", steps, steps, steps * 0.0014, 4 * steps, (1,)),
        ),
        fallbacks=(FallbackRow("aten::nonzero", name, line_of(file, 33), 12, 0.004),),
        compiles=tuple(
            CompileRow(
                row.identity,
                "torchscript",
                0.01 * row.identity,
                0.007,
                row.identity,
                row.identity,
                False,
                True,
                row.explanation or Explanation(1, "LTC101", "first", 0, "", line_of(file, 12)),
            )
            for row in known
        ),
        memory=Memory(
            current_bytes=3 << 20,
            peak_bytes=5 << 20,
            samples=tuple((step * STEP_S, (2 << 20) + (step % 7) * (1 << 19)) for step in range(steps)),
            largest=(
                BufferRow(line_of(file, 40), name, 12, 2 << 20),
                BufferRow(line_of(file, 5), "upload", 2, 1 << 20),
            ),
            physical={"rss_bytes": 400 << 20},
        ),
        metrics={"counters": {"MarkStep": steps, name: 1}, "times": {"bad": float("nan")}},
    )


def made_findings(file: str = "/home/user/train.py", name: str = "train.py") -> list[Finding]:
    return [
        Finding(
            "item_in_loop",
            "LTC201",
            "warning",
            f"item() in the loop of {name}",
            "40 reads waited for 56 ms, 35 % of the run",
            line_of(file, 32),
            "keep losses as tensors and read them every 100 steps",
            0.056,
        ),
        Finding(
            "fallback",
            "LTC203",
            "hint",
            "aten::nonzero ran eagerly",
            "12 times, 4 ms",
            line_of(file, 33),
            "use torch.where with three arguments",
        ),
        Finding(
            "recompiles",
            "LTC202",
            "error",
            "a dimension that recompiles",
            "5 compilations at one site",
            line_of(file, 12, "forward"),
            "pad the last batch",
            0.2,
        ),
    ]
