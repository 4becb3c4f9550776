"""The modes that programs are run in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch_ltc
from tests.fuzz.program import Mode
from tests.support.backends import FunctionalBackend, SymbolicBackend, registered
from tests.support.graphs import graphs_on_the_cpu
from torch_ltc.config import settings

MODES = {
    mode.name: mode
    for mode in (
        Mode("interpreter", {"backend": "interpreter", "tiers": "blocking"}),
        Mode("torchscript", {"backend": "torchscript", "tiers": "blocking"}),
        Mode("off", {"backend": "torchscript", "tiers": "off"}),
        Mode("auto", {"backend": "auto", "tiers": "background"}),
        Mode("fixed", {"backend": "torchscript", "tiers": "blocking", "promotion": False}),
        Mode("short", {"backend": "torchscript", "tiers": "blocking", "pending_bound": 3, "tree_bound": 50}),
        Mode("eager", {"backend": "torchscript", "tiers": "blocking", "eager_regions": "always"}),
        Mode("captured", {"backend": "interpreter", "tiers": "blocking", "cuda_graphs": "always"}, captured=True),
        Mode("python", {"backend": "torchscript", "tiers": "blocking"}, {"LTC_NATIVE": "0"}),
        Mode("native", {"backend": "torchscript", "tiers": "blocking"}, {"LTC_NATIVE": "1"}),
        Mode("python-interpreter", {"backend": "interpreter"}, {"LTC_NATIVE": "0"}),
        Mode(
            "python-captured", {"backend": "interpreter", "cuda_graphs": "always"}, {"LTC_NATIVE": "0"}, captured=True
        ),
        Mode("functional", {"backend": "functional", "tiers": "blocking"}, equal=False),
        Mode("symbolic", {"backend": "symbolic", "tiers": "blocking"}, equal=False),
        Mode("inductor", {"backend": "inductor", "tiers": "blocking"}, equal=False),
        Mode("xla", {"backend": "xla", "tiers": "blocking"}, equal=False),
        # With LTC_TS_CUDA=1 and `--oracle cuda`.
        Mode("cuda", {"cuda_graphs": "always"}, {"LTC_TS_CUDA": "1"}, equal=False),
        Mode("cuda-interpreter", {"backend": "interpreter", "cuda_graphs": "off"}, {"LTC_TS_CUDA": "1"}, equal=False),
        Mode("cuda-captured", {"backend": "interpreter", "cuda_graphs": "always"}, {"LTC_TS_CUDA": "1"}, equal=False),
    )
}
# Those that the corpus of the tests runs in, with the extension in C++ as it is there or not.
EVERYWHERE = ("interpreter", "torchscript", "off", "auto", "fixed", "short", "eager", "captured")


_OF_TESTS = {"functional": FunctionalBackend, "symbolic": SymbolicBackend}


@contextmanager
def entered(mode: Mode) -> Iterator[None]:
    """Programs run in this mode inside the block."""
    with ExitStack() as stack:
        if mode.captured:
            stack.enter_context(graphs_on_the_cpu())
        if mode.settings.get("backend") in _OF_TESTS:
            stack.enter_context(registered(_OF_TESTS[mode.settings["backend"]]()))
        stack.enter_context(settings.scope(cache_dir="off", recompiles="allow", fallback="allow", **mode.settings))
        yield
        torch_ltc.sync(wait=True)
        torch_ltc.wait_for_compiles()
