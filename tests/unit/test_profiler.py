"""What PyTorch's profiler shows of the device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ltc
from torch_ltc.config import settings
from torch_ltc.debug.entry_points import profile
from torch_ltc.pytorch.profiler_ranges import span

CPU = [torch.profiler.ProfilerActivity.CPU]


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def names(profiled: torch.profiler.profile) -> list[str]:
    """The device's own ranges, in the profiler's table."""
    return sorted(event.key for event in profiled.key_averages() if event.key.startswith("ltc "))


def test_a_profiler_of_all_threads_shows_records_compiles_runs_and_waits(tmp_path: Path) -> None:
    x = torch.ones(17, 3).to("ltc")
    torch_ltc.sync(wait=True)
    with settings.scope(backend="torchscript"), profile(activities=CPU) as profiled:
        for _ in range(2):
            x.exp().log().cpu()
        torch_ltc.sync(wait=True)
    shown = names(profiled)
    (compiled,) = [name for name in shown if name.startswith("ltc compile")]
    program = compiled.removeprefix("ltc compile ").removesuffix(" (torchscript)")
    assert shown == [
        compiled,
        "ltc read (copy)",
        f"ltc run {program} (interpreter)",
        f"ltc run {program} (torchscript)",
        "ltc sync (explicit)",
        "ltc sync (read)",
        "ltc wait",
    ]
    assert {"aten::exp", "aten::log"} <= {event.key for event in profiled.key_averages()}, "calls, as they are recorded"
    path = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(path))
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    threads = {event["name"]: event["tid"] for event in events if str(event.get("name")) in shown}
    assert set(threads) == set(shown)
    assert threads[f"ltc run {program} (torchscript)"] != threads["ltc wait"]


def test_a_plain_profiler_shows_the_users_thread() -> None:
    x = torch.ones(17, 3).to("ltc")
    torch_ltc.sync(wait=True)
    with torch.profiler.profile(activities=CPU, acc_events=True) as profiled:
        x.exp().log().cpu()
        torch_ltc.sync(wait=True)
    assert names(profiled) == ["ltc read (copy)", "ltc sync (explicit)", "ltc sync (read)", "ltc wait"]


def test_the_devices_own_activity_is_accepted_and_adds_nothing() -> None:
    x = torch.ones(17, 3).to("ltc")
    torch_ltc.sync(wait=True)
    with profile(activities=[*CPU, torch.profiler.ProfilerActivity.PrivateUse1]) as profiled:
        x.exp().log().cpu()
    assert "ltc sync (read)" in names(profiled)


def test_a_config_of_the_users_is_left_as_it_is() -> None:
    config = torch._C._profiler._ExperimentalConfig(verbose=True)
    made = profile(activities=CPU, experimental_config=config)
    assert made.experimental_config is config


def test_without_a_profiler_every_range_is_the_same_nothing() -> None:
    assert span("run", 7, "torchscript") is span("wait")
    with pytest.raises(ValueError, match="through"), span("run"):
        raise ValueError("errors go through")
