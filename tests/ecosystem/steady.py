"""`python -m tests.ecosystem.steady --examples DIR`: what scripts of pytorch/examples cost once they are warm.

Each runs at the sizes that it has by default, on the CPU and on the device (through `ltc run` where it takes none),
until it has called `backward` as often as eager could in some seconds. Compared is the CPU time of the process for the
second half of these calls, with all that lies between them: batches, environments, evaluation. On the CPU that is
measured twice, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.ecosystem.example_scripts import SCRIPTS, Script, repeatable

# `stamped.py CALLS SECONDS DEVICE LINES SCRIPT ...` ends the script after so many backward passes or so much CPU time.
STAMPED = """
import json, sys, time, torch
most, limit_s = int(sys.argv[1]), float(sys.argv[2])
del sys.argv[1:3]
stamps, plain = [], torch.autograd.backward
def backward(*args, **kwargs):
    plain(*args, **kwargs)
    stamps.append(time.process_time())
    if len(stamps) == most or stamps[-1] - began > limit_s:
        raise SystemExit
torch.autograd.backward = backward
began = time.process_time()
try:
    exec(compile(open("repeatable.py").read(), "repeatable.py", "exec"))
finally:
    with open("stamps.json", "w") as file:
        json.dump(stamps, file)
"""
_RUN = ("-m", "torch_ltc", "run", "--quiet")
_MANY = ("--epochs", "1000000")
# In place of the small arguments that the tests have.
_REAL: dict[str, tuple[str, ...]] = {
    "regression": (),
    "mnist": _MANY,
    "mnist_rnn": _MANY,
    "mnist_forward_forward": (*_MANY, "--train_size", "64", "--test_size", "64"),
    "vae": (*_MANY, "--batch-size", "64"),
    "siamese_network": _MANY,
    "dcgan": ("--dataset", "fake", "--manualSeed", "1", "--niter", "1000"),
    "gcn": (*_MANY, "--val-every", "20"),
    "gat": _MANY,
    "time_sequence_prediction": ("--steps", "1000"),
    "reinforcement_learning": (),
    "word_language_model": (*_MANY, "--data", "words"),
    "imagenet": ("pictures", *_MANY, "--workers", "0", "--batch-size", "4", "--seed", "1"),
    "super_resolution": ("--upscale_factor", "3", "--batchSize", "2", "--nEpochs", "1000000", "--threads", "0"),
    "fast_neural_style": (
        "train", *_MANY, "--batch-size", "2", "--dataset", "pictures/train", "--style-image", "picture.png",
        "--save-model-dir", "saved", "--image-size", "64",
    ),
}  # fmt: skip


def _real(script: Script) -> Script:
    model = script.arguments[script.arguments.index("--model") :][:2] if "--model" in script.arguments else ()
    return replace(script, arguments=(*model, *_REAL[script.folder]), lines=0)


def _stamps(folder: Path, script: Script, device: str, calls: int, seconds: float) -> list[float]:
    """CPU time at the end of each backward pass."""
    chosen, before = script.on_cpu, ()
    if device == "ltc":
        chosen, before = (script.on_accelerator, ()) if script.on_accelerator is not None else (chosen, _RUN)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LTC_")}
    options = (str(calls), str(seconds), "" if before else device, "0", script.file)
    done = subprocess.run(
        [sys.executable, *before, "stamped.py", *options, *script.arguments, *chosen],
        cwd=folder, capture_output=True, text=True, check=False, env={**variables, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{script}: exit {done.returncode}\n{done.stderr[-3000:]}")
    found: list[float] = json.loads((folder / "stamps.json").read_text())
    (folder / "stamps.json").unlink()
    return found


def _second_half(stamps: list[float], calls: int) -> float:
    return stamps[calls - 1] - stamps[calls // 2]


def measure(source: Path, script: Script, seconds: float) -> str:
    """A row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(source, Path(temporary) / "copy")) / script.folder
        script.prepare(folder)
        (folder / "repeatable.py").write_text(repeatable(script))
        (folder / "stamped.py").write_text(STAMPED)
        before = _stamps(folder, script, "cpu", calls=0, seconds=seconds)
        calls = len(before)
        through = _stamps(folder, script, "ltc", calls=calls, seconds=6 * seconds + 30)
        calls = min(calls, len(through))
        after = _stamps(folder, script, "cpu", calls=calls, seconds=3 * seconds)
        calls = min(calls, len(after))
        eager_s = [_second_half(before, calls), _second_half(after, calls)]
        ratios = sorted(_second_half(through, calls) / took_s for took_s in eager_s)
    return f"| {script} | {calls} | {sum(eager_s) / calls * 1e3:.1f} | {ratios[0]:.2f} to {ratios[1]:.2f} |"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem.steady", description=__doc__)
    parser.add_argument("--examples", type=Path, required=True, metavar="DIR", help="pytorch/examples, checked out")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of eager's CPU time for each script, with its start"
    )
    parser.add_argument("--only", default="", help="a part of a script's name")
    given = parser.parse_args()
    print("| script | backward passes | ms of eager for each | CPU time / eager |\n|---|---|---|---|")
    for script in SCRIPTS:
        # Those that write a file make something with a model, and train none.
        if given.only in str(script) and not script.writes:
            try:
                print(measure(given.examples, _real(script), given.seconds), flush=True)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
