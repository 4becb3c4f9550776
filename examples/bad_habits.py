"""A training script full of bad habits, for the report and the doctor to find.

It trains a small network on scikit-learn's 8x8 digits on device "ltc", and does what makes a lazy device slow. Each
habit is marked; ``examples/digits.py`` is the same kind of training done well.

    python examples/bad_habits.py
    LTC_REPORT=report.html python examples/bad_habits.py    # and look at report.html
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from torch_ltc.config import settings

EPOCHS = 3
SEED = 1
# The step whose loss becomes NaN.
BROKEN_STEP = 37

# Bad habit: a list of tensors that only grows keeps all of them in memory.
kept: list[Tensor] = []


class Net(nn.Module):
    """Two linear layers, as many more in between as the caller asks for, which makes a program of each number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.middle = nn.Linear(48, 48)
        self.last = nn.Linear(48, 10)

    def forward(self, images: Tensor, depth: int) -> Tensor:
        """Scores of the ten digits."""
        x = F.relu(self.first(images))
        # Bad habit: a branch on a Python number that changes from step to step gives a program for each value.
        for _ in range(depth):
            x = F.relu(self.middle(x))
        return self.last(x)


def batches(images: Tensor, labels: Tensor, smallest: int) -> list[tuple[Tensor, Tensor]]:
    """The data in batches, each larger by one than the one before."""
    made = []
    at = 0
    while at < len(labels):
        # Bad habit: the batch size changes with every step.
        size = smallest + len(made)
        made.append((images[at : at + size], labels[at : at + size]))
        at += size
    return made


def main() -> None:
    """Train for three epochs."""
    torch.manual_seed(SEED)
    # Not a bad habit: the first operation that makes a NaN is found and named.
    settings.check = "nan"
    data = load_digits()
    images = torch.from_numpy(data.data).float() / 16
    labels = torch.from_numpy(data.target).long()
    model = Net().to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for epoch in range(EPOCHS):
        correct = 0
        for batch, wanted in batches(images[:900], labels[:900], smallest=16 + 32 * epoch):
            optimizer.zero_grad()
            scores = model(batch.to("ltc"), depth=step % 2)
            loss = F.cross_entropy(scores, wanted.to("ltc"))
            if step == BROKEN_STEP:
                # Bad habit: the logarithm of a number that may be negative.
                penalty = torch.log(model.last.bias.min() - 1.0)
                kept.append(penalty)
            loss.backward()
            optimizer.step()
            # Bad habit: a value read in every step makes the next step wait for this one.
            if loss.item() > 10:
                print(f"step {step}: loss {loss.item():.3f}")
            # Bad habit: how many indices there are depends on the data, so that it runs eagerly.
            wrong = torch.nonzero(scores.argmax(1) != wanted.to("ltc"))
            correct += len(wanted) - len(wrong)
            # Bad habit: a program of a single operation, cut by hand.
            rate = loss.detach() * 0.1
            torch_ltc.sync()
            kept.extend([scores.detach(), rate])
            step += 1
        print(f"epoch {epoch}: {correct / 900:.1%} right in training")
    broken = torch.cat([value.flatten() for value in kept]).isnan().sum()
    print(f"{step} steps, {len(kept)} tensors kept, with {int(broken)} NaN in them")


if __name__ == "__main__":
    main()
