"""One process of `accelerate launch`: an `Accelerator` loop or a `Trainer`, and what came of it in a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torch_ltc
from torch_ltc import events


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """What is learnt: 48 rows of two kinds."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(48, 8, generator=generator), torch.arange(48) % 2


def train_with_accelerator(device: str) -> dict[str, Any]:
    """Two epochs of SGD, with losses that all processes gather."""
    accelerator = Accelerator(cpu=device == "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*rows()), batch_size=6)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(prepared(batch), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()))
    accelerator.wait_for_everyone()
    found = {name: value.cpu() for name, value in accelerator.unwrap_model(prepared).state_dict().items()}
    kind = type(prepared).__name__
    return {"losses": torch.stack(losses).cpu(), **found, "device": str(accelerator.device), "model": kind}


def train_with_trainer(device: str, folder: Path) -> dict[str, Any]:
    """Two epochs of transformers' `Trainer` on a small BERT."""
    import transformers  # noqa: PLC0415  takes seconds, for this alone

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    words = torch.randint(0, 50, (24, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": line, "labels": torch.tensor(number % 2)} for number, line in enumerate(words)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=4, num_train_epochs=2, report_to=[], seed=0,
        save_strategy="no", use_cpu=device == "cpu", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data)  # type: ignore[arg-type]
    trainer.train()
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    return {**found, "device": str(trainer.args.device), "model": type(trainer.model_wrapped).__name__}


def main() -> None:
    """Train, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("accelerator", "trainer"))
    parser.add_argument("device", choices=("cpu", "ltc"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    programs: list[events.SyncEvent] = []
    events.subscribe(programs.append, events.SyncEvent)
    if options.device == "ltc":
        torch_ltc.use_in_libraries()
    if options.what == "accelerator":
        found = train_with_accelerator(options.device)
    else:
        found = train_with_trainer(options.device, options.folder)
    rank = torch.distributed.get_rank()
    torch.save({**found, "programs": len(programs)}, options.folder / f"{options.device}.{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
