"""A training on the device says nothing of its own: what PyTorch deprecates and the package uses is not the user's."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = """
import sys
import torch, torch_ltc
torch_ltc.config.settings.tiers = "blocking"
torch_ltc.config.settings.cache_dir = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to("ltc")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    loss = model(torch.ones(3, 4).to("ltc")).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
torch_ltc.debug.dump_ir([loss * 2], "backend")
count = torch_ltc.metrics.counter_value
print("compiled or loaded", count("Compile") or count("CompileLoaded"))
"""


def test_a_training_shows_no_warning(tmp_path) -> None:
    # Twice: what was compiled is loaded from disk the second time.
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(SCRIPT), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        assert done.stdout.splitlines()[-1] == "compiled or loaded 1"
