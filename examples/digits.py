"""Train a small convnet on handwritten digits on device "ltc", and the same training on eager CPU beside it.

The network and recipe are those of the Lazy Tensor Core tutorial (two convolutions, two dropouts, two linear layers,
Adadelta with a step schedule, batches of 64), on scikit-learn's 8x8 digits, which ship with the package: nothing is
downloaded. An epoch has 23 steps here, not 938 as in the tutorial, so the learning rate falls every third epoch.
The training loop is ordinary PyTorch; the only mention of the device is ``.to(device)``.

    python examples/digits.py                 # both trainings, a table and digits_loss.png
    python examples/digits.py --device cpu    # eager only
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from tqdm import tqdm

import torch_ltc
from torch_ltc import events

BATCH_SIZE = 64
EPOCHS_PER_DECAY = 3
SEED = 1
TEST_SIZE = 360


class Convnet(nn.Module):
    """Two convolutions and two linear layers, with a dropout after each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution1 = nn.Conv2d(1, 32, 3, padding=1)
        self.convolution2 = nn.Conv2d(32, 64, 3, padding=1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.linear1 = nn.Linear(64 * 4 * 4, 128)
        self.linear2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities of the ten digits, one row an image."""
        x = F.relu(self.convolution1(images))
        x = F.relu(self.convolution2(x))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.linear1(x)))
        return F.log_softmax(self.linear2(x), dim=1)


@dataclass(frozen=True, slots=True)
class Digits:
    """The data set, on CPU, split once for every training."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @staticmethod
    def load() -> Digits:
        """All 1,797 images, scaled to 0..1, the same random fifth of them kept for the test."""
        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(SEED))
        images = (torch.from_numpy(data.images).float() / 16).unsqueeze(1)[order]
        labels = torch.from_numpy(data.target).long()[order]
        return Digits(images[TEST_SIZE:], labels[TEST_SIZE:], images[:TEST_SIZE], labels[:TEST_SIZE])

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The training batches of one epoch, on CPU, in an order that depends on the epoch alone."""
        # A generator of its own: the shuffle must not draw from the stream that dropout draws from.
        generator = torch.Generator().manual_seed(SEED + epoch)
        for chosen in torch.randperm(len(self.train_labels), generator=generator).split(BATCH_SIZE):
            yield self.train_images[chosen], self.train_labels[chosen]

    def batches_per_epoch(self) -> int:
        """How many batches ``batches`` yields, the short last one included."""
        return -(-len(self.train_labels) // BATCH_SIZE)


@dataclass(slots=True)
class Training:
    """What one training gave: a loss per step, the test accuracy, and the wall time of the whole loop."""

    device: str
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    duration_s: float = 0.0


def train(initial: Convnet, digits: Digits, device: str, epochs: int) -> Training:
    """Train a copy of ``initial`` on ``device``; the same arguments give the same losses on every device."""
    torch.manual_seed(SEED)
    model = copy.deepcopy(initial).to(device)
    # foreach everywhere: PyTorch picks it for accelerators but not for CPU, and the two forms round differently.
    optimizer = Adadelta(model.parameters(), lr=1.0, foreach=True)
    scheduler = StepLR(optimizer, step_size=EPOCHS_PER_DECAY, gamma=0.7)
    training = Training(device)
    started = time.perf_counter()
    with tqdm(total=epochs * digits.batches_per_epoch(), desc=f"{device:>4}", unit="step") as progress:
        for epoch in range(epochs):
            losses = train_epoch(model, digits, optimizer, device, epoch, progress)
            training.losses += losses
            training.accuracy = test_accuracy(model, digits, device)
            progress.set_postfix(loss=f"{losses[-1]:.4f}", accuracy=f"{training.accuracy:.1%}")
            scheduler.step()
    training.duration_s = time.perf_counter() - started
    return training


def train_epoch(
    model: Convnet, digits: Digits, optimizer: Adadelta, device: str, epoch: int, progress: tqdm[None]
) -> list[float]:
    """One pass over the training images; the losses are read once, after the last step."""
    model.train()
    losses = []
    for images, labels in digits.batches(epoch):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        # Detached, not read: reading here would make the step wait for its own result.
        losses.append(loss.detach())
        progress.update()
    return torch.stack(losses).tolist()


@torch.no_grad()
def test_accuracy(model: Convnet, digits: Digits, device: str) -> float:
    """The share of the test images whose most probable digit is right."""
    model.eval()
    predicted = model(digits.test_images.to(device)).argmax(dim=1)
    return (predicted == digits.test_labels.to(device)).float().mean().item()


class Observer:
    """Collects the device's events between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.syncs: list[events.SyncEvent] = []
        self.compiles: list[events.CompileEvent] = []
        self.runs: list[events.ExecuteEvent] = []
        self.fallbacks: list[events.FallbackEvent] = []
        self._unsubscribe: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin to listen; each list receives the events of its kind, in order."""
        self._unsubscribe = [
            events.subscribe(self.syncs.append, events.SyncEvent),
            events.subscribe(self.compiles.append, events.CompileEvent),
            events.subscribe(self.runs.append, events.ExecuteEvent),
            events.subscribe(self.fallbacks.append, events.FallbackEvent),
        ]

    def stop(self) -> None:
        """Wait for what is still running, so that its events are counted, and listen no more."""
        torch_ltc.wait_device_ops()
        for unsubscribe in self._unsubscribe:
            unsubscribe()

    def rows(self) -> list[tuple[str, str]]:
        """What the device did, as rows of the final table."""
        different = len({event.program for event in self.syncs})
        return [
            ("programs recorded", f"{len(self.syncs)} ({different} different)"),
            ("compiles", str(len(self.compiles))),
            ("cache hits", str(sum(event.known for event in self.syncs))),
            ("fallbacks", str(len(self.fallbacks))),
            ("time recording", f"{sum(event.record_s for event in self.syncs):.2f} s"),
            ("time compiling", f"{sum(event.duration_s for event in self.compiles):.2f} s"),
            ("time running", f"{sum(event.duration_s for event in self.runs):.2f} s"),
        ]


def result_rows(training: Training) -> list[tuple[str, str]]:
    """What one training reached and how long it took, as rows of the final table."""
    return [
        (f"{training.device}: total time", f"{training.duration_s:.2f} s"),
        (f"{training.device}: final loss", f"{training.losses[-1]:.6f}"),
        (f"{training.device}: test accuracy", f"{training.accuracy:.2%}"),
    ]


def comparison_row(first: Training, second: Training) -> tuple[str, str]:
    """Whether two trainings had the same loss at every step."""
    difference = max(abs(a - b) for a, b in zip(first.losses, second.losses, strict=True))
    verdict = "yes, bit for bit" if difference == 0.0 else f"no, largest difference {difference:.3g}"
    return (f"{len(first.losses)} losses equal", verdict)


def draw_losses(trainings: list[Training], path: str) -> None:
    """Save a picture of the loss of every step; later curves are drawn thinner, so that equal ones both show."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for position, training in enumerate(trainings):
        style, width = ("-", 3.0) if position == 0 else ("--", 1.0)
        axes.plot(training.losses, style, linewidth=width, label=training.device)
    axes.set(xlabel="step", ylabel="negative log-likelihood", yscale="log", title="Training loss, 8x8 digits")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description="Train a convnet on handwritten digits on the lazy device.")
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: %(default)s)")
    parser.add_argument("--device", choices=("ltc", "cpu"), default="ltc", help="where to train (default: %(default)s)")
    parser.add_argument("--output", default="digits_loss.png", help="picture of the losses (default: %(default)s)")
    parser.add_argument("--no-eager", action="store_true", help="skip the eager training that ltc is compared with")
    parser.add_argument("--backend", help="compile with this backend of torch_ltc instead of the configured one")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs must be at least 1, not {arguments.epochs}")
    return arguments


def main() -> None:
    """Train, draw the picture, print the table."""
    arguments = parse_arguments()
    if arguments.backend:
        torch_ltc.config.settings.backend = arguments.backend
    digits = Digits.load()
    torch.manual_seed(SEED)
    initial = Convnet()
    observer = Observer()
    observer.start()
    trainings = [train(initial, digits, arguments.device, arguments.epochs)]
    observer.stop()
    rows = result_rows(trainings[0])
    if arguments.device == "ltc":
        rows += observer.rows()
        if not arguments.no_eager:
            trainings.append(train(initial, digits, "cpu", arguments.epochs))
            rows += result_rows(trainings[1])
            rows.append(comparison_row(*trainings))
    draw_losses(trainings, arguments.output)
    rows.append(("loss curve", arguments.output))
    print()
    for name, value in rows:
        print(f"{name:<20}  {value}")


if __name__ == "__main__":
    main()
