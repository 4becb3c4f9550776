"""Programs that XLA compiled, kept on disk."""

from __future__ import annotations

from pathlib import Path

import torch

import torch_ltc
from tests.support.backends import seen_events, used
from torch_ltc import events
from torch_ltc.config import settings


def test_what_xla_compiled_is_loaded_the_next_time(tmp_path: Path) -> None:
    x = 0.1 * torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    with settings.scope(backend="xla", tiers="background", cache_dir=str(tmp_path)):
        for kind in (events.CompileEvent, events.LoadEvent):
            torch_ltc.ir_cache.reset()
            held = x.to("ltc")
            expected = x.clone()
            with seen_events() as seen:
                for _ in range(4):
                    # An update in place: XLA is given the memory.
                    held += held.sin().mm(held.t()).sum(0)[:1]
                    expected += expected.sin().mm(expected.t()).sum(0)[:1]
                    torch_ltc.sync()
                    torch_ltc.wait_for_compiles()
                torch.testing.assert_close(held.cpu(), expected, rtol=1e-4, atol=1e-4)
            assert "xla" in used(seen)
            made = [type(event) for event in seen if isinstance(event, (events.CompileEvent, events.LoadEvent))]
            assert set(made) == {kind}
    torch_ltc.ir_cache.reset()
