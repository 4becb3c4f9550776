"""Loses a GPU: an index out of range, and what every later call says of it. Needs CUDA; each case is a process.

python scripts/lose_device.py
"""

from __future__ import annotations

import os
import subprocess
import sys

CASE = """
import gc, sys, torch, torch_ltc
from torch_ltc.errors import DeviceLostError

torch_ltc.config.settings.backend = sys.argv[1]
batches = [torch.ones(1000, 64).to("ltc", non_blocking=True) for _ in range(8)]
table = torch.ones(10, 64).to("ltc")
rows = torch.tensor([1, 2, 5000]).to("ltc")
other = torch.ones(4).to("ltc")
torch_ltc.sync(wait=True)
taken = table.index_select(0, rows)  # the line
made = (taken * 2).sum()
said = []
for attempt in range(4):
    try:
        (made if attempt == 0 else (other + attempt).sum()).item()
    except DeviceLostError as error:
        said.append(str(error))
    except Exception as error:
        said.append(f"another error: {type(error).__name__}: {error}")
    del batches[:2]
    gc.collect()
print(said[0])
assert len(said) == 4, said
assert all("<string>:11" in text and "index_select" in text for text in said), said
try:
    torch.ones(5).to("ltc")
except Exception as error:
    print(type(error).__name__, "at an upload")
"""


def main() -> int:
    """Run the cases; 1 when one fails or is aborted."""
    failed = 0
    for backend in ("interpreter", "torchscript", "auto"):
        done = subprocess.run(
            [sys.executable, "-c", CASE, backend],
            env={**os.environ, "LTC_TS_CUDA": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        ended = "as it should" if done.returncode in (0, 120) else f"WRONG: status {done.returncode}"
        failed += done.returncode not in (0, 120)
        print(f"== {backend}: {ended}\n{done.stdout}{done.stderr[-2000:] if done.returncode else ''}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
