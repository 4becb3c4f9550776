"""The scripts of pytorch/examples that run on one device, with data that is made here instead of downloaded."""

from __future__ import annotations

import io
import random
import struct
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPEATABLE", "SCRIPTS", "Script"]

# `repeatable.py DEVICE LINES SCRIPT ...` runs the script so that devices can be compared: random numbers are the CPU's,
# dropout does nothing, batches come in order, and it ends after some lines. What it took is in figures.json.
REPEATABLE = """
import builtins, json, os, random, runpy, sys, time
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
import numpy, torch
device, lines, script = sys.argv[1:4]
if device == "ltc":
    import torch_ltc
sys.argv = sys.argv[3:]
sys.path.insert(0, os.getcwd())
torch.set_num_threads(1)
for name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
    setattr(torch.nn.functional, name, lambda input, *args, **kwargs: input)

def of_the_cpu(name):
    draw = getattr(torch, name)
    def drawn(*args, device=None, **kwargs):
        given = [arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
        place = device or next((arg.device for arg in args if isinstance(arg, torch.Tensor)), None)
        made = draw(*given, device="cpu", **kwargs)
        return made if place is None else made.to(place)
    setattr(torch, name, drawn)

for name in ("randn", "randn_like"):
    of_the_cpu(name)

def multinomial(input, num_samples, *args, **kwargs):
    drawn = [random.choices(range(len(row)), row, k=num_samples) for row in input.tolist()]
    return torch.tensor(drawn, device=input.device)

torch.multinomial = multinomial
def normal_(tensor, mean=0.0, std=1.0, generator=None):
    with torch.no_grad():
        return tensor.copy_(torch.empty(tensor.size(), device="cpu").normal_(mean, std))

torch.nn.init.normal_ = normal_
load = torch.utils.data.DataLoader.__init__
def in_order(self, dataset, *args, **kwargs):
    kwargs = {**kwargs, "shuffle": False, "num_workers": 0, "pin_memory": False}
    kwargs.pop("persistent_workers", None)
    load(self, dataset, *args, **kwargs)
torch.utils.data.DataLoader.__init__ = in_order
show, shown = print, []
def counted(*args, **kwargs):
    show(*args, **kwargs)
    shown.append(1)
    if len(shown) == int(lines):
        raise SystemExit
builtins.print = counted
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
began = time.process_time()
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
finally:
    figures = {"s": time.process_time() - began}
    if "torch_ltc" in sys.modules:
        metrics = sys.modules["torch_ltc"].metrics
        names = {"programs": "UncachedCompile", "compiles": "Compile"}
        figures.update((name, metrics.counter_value(counter) or 0) for name, counter in names.items())
        figures["fallbacks"] = metrics.snapshot()["metrics"].get("FallbackTime", {}).get("total_samples", 0)
    with open("figures.json", "w") as file:
        json.dump(figures, file)
"""


def _nothing(folder: Path) -> None:
    """The script needs no data."""


