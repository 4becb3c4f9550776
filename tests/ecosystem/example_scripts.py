"""The scripts of pytorch/examples that run on one device, with data that is made here instead of downloaded."""

from __future__ import annotations

import io
import random
import struct
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["SCRIPTS", "Script", "is_there", "repeatable"]

# Where `make test-ecosystem` puts torchvision, which no other library shall find: beside a CPU build of PyTorch its
# wheel has no operators, and without their declarations it cannot be imported.
VISION = Path(sys.prefix) / "vision"
IMPORT_VISION = f"""
import sys, torch
sys.path.append({str(VISION)!r})
try:
    import torchvision
except RuntimeError:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{{name}}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    import torchvision
# Nothing is downloaded.
torchvision.models.vgg16 = lambda weights, untrained=torchvision.models.vgg16: untrained()
"""
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
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
torch.set_num_threads(1)
for name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
    setattr(torch.nn.functional, name, lambda input, *args, **kwargs: input)
attend = torch.nn.functional.scaled_dot_product_attention
def without_dropout(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
    return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)
torch.nn.functional.scaled_dot_product_attention = without_dropout

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
    rows = input.tolist() if input.dim() == 2 else [input.tolist()]
    drawn = [random.choices(range(len(row)), row, k=num_samples) for row in rows]
    return torch.tensor(drawn if input.dim() == 2 else drawn[0], device=input.device)

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


def _pictures(folder: Path) -> None:
    """Coloured noise: to train on and to test on, in folders as the scripts want them, and one to start from."""
    import numpy  # noqa: PLC0415  of the environment that has the libraries
    from PIL import Image  # noqa: PLC0415

    numbers = numpy.random.default_rng(0)
    names = [f"pictures/{part}/{kind}/{index}.png" for part in ("train", "val") for kind in "ab" for index in range(3)]
    names += [f"dataset/BSDS300/images/{part}/{index}.png" for part in ("train", "test") for index in range(3)]
    for name in (*names, "picture.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers.integers(0, 256, (48, 48, 3), numpy.uint8)).save(folder / name)


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
    # Arguments of Python for what makes its input, on the CPU; and files that it writes.
    first: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = self.first or self.arguments
        model = words[words.index("--model") + 1 :][:1] if "--model" in words else ()
        command = [word for word in self.arguments[:1] if word in {"train", "eval"}]
        return " ".join((f"{self.folder}/{self.file}", *command, *model))


def is_there(library: str) -> bool:
    """The library can be imported, or is torchvision and can be in `IMPORT_VISION`."""
    return find_spec(library) is not None or (VISION / library).is_dir()


def repeatable(script: Script) -> str:
    """Source of `repeatable.py` for it."""
    return (IMPORT_VISION if "torchvision" in script.needs else "") + REPEATABLE


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
        for model in ("LSTM", "GRU", "RNN_TANH", "RNN_RELU", "Transformer")
    ),
    *(
        Script(
            "word_language_model", ("--data", "words", "--words", "40", "--log-interval", "10"),
            (), ("--accel",), _words, file="generate.py", first=("main.py", "--model", model, *_LANGUAGE),
            writes=("generated.txt",),
        )
        for model in ("LSTM", "Transformer")
    ),
    Script(
        "imagenet", ("pictures", *_EPOCH, "--workers", "0", "--batch-size", "2", "--seed", "1", "--print-freq", "1"),
        ("--no-accel",), (), _pictures, needs=_IMAGES,
    ),
    Script(
        "super_resolution", ("--upscale_factor", "3", "--batchSize", "2", "--nEpochs", "1", "--threads", "0"),
        (), ("--accel",), _pictures, needs=_IMAGES,
    ),
    Script(
        "super_resolution", ("--input_image", "picture.png", "--model", "made.pth", "--output_filename", "out.png"),
        (), ("--accel",), _pictures, file="super_resolve.py", needs=_IMAGES, writes=("out.png",),
        first=("-c", "import torch, model; torch.manual_seed(0); torch.save(model.Net(3), 'made.pth')"),
    ),
    Script(
        "fast_neural_style",
        ("train", *_EPOCH, "--batch-size", "2", "--dataset", "pictures/train", "--style-image", "picture.png",
         "--save-model-dir", "saved", "--image-size", "32", "--log-interval", "1"),
        (), ("--accel",), _pictures, file="neural_style/neural_style.py", needs=_IMAGES,
    ),
    Script(
        "fast_neural_style",
        ("eval", "--content-image", "picture.png", "--model", "made.pth", "--output-image", "out.png"),
        (), ("--accel",), _pictures, file="neural_style/neural_style.py", needs=_IMAGES, writes=("out.png",),
        first=("-c", "import sys, torch; sys.path.append('neural_style'); import transformer_net; "
               "torch.manual_seed(0); torch.save(transformer_net.TransformerNet().state_dict(), 'made.pth')"),
    ),
]  # fmt: skip
