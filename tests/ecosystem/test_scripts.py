"""Scripts that others have written, from a folder of the reader's: `--nanogpt DIR`, `--examples DIR`.

Each runs plainly on the CPU, unmodified through `ltc run`, and, where it takes a device, with `ltc`: what it prints
must be the same.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

# Seeds, and then runs the script as `__main__`.
SEEDED = """
import runpy, sys, torch
torch.manual_seed(0)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
LTC = ("-m", "torch_ltc", "run", "--quiet")
NANOGPT = [
    "--dataset=tiny",
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=16",
    "--batch_size=4",
    "--max_iters=8",
    "--lr_decay_iters=8",
    "--warmup_iters=2",
    "--eval_iters=2",
    "--eval_interval=4",
    "--log_interval=2",
    "--gradient_accumulation_steps=2",
    "--dropout=0.0",
    "--dtype=float32",
    "--always_save_checkpoint=False",
    "--compile=False",
]
# Dropout draws from the device's generator, and the Transformer of the script has it whatever is asked for.
LANGUAGE_MODEL = [
    "--data",
    "data",
    "--epochs",
    "1",
    "--emsize",
    "16",
    "--nhid",
    "16",
    "--nlayers",
    "1",
    "--batch_size",
    "4",
    "--bptt",
    "8",
    "--dropout",
    "0",
]
# Durations differ.
VARYING = re.compile(r"time.*|ms/batch[ \d.]*")


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the folder that the option of the test names."""
    source = request.config.getoption(request.param, None)
    if source is None:
        pytest.skip(f"{request.param} is not given")
    return Path(shutil.copytree(source, tmp_path / "copy"))


def printed(folder: Path, *arguments: str) -> list[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LTC_")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=500, check=False,
        env={**variables, "LTC_CACHE_DIR": "off"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [VARYING.sub("", line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("copied", ["--nanogpt"], indirect=True)
def test_nanogpt_trains_in_all_ways(copied: Path) -> None:
    data = copied / "data" / "tiny"
    data.mkdir(parents=True, exist_ok=True)
    numbers = random.Random(0)
    for name, count in (("train", 20_000), ("val", 4_000)):
        (data / f"{name}.bin").write_bytes(b"".join(struct.pack("<H", numbers.randrange(50)) for _ in range(count)))
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 50}))

    def losses(*arguments: str) -> list[str]:
        return [line for line in printed(copied, *arguments, *NANOGPT) if line.startswith(("step", "iter"))]

    expected = losses("train.py", "--device=cpu")
    assert len(expected) == 8
    assert losses(*LTC, "train.py", "--device=cpu") == expected
    assert losses(*LTC, "--map-cuda", "train.py", "--device=cuda") == expected
    assert losses("train.py", "--device=ltc") == expected


@pytest.mark.parametrize("copied", ["--examples"], indirect=True)
def test_regression_through_the_command(copied: Path) -> None:
    seeded = copied / "seeded.py"
    seeded.write_text(SEEDED)
    expected = printed(copied, "seeded.py", "regression/main.py")
    assert any(line.startswith("Loss") for line in expected)
    assert printed(copied, *LTC, "seeded.py", "regression/main.py") == expected


@pytest.mark.parametrize("copied", ["--examples"], indirect=True)
def test_language_model_through_the_command(copied: Path) -> None:
    folder = copied / "word_language_model"
    data = folder / "data"
    data.mkdir(exist_ok=True)
    numbers = random.Random(0)
    for name in ("train", "valid", "test"):
        text = "\n".join(" ".join(f"w{numbers.randrange(30)}" for _ in range(12)) for _ in range(40))
        (data / f"{name}.txt").write_text(text + "\n")
    expected = printed(folder, "main.py", *LANGUAGE_MODEL)
    assert any("test loss" in line for line in expected)
    assert printed(folder, *LTC, "main.py", *LANGUAGE_MODEL) == expected
