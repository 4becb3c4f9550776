"""Settings for all tests: programs are compiled by one backend when they are due, and nothing is kept on disk.

So that a test can count what was compiled and see what ran. `LTC_TEST_TIERS=background`, `LTC_TEST_BACKEND=auto` and
`LTC_TEST_EAGER=auto` run them with the defaults instead: what they compute must be the same. Two markers say what
depends on it:

- `blocking_tiers`: counts compilations, or looks at the run that must be the backend's; keeps `blocking`.
- `blocking_session`: the same, of a run that it shares with other tests; skipped with `background`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

TIERS = os.environ.get("LTC_TEST_TIERS", "blocking")
BACKEND = os.environ.get("LTC_TEST_BACKEND", "torchscript")
EAGER = os.environ.get("LTC_TEST_EAGER", "off")
CHECK = os.environ.get("LTC_TEST_CHECK", "invariants")


@pytest.fixture(autouse=True)
def tiers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The settings, here and for processes that a test starts."""
    if TIERS != "blocking" and request.node.get_closest_marker("blocking_session"):
        pytest.skip("looks at what was compiled when")
    chosen = "blocking" if request.node.get_closest_marker("blocking_tiers") else TIERS
    monkeypatch.setenv("LTC_TIERS", chosen)
    monkeypatch.setenv("LTC_CACHE_DIR", "off")
    monkeypatch.setenv("LTC_BACKEND", BACKEND)
    monkeypatch.setenv("LTC_EAGER_REGIONS", EAGER)
    monkeypatch.setenv("LTC_CHECK", CHECK)
    # One line of a test often compiles one program after the other.
    monkeypatch.setenv("LTC_RECOMPILES", "allow")
    # Imported late: some tests look at what importing the package does.
    config = pytest.importorskip("torch_ltc.config")
    settings = config.settings
    before = {name: getattr(settings, name) for name in config.SETTINGS}
    chosen_settings = {"tiers": chosen, "cache_dir": "off", "recompiles": "allow", "backend": BACKEND}
    with settings.scope(**chosen_settings, eager_regions=EAGER, check=CHECK):
        # A program that another test has recorded first has the lines of that test.
        pytest.importorskip("torch_ltc").ir_cache.reset()
        yield
        if CHECK == "invariants":
            sys.modules["torch_ltc.execute.executor"].executor.drain()
            sys.modules["torch_ltc.debug.invariants"].invariants.check_idle()
    changed = {name: getattr(settings, name) for name in before if getattr(settings, name) != before[name]}
    for name in changed:
        setattr(settings, name, before[name])
    assert not changed, f"the test leaves other settings behind: {changed}"
    if chosen == "background":
        # What one test has begun must not disturb the next.
        pytest.importorskip("torch_ltc").wait_for_compiles()
