"""Each of the doctor's rules: what it says of a recording that has the fault, and its silence where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.recordings import (
    compilation,
    explanation,
    fallback,
    growing,
    held,
    line,
    program,
    read,
    recording,
    sync,
    upload,
)
from torch_ltc.debug.doctor import examine, rules
from torch_ltc.debug.doctor.figures import listed, percent
from torch_ltc.debug.recording import Finding, Memory, NonFiniteRow, Recording, SettingRow, Span
from torch_ltc.formatting import duration_text


def found(code: str, made: Recording) -> list[Finding]:
    """What one rule finds."""
    return [finding for finding in examine(made) if finding.code == code]


def only(code: str, made: Recording) -> Finding:
    findings = found(code, made)
    assert len(findings) == 1
    return findings[0]


# ---- reads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "code", "title", "fix"),
    [
        ("item", "LTC201", "a number is read in the loop", "torch_ltc.async_item"),
        ("print", "LTC202", "a tensor is printed in the loop", "settings.tensor_repr"),
        ("copy", "LTC203", "a tensor is copied off the device in the loop", "add_step_closure"),
    ],
)
def test_a_read_in_most_steps(reason: str, code: str, title: str, fix: str) -> None:
    made = recording(syncs=(sync(), read(reason, wait_s=0.4)))
    finding = only(code, made)
    assert [other.code for other in examine(made)] == [code]
    assert (finding.title, finding.severity, finding.source, finding.cost_s) == (title, "warning", line(31), 0.25)
    assert finding.evidence.startswith(
        "100 reads in 100 of 100 steps; the program waited 400 ms for them, 40 % of its time. At most 250 ms of that "
        "can be saved, by recording while the device works"
    )
    assert finding.evidence.endswith("; 400 B were copied" if reason == "copy" else "device works")
    assert fix in finding.fix


def test_a_read_that_costs_little_is_a_hint() -> None:
    assert only("LTC201", recording(syncs=(read(wait_s=0.04),))).severity == "hint"
    assert only("LTC201", recording(syncs=(read(wait_s=0.06),))).severity == "warning"


def test_many_reads_without_a_step_are_a_loop_too() -> None:
    finding = only("LTC201", recording(syncs=(read(count=40, steps=1),)))
    assert finding.evidence.startswith("40 reads with hardly a step between them; ")
    assert only("LTC201", recording(steps=0, syncs=(read(count=20, steps=0),))).source == line(31)


@pytest.mark.parametrize(
    "made",
    [
        recording(syncs=(read(count=10, steps=10),)),
        recording(syncs=(read(count=150, steps=10),)),
        recording(steps=4, syncs=(read(count=4, steps=4),)),
        recording(syncs=(sync("read", 31),)),
    ],
    ids=["every tenth step", "a few reads every tenth step", "too few steps", "a sync"],
)
def test_reads_now_and_then_are_no_finding(made: Recording) -> None:
    assert found("LTC201", made) == []


# ---- compilations --------------------------------------------------------------------------------------------------


def test_a_size_that_is_compiled_again_and_again() -> None:
    rows = tuple(compilation(number) for number in range(1, 6))
    finding = only("LTC204", recording(compiles=rows))
    assert found("LTC205", recording(compiles=rows)) == []
    assert finding.evidence == (
        "compiled again 4 times, which took 2.00 s: input 0 is float32[2,3], was float32[1,3]; "
        "input 0 is float32[3,3], was float32[2,3]; input 0 is float32[4,3], was float32[3,3]; and 1 more"
    )
    assert (finding.source, finding.cost_s, finding.severity) == (line(9), 2.0, "warning")
    assert only("LTC204", recording(compiles=tuple(compilation(number, "guard") for number in (1, 2, 3)))).cost_s == 1.0


def test_recompilations_that_cost_little_are_a_hint() -> None:
    for cause, code in (("size", "LTC204"), ("live", "LTC205")):
        rows = tuple(compilation(number, cause, 0.004) for number in (2, 3))
        assert only(code, recording(compiles=rows)).severity == "hint"
        assert only(code, recording(compiles=rows, duration_s=0.7)).severity == "warning"


def test_any_other_cause_that_is_compiled_again_and_again() -> None:
    rows = (compilation(1, "first"), *(compilation(n, "live", advice="Drop it.") for n in (2, 3)))
    finding = only("LTC205", recording(compiles=rows))
    assert found("LTC204", recording(compiles=rows)) == []
    assert finding.title == "programs are compiled again and again (live)"
    assert finding.evidence.startswith("compiled again 2 times, which took 1.00 s: ")
    assert finding.evidence.endswith("(LTC102)")
    assert finding.fix == "Drop it."


@pytest.mark.parametrize("cause", ["size", "guard", "live", "operation"])
def test_one_recompilation_is_none_too_many(cause: str) -> None:
    rows = (compilation(1, "first"), compilation(2, cause), compilation(3, cause, loaded=True), compilation(1, cause))
    assert examine(recording(compiles=rows)) == []


@pytest.mark.parametrize("cause", ["mode", "backend", "first"])
def test_compilations_for_a_good_reason_are_no_finding(cause: str) -> None:
    assert examine(recording(compiles=tuple(compilation(number, cause) for number in range(1, 9)))) == []


def slow(**changes: Any) -> Recording:
    """A program that took 3 s to compile: 10 ms a run in the interpreter, 5 ms after that."""
    row = program(runs=102, interpreted=2, interpreted_s=0.02, run_s=0.52, compile_s=3.0)
    return recording(programs=(row,), duration_s=10.0, **changes)


def test_a_compilation_that_does_not_pay() -> None:
    finding = only("LTC209", slow())
    assert (finding.title, finding.severity, finding.cost_s) == ("compiling has not paid so far", "hint", 0.0)
    assert finding.evidence == (
        "compiling program 1 took 3.00 s; a run takes 5 ms compiled and 10 ms in the interpreter; it pays from run 601 "
        "on, and there were 100"
    )
    assert only("LTC209", slow(setting={"tiers": "blocking"})).cost_s == pytest.approx(2.5)


def test_a_compiled_program_that_is_not_faster() -> None:
    row = program(runs=12, interpreted=2, interpreted_s=0.01, run_s=0.11, compile_s=1.0)
    finding = only("LTC209", recording(programs=(row,), duration_s=10.0, setting={"tiers": "off"}))
    assert (finding.title, finding.severity) == ("the compiled program is not faster", "warning")
    assert finding.evidence.endswith("; 10 runs gained nothing")


@pytest.mark.parametrize(
    "changes",
    [
        {"compile_s": 0.4, "interpreted_s": 0.002},
        {"compile_s": 3.0, "interpreted_s": 1.0, "run_s": 1.5},
        {"compile_s": 3.0, "runs": 6},
        {"compile_s": 3.0, "interpreted": 0},
    ],
    ids=["quick", "paid", "too few runs to tell", "nothing to compare with"],
)
def test_a_compilation_of_which_nothing_bad_is_known(changes: dict[str, Any]) -> None:
    assert examine(recording(programs=(program(**changes),), duration_s=10.0)) == []


def test_a_program_that_the_backend_refused() -> None:
    text = "xla has no lowering for aten::foo\n  recorded at train.py:20"
    rows = tuple(program(n, refused=text, interpreted=50, run_s=0.25) for n in (1, 2))
    finding = only("LTC211", recording(programs=rows, duration_s=10.0))
    assert finding.title == "the backend refused 2 programs"
    assert finding.evidence == "100 runs in the interpreter, 500 ms in all: xla has no lowering for aten::foo"
    assert finding.source == line(20)
    assert only("LTC211", recording(programs=rows[:1])).title == "the backend refused a program"


def once(count: int, **changes: Any) -> tuple[Any, ...]:
    """Programs that were synced once."""
    return tuple(
        program(10 + n, syncs=1, runs=1, interpreted=1, compiles=0, backend="interpreter", **changes)
        for n in range(count)
    )


def test_programs_that_come_once_each() -> None:
    why = explanation("live", 14, "results %3 and %7 are held, not %3 alone", "Drop what is not needed.", "LTC110")
    finding = only("LTC212", recording(programs=once(30, explanation=why)))
    assert finding.evidence == (
        "30 of 30 syncs at this line had a program that came once; the last differs from an earlier one in this: "
        "results %3 and %7 are held, not %3 alone"
    )
    assert (finding.source, finding.fix) == (line(14), "Drop what is not needed.")
    bare = only("LTC212", recording(programs=once(30)))
    assert (bare.evidence, bare.source) == ("30 of 30 syncs at this line had a program that came once", line(30))


@pytest.mark.parametrize(
    "programs",
    [(*once(9),), (*once(30), program()), (*once(5), *once(5, site=line(40)))],
    ids=["warm-up", "mostly one program", "at two lines"],
)
def test_programs_that_come_again(programs: tuple[Any, ...]) -> None:
    assert found("LTC212", recording(programs=programs)) == []


def test_programs_that_run_compiled_are_used_again_although_each_is_new() -> None:
    rows = tuple(program(n, syncs=1, runs=1, interpreted=0, compiles=0) for n in range(30))
    assert found("LTC212", recording(programs=rows)) == []


def test_sizes_that_never_come_again() -> None:
    why = explanation("size", 14, "size 0 of input 0 was 9, is now 10")
    rows = tuple(
        program(n, syncs=1, runs=1, interpreted=0, compiles=0, record_s=0.01, explanation=why) for n in range(30)
    )
    finding = only("LTC220", recording(programs=rows))
    assert finding.evidence == (
        "30 of 30 syncs at this line had a program that came once; recording them took 300 ms, 30 % of the run; the "
        "last because size 0 of input 0 was 9, is now 10"
    )
    assert (finding.source, finding.severity, finding.cost_s) == (line(14), "hint", pytest.approx(0.3))
    assert only("LTC220", recording(programs=tuple(replace(row, record_s=0.02) for row in rows))).severity == "warning"
    assert found("LTC220", recording(programs=tuple(replace(row, record_s=0.0001) for row in rows))) == []
    assert found("LTC220", recording(programs=(*rows, program(99)))) == []


def test_a_backend_that_hardly_ran() -> None:
    idle = program(interpreted=95, states=("interpreted", "queued", "compiling"))
    chosen = SettingRow("backend", "'inductor'", "code")
    finding = only("LTC221", replace(recording(programs=(idle,)), settings=(chosen,)))
    assert finding.title == "inductor ran few of the programs"
    assert finding.evidence == (
        "5 of 100 runs on inductor, the others in the interpreter; programs by compile state: 1 compiling"
    )
    assert finding.severity == "warning"
    default = SettingRow("backend", "'torchscript'", "default")
    assert only("LTC221", replace(recording(programs=(idle,)), settings=(default,))).severity == "hint"
    assert found("LTC221", replace(recording(), settings=(chosen,))) == []
    own = SettingRow("backend", "'interpreter'", "code")
    assert found("LTC221", replace(recording(programs=(idle,)), settings=(own,))) == []


def test_a_program_that_stays_in_the_interpreter_by_measurement() -> None:
    row = program(choice="interpreter, chosen by measurement: interpreter 1.00 ms, torchscript 1.20 ms", run_s=9.0)
    finding = only("LTC224", recording(programs=(row,)))
    assert "interpreter 1.00 ms, torchscript 1.20 ms" in finding.evidence
    assert found("LTC224", recording(programs=(replace(row, run_s=0.0),))) == []
    assert found("LTC224", recording(programs=(replace(row, choice="torchscript, chosen"),))) == []
    close = SettingRow("numerics", "'close'", "env")
    assert found("LTC224", replace(recording(programs=(row,)), settings=(close,))) == []


def test_long_compilations_that_are_not_kept() -> None:
    rows = (compilation(1, "first", 4.0), compilation(2, "operation", 3.0), compilation(3, loaded=True))
    finding = only("LTC214", recording(compiles=rows, setting={"cache_dir": "off"}))
    assert (finding.evidence, finding.cost_s) == ("2 compilations took 7.00 s, and cache_dir is 'off'", 7.0)
    assert found("LTC214", recording(compiles=rows)) == []
    assert found("LTC214", recording(compiles=rows[:1], setting={"cache_dir": "off"})) == []


def test_a_run_that_ends_before_its_programs_are_compiled() -> None:
    states = ("interpreted", "queued", "compiling")
    waiting = program(1, runs=204, interpreted=204, compiles=0, backend="interpreter", states=states)
    finding = only("LTC222", recording(programs=(waiting,), setting={"backend": "inductor"}))
    assert finding.evidence == "0 of 204 runs on inductor; 1 program waited for the compiler"
    assert found("LTC222", recording(programs=(program(2),))) == []


# ---- programs ------------------------------------------------------------------------------------------------------


def test_a_hot_program_that_is_not_captured() -> None:
    refusal = "not captured: aten::unique at train.py:7: operation not permitted"
    row = program(capture=refusal, run_s=0.5)
    finding = only("LTC225", recording(programs=(row,)))
    assert finding.evidence == f"program 1, 50 % of the run: 0 of 100 runs were replays; {refusal}"
    assert finding.source == row.site
    captured = "captured as 1 graph: 20 inputs where they are, 0 copied"
    assert found("LTC225", recording(programs=(replace(row, capture=captured, replays=97),))) == []
    assert found("LTC225", recording(programs=(replace(row, runs=5),))) == []
    assert found("LTC225", recording(programs=(program(),))) == []
    off = tuple(SettingRow(name, value, "env") for name, value in (("device_type", "cuda"), ("cuda_graphs", "off")))
    finding = only("LTC225", replace(recording(programs=(program(),)), settings=off))
    assert (finding.evidence.rpartition("; ")[2], finding.fix) == (
        "cuda_graphs is off",
        'settings.cuda_graphs = "auto"',
    )


def test_an_operation_that_runs_eagerly() -> None:
    finding = only("LTC206", recording(fallbacks=(fallback(),)))
    assert (finding.title, finding.severity) == ("aten::nonzero runs eagerly in the loop", "warning")
    assert finding.evidence == (
        "100 times, 300 ms in all, 30 % of the run, because the size of its result depends on data"
    )
    assert (finding.source, finding.cost_s) == (line(25), 0.3)
    assert only("LTC206", recording(fallbacks=(fallback(total_s=0.001),))).severity == "warning"
    seldom = only("LTC206", recording(fallbacks=(fallback(count=1, total_s=0.001),)))
    assert (seldom.title, seldom.severity) == ("aten::nonzero runs eagerly", "hint")


def test_a_run_that_is_cut_into_tiny_programs() -> None:
    programs = (program(1, calls=4), program(2, calls=2))
    syncs = (sync("optimizer", 30), sync("read", 22, 300, programs=(2,)), sync("seed", 23, 100, programs=(1,)))
    finding = only("LTC207", recording(programs=programs, syncs=syncs))
    assert finding.evidence == (
        "400 of 500 syncs had programs of 2.5 operations on average, cut by read at train.py:22 in train (300 times); "
        "seed at train.py:23 in train (100 times)"
    )
    assert (finding.source, finding.severity) == (line(22), "warning")


def test_a_sync_beside_the_optimizers_cuts_a_step() -> None:
    syncs = (sync("optimizer", 30), sync("explicit", 34, programs=(2,)))
    finding = only("LTC207", recording(programs=(program(), program(2, calls=1)), syncs=syncs))
    assert finding.evidence == (
        "100 of 200 syncs had programs of 1.0 operations on average, cut by explicit at train.py:34 in train "
        "(100 times)"
    )


def test_syncs_at_two_lines_cut_a_step() -> None:
    syncs = (sync("explicit", 30, 50), sync("explicit", 31, 50))
    finding = only("LTC207", recording(programs=(program(calls=3),), syncs=syncs))
    assert finding.evidence.startswith(
        "100 of 100 syncs had programs of 3.0 operations on average, cut by explicit at "
    )


@pytest.mark.parametrize(
    ("calls", "syncs"),
    [
        (3, (sync("explicit"),)),
        (3, (sync("optimizer"), sync("fallback", 22, 300))),
        (3, (sync("optimizer"), sync("read", 22, 10))),
        (200, (sync("optimizer"), sync("read", 22, 300))),
        (3, (sync("optimizer"), sync("read", 22, 300, programs=(99,)))),
    ],
    ids=[
        "a small model",
        "a fallback",
        "a read now and then",
        "large programs",
        "programs that are not known any more",
    ],
)
def test_programs_that_are_not_tiny_or_not_cut(calls: int, syncs: tuple[Any, ...]) -> None:
    assert found("LTC207", recording(programs=(program(calls=calls),), syncs=syncs)) == []


def test_programs_that_are_cut_by_the_bound() -> None:
    programs = (program(), program(2, reason="bound"), program(3, reason="bound"))
    finding = only("LTC208", recording(programs=programs, syncs=(sync(), sync("bound", 17, 3))))
    assert finding.evidence == "3 cuts at 20000 pending instructions, 2 different programs"
    assert (finding.severity, finding.source) == ("warning", line(17))
    assert only("LTC208", recording(syncs=(sync("bound", 17, 1),))).severity == "hint"
    assert found("LTC208", recording(syncs=(sync(),))) == []


def test_a_program_that_failed() -> None:
    finding = only("LTC215", recording(programs=(program(failed=2),)))
    assert finding.evidence == "program 1 failed in 2 of 100 runs on torchscript"
    assert (finding.severity, finding.source) == ("error", line(30))


def test_a_nan_that_was_found() -> None:
    text = "LTC301: aten::log made 2 NaN out of finite numbers in program 3\n  input: float32[4], -1 .. 2"
    text = f"{text}\n  result: x\n  more"
    rows = (NonFiniteRow(3, "aten::log", line(7), 4, text), NonFiniteRow(4, "aten::log", line(7), 5, text))
    finding = only("LTC219", recording(nonfinite=rows))
    assert finding.title == "aten::log made a NaN or an infinity"
    assert finding.evidence == (
        "after step 4: LTC301: aten::log made 2 NaN out of finite numbers in program 3; input: float32[4], -1 .. 2; "
        "result: x"
    )
    assert (finding.severity, finding.source) == ("error", line(7))
    given = only("LTC219", recording(nonfinite=(NonFiniteRow(3, "", line(7), 4, "LTC302: an input"),)))
    assert given.title == "an input held a NaN or an infinity"
    assert found("LTC219", recording()) == []


# ---- memory --------------------------------------------------------------------------------------------------------


def test_memory_that_grows_with_every_step() -> None:
    memory = Memory(5000, 5000, growing(1000, 100), (held(100, 4000), held(120, 200_000, 5, "upload")))
    finding = only("LTC210", recording(memory=memory))
    assert finding.evidence == (
        "100 buffers made here by aten::mse_loss are alive after 100 steps, 3.9 KiB; all buffers together grew by "
        "2.0 KiB from the second to the last quarter of the run"
    )
    assert (finding.source, finding.severity) == (line(32), "warning")
    late = tuple((0.0 if index == 0 else 50 + index / 100, size) for index, (_, size) in enumerate(growing(1000, 100)))
    assert found("LTC210", recording(memory=Memory(5000, 5000, late, (held(100, 4000),)))) != []
    little = Memory(500_000, 500_000, growing(1000, 100), (held(100, 4000),))
    assert only("LTC210", recording(memory=little)).severity == "hint"


@pytest.mark.parametrize(
    ("steps", "samples", "count"),
    [(100, growing(5000, 0), 100), (100, growing(1000, 100), 89), (9, growing(1000, 100), 100), (100, (), 100)],
    ids=["constant", "fewer than steps", "too few steps", "no samples"],
)
def test_memory_that_does_not_grow(steps: int, samples: tuple[tuple[float, int], ...], count: int) -> None:
    memory = Memory(5000, 5000, samples, (held(count, 4000),))
    assert found("LTC210", recording(steps=steps, memory=memory)) == []


def test_many_buffers_of_one_moment_are_parameters() -> None:
    rows = (held(500, 4000, runs=2), held(200, 4000, 33, runs=90))
    assert only("LTC210", recording(memory=Memory(5000, 5000, growing(1000, 100), rows))).source == line(33)


# ---- balance -------------------------------------------------------------------------------------------------------


def test_many_small_uploads_in_each_step() -> None:
    spans = (*(upload(step) for step in range(1, 101) for _ in range(9)), upload(5, 1 << 20), upload(0))
    finding = only("LTC213", recording(spans=spans, duration_s=10.0))
    assert finding.evidence == ("9 in a step in the middle of the run, 64 B each on average; 900 copies took 900 ms")
    assert (finding.severity, finding.cost_s) == ("warning", pytest.approx(0.9))
    quick = tuple(upload(step, duration_s=1e-5) for step in range(1, 101) for _ in range(9))
    assert only("LTC213", recording(spans=quick)).severity == "hint"


@pytest.mark.parametrize(
    "spans",
    [
        tuple(upload(0) for _ in range(1000)),
        tuple(upload(step) for step in range(1, 101) for _ in range(2)),
        tuple(upload(step, 1 << 20) for step in range(1, 101) for _ in range(20)),
        tuple(upload(step) for step in range(1, 11) for _ in range(20)),
    ],
    ids=["before the first step", "few", "large", "in few steps"],
)
def test_uploads_that_are_as_they_should_be(spans: tuple[Any, ...]) -> None:
    assert examine(recording(spans=spans)) == []


def test_syncs_that_wait_for_room() -> None:
    waiting = (sync(wait_s=0.3), sync("explicit", 40, wait_s=0.1))
    uneven = (program(run_s=0.45), program(2, run_s=0.045))
    finding = only("LTC216", recording(syncs=waiting, programs=uneven))
    assert "queue_bound" in finding.fix
    blocking = {"setting": {"tiers": "blocking"}, "compiles": (compilation(1, "first", 0.3),)}
    finding = only("LTC216", recording(syncs=waiting, **blocking))
    assert finding.fix == "Let programs be compiled in the background: settings.tiers = 'background'."
    assert finding.evidence == (
        "syncs took 400 ms, 40 % of the run, 300 ms of that here; the device ran programs for 50 % of it"
    )
    assert (finding.source, finding.severity) == (line(30), "hint")
    # Recording is as quick as the device, and what is advised is so already.
    assert found("LTC216", recording(syncs=waiting)) == []
    assert found("LTC216", recording(syncs=waiting, compiles=(compilation(1, "first", 0.3),))) == []
    assert found("LTC216", recording(syncs=(sync(wait_s=0.1),), programs=uneven)) == []
    assert found("LTC216", recording(syncs=(sync(wait_s=0.3),), programs=(program(run_s=0.9),))) == []


def test_the_device_is_the_limit() -> None:
    finding = only("LTC217", recording(programs=(program(run_s=0.9),)))
    assert (finding.evidence, finding.severity) == ("programs ran for 900 ms, 90 % of 1.00 s", "hint")
    assert found("LTC217", recording(programs=(program(run_s=0.7),))) == []
    assert found("LTC217", recording(programs=(program(run_s=0.9),), duration_s=0.95)) == []


def test_recording_is_the_limit() -> None:
    finding = only("LTC218", recording(programs=(program(record_s=0.8, run_s=0.2),)))
    assert finding.evidence == "recording took 800 ms, 80 % of the run, and the device ran for 200 ms, 20 %"
    assert finding.severity == "hint"
    assert found("LTC218", recording(programs=(program(record_s=0.8, run_s=0.6),))) == []
    # Importing in the first step is no recording.
    imports = Span("record", "user", 0.0, 1.0, 0)
    rest = Span("run", "worker", 1.0, 1.5, 99)
    assert found("LTC218", recording(spans=(imports, rest), programs=(program(record_s=1.5, run_s=0.2),))) == []
    finding = only("LTC218", recording(spans=(imports, rest), programs=(program(record_s=2.2, run_s=0.2),)))
    assert finding.evidence.startswith("recording took 1.20 s, 80 % of the run after the first step, ")
    assert found("LTC218", recording(programs=(program(record_s=0.5, run_s=0.2),))) == []


# ---- all -----------------------------------------------------------------------------------------------------------


def test_an_empty_recording_has_no_findings() -> None:
    empty = recording(
        steps=0, duration_s=0.0, programs=(), syncs=(), compiles=(), memory=Memory(), spans=(), settings=()
    )
    assert examine(empty) == []


def test_every_rule_is_tested_here() -> None:
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    assert [each.message.code for each in rules if f'"{each.message.code}"' not in text] == []


def test_figures() -> None:
    assert [duration_text(value) for value in (0, 85e-6, 0.0012345, 0.9994, 0.9996, 61)] == [
        "0 us",
        "85 us",
        "1.23 ms",
        "999 ms",
        "1.00 s",
        "61.00 s",
    ]
    assert (percent(1, 3), percent(1, 0)) == ("33 %", "0 %")
    assert (listed(["a"]), listed(["a", "b", "c", "d", "e"])) == ("a", "a; b; c; and 2 more")