def _digits(folder: Path) -> None:
    """MNIST: noise with labels, 128 images to train and 64 to test."""
    numbers = random.Random(0)
    for root in (folder.parent / "data", folder / "data"):
        raw = root / "MNIST" / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for name, count in (("train", 128), ("t10k", 64)):
            images = struct.pack(">IIII", 0x803, count, 28, 28) + numbers.randbytes(count * 28 * 28)
            (raw / f"{name}-images-idx3-ubyte").write_bytes(images)
            labels = struct.pack(">II", 0x801, count) + bytes([number % 10 for number in range(count)])
            (raw / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    (folder / "results").mkdir(exist_ok=True)


def _citations(folder: Path) -> None:
    """Cora: 1,700 papers, and a module `requests` that has them."""
    numbers = random.Random(0)
    papers = [" ".join([str(paper), *[str(numbers.randrange(2)) for _ in range(16)], f"class{paper % 4}"])
              for paper in range(1700)]  # fmt: skip
    links = [f"{paper} {numbers.randrange(1700)}" for paper in range(1700)]
    with tarfile.open(folder / "cora.tgz", "w:gz") as archive:
        for name, rows in (("content", papers), ("cites", links)):
            data = "\n".join(dict.fromkeys(rows)).encode()
            entry = tarfile.TarInfo(f"cora/cora.{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    (folder / "requests.py").write_text(
        "import contextlib, types\n"
        "def get(url, stream):\n"
        "    return contextlib.nullcontext(types.SimpleNamespace(raw=open('cora.tgz', 'rb')))\n"
    )


def _waves(folder: Path) -> None:
    """Ten short sine waves."""
    import numpy  # noqa: PLC0415  of the environment that has the libraries
    import torch  # noqa: PLC0415

    torch.save(numpy.sin(numpy.arange(12) / 3 + numpy.arange(10)[:, None]), folder / "traindata.pt")


def _words(folder: Path) -> None:
    """Forty lines of thirty different words."""
    numbers = random.Random(0)
    (folder / "words").mkdir()
    for name in ("train", "valid", "test"):
        text = "\n".join(" ".join(f"w{numbers.randrange(30)}" for _ in range(12)) for _ in range(40))
        (folder / "words" / f"{name}.txt").write_text(text + "\n")


@dataclass(frozen=True)
class Script:
    """A script, its arguments, and those that choose the CPU or the accelerator (None: it knows no device)."""

    folder: str
    arguments: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    on_accelerator: tuple[str, ...] | None = None
    prepare: Callable[[Path], None] = _nothing
    file: str = "main.py"
    needs: tuple[str, ...] = ()
    # It ends after so many lines; 0: when it is done.
    lines: int = 0

    def __str__(self) -> str:
        model = self.arguments[self.arguments.index("--model") + 1 :][:1] if "--model" in self.arguments else ()
        return " ".join((f"{self.folder}/{self.file}", *model))


_IMAGES, _EPOCH = ("torchvision",), ("--epochs", "1")
_LANGUAGE = (
    *_EPOCH, "--data", "words", "--emsize", "16", "--nhid", "16", "--nlayers", "1", "--batch_size", "4", "--bptt", "8",
)  # fmt: skip
SCRIPTS = [
    Script("regression"),
    Script("mnist", (*_EPOCH, "--log-interval", "1"), ("--no-accel",), (), _digits, needs=_IMAGES),
    Script("mnist_rnn", (*_EPOCH, "--log-interval", "1"), (), ("--accel",), _digits, needs=_IMAGES),
    Script(
        "mnist_forward_forward", ("--epochs", "3", "--train_size", "64", "--test_size", "64"), ("--no_accel",), (),
        _digits, needs=_IMAGES,
    ),
    Script("vae", (*_EPOCH, "--batch-size", "64"), ("--no-accel",), (), _digits, needs=_IMAGES),
    Script(
        "siamese_network", (*_EPOCH, "--batch-size", "16", "--test-batch-size", "32", "--dry-run"), ("--no-accel",), (),
        _digits, needs=_IMAGES,
    ),
    Script(
        "dcgan",
        ("--dataset", "fake", "--dry-run", "--manualSeed", "1", "--batchSize", "4", "--ngf", "8", "--ndf", "8"),
        (), ("--accel",), needs=_IMAGES,
    ),
    Script("gcn", ("--epochs", "20", "--val-every", "5"), ("--no-accel",), (), _citations),
    Script("gat", ("--dry-run", "--hidden-dim", "8", "--num-heads", "2"), ("--no-accel",), (), _citations),
    Script("time_sequence_prediction", ("--steps", "1"), prepare=_waves, file="train.py", needs=("matplotlib",)),
    *(
        Script("reinforcement_learning", ("--log-interval", "1"), file=file, needs=("gymnasium",), lines=10)
        for file in ("reinforce.py", "actor_critic.py")
    ),
    *(
        Script("word_language_model", ("--model", model, *_LANGUAGE), (), ("--accel",), _words)
        for model in ("LSTM", "GRU", "RNN_TANH")
    ),
]  # fmt: skip
