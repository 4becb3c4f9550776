"""Unmodified scripts of libraries under `ltc run`: what they print is what they print without it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TRAINER = """
    import sys, tempfile, torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
    set_seed(0)
    rows = [{"input_ids": torch.arange(8) * (i + 1) % 50, "labels": torch.tensor(i % 2)} for i in range(16)]
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = BertForSequenceClassification(
        BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[],
                                      disable_tqdm=True, save_strategy="no")
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
    print(trainer.args.device.type, model.device.type, file=sys.stderr)
    print([row["loss"] for row in trainer.state.log_history if "loss" in row])
"""
ACCELERATOR = """
    import sys, torch
    from accelerate import Accelerator
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 64).view(16, 4), torch.arange(16) % 2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, batch_size=4))
    for rows, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(rows), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(accelerator.device.type, model.weight.device.type, rows.device.type, file=sys.stderr)
    print(loss.item())
"""
LIGHTNING = """
    import sys, torch, lightning, logging
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
        def training_step(self, batch, index):
            self.loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
            self.where = batch[0].device.type
            return self.loss
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())
    torch.manual_seed(0)
    model = Model()
    data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 64).view(16, 4), torch.arange(16) % 2)
    trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    print(trainer.strategy.root_device.type, model.where, file=sys.stderr)
    print(model.loss.item())
"""
SCRIPTS = {
    "transformers": (TRAINER, "ltc ltc"),
    "accelerate": (ACCELERATOR, "ltc ltc ltc"),
    "lightning": (LIGHTNING, "ltc ltc"),
}


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_script_of_a_library_runs_on_the_device(library: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip(library)
    text, devices = SCRIPTS[library]
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    plain = start([str(script)])
    ours = start(["-m", "torch_ltc", "run", str(script)])
    assert devices in ours.stderr
    assert "cpu" in plain.stderr
    assert ours.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]


def start(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LTC_", "ACCELERATE_"))}
    variables["LTC_CACHE_DIR"] = "off"
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=variables, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done
