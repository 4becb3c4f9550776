"""accelerate, transformers and peft: the device that they choose, training, mixed precision, generation."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_ltc
from tests.ecosystem.support import compare
from torch_ltc.errors import LtcWarning
from torch_ltc.libraries.choice import choice

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import accelerate
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate keeps its device for the process; each test starts without one, and is told anew."""
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    monkeypatch.setattr(choice, "_told", set())
    forget()


def forget() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


class Rows(Dataset[dict[str, Tensor]]):
    """Sentences of eight numbers, of two kinds."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": torch.tensor(index % 2)}


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def trainer(folder: Path, device: str, model: Any, **arguments: Any) -> Any:
    arguments = {"max_steps": 6, "logging_steps": 2, "save_strategy": "no"} | arguments
    made = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=device == "cpu",
        **arguments,
    )  # fmt: skip
    return transformers.Trainer(model, made, train_dataset=Rows())


def losses(trained: Any) -> list[float]:
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


# ---- Trainer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_trainer_trains_there_as_on_the_cpu(precision: str, tmp_path: Path) -> None:
    def train(device: str) -> Any:
        forget()
        transformers.set_seed(0)
        model = bert()
        with torch_ltc.use_in_libraries():
            made = trainer(tmp_path, device, model, bf16=precision == "bf16")
            made.train()
        assert made.accelerator.device.type == device
        assert model.device.type == device
        return [*losses(made), *model.parameters()]

    compare("transformers", f"Trainer, BERT, {precision}", train)


def test_trainer_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    def train(device: str) -> Any:
        forget()
        transformers.set_seed(0)
        folder = tmp_path / device
        with torch_ltc.use_in_libraries():
            trainer(folder, device, bert(), max_steps=4, save_steps=2, save_strategy="steps").train()
            model = bert()
            made = trainer(folder, device, model, max_steps=6, save_steps=2, save_strategy="steps")
            made.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        assert model.device.type == device
        return list(model.parameters())

    compare("transformers", "Trainer, checkpoint and resume", train)


def test_trainer_accumulates_clips_and_evaluates(tmp_path: Path) -> None:
    def train(device: str) -> Any:
        forget()
        transformers.set_seed(0)
        model = bert()
        with torch_ltc.use_in_libraries():
            made = trainer(
                tmp_path, device, model, gradient_accumulation_steps=2, max_grad_norm=0.1, gradient_checkpointing=True
            )
            made.train()
            scores = made.evaluate(Rows())
        return [scores["eval_loss"], *model.parameters()]

    compare("transformers", "Trainer, accumulation, clipping, checkpointing", train)


def test_lora_trains_there_as_on_the_cpu(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def train(device: str) -> Any:
        forget()
        transformers.set_seed(0)
        wanted = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
        model = peft.get_peft_model(bert(), wanted)
        with torch_ltc.use_in_libraries():
            trainer(tmp_path, device, model).train()
        assert next(model.parameters()).device.type == device
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    compare("peft", "LoRA of BERT by Trainer", train)


# ---- accelerate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerator_trains_there_as_on_the_cpu(precision: str) -> None:
    def train(device: str) -> Any:
        forget()
        with torch_ltc.use_in_libraries():
            accelerator = accelerate.Accelerator(cpu=device == "cpu", mixed_precision=precision)
        assert accelerator.device.type == device
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        data = TensorDataset(torch.linspace(-1, 1, 64).view(16, 4), torch.arange(16) % 2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for _ in range(2):
            for rows, labels in loader:
                assert rows.device.type == device
                optimizer.zero_grad()
                loss = F.cross_entropy(model(rows), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return [loss, *model.parameters()]

    compare("accelerate", f"Accelerator, mixed_precision={precision}", train)


def test_a_library_that_stays_on_another_device_says_so_once(tmp_path: Path) -> None:
    with pytest.warns(LtcWarning, match=r"accelerate runs on cpu: torch_ltc\.use_in_libraries\(\)") as told:
        for _ in range(2):
            forget()
            assert accelerate.Accelerator().device.type == "cpu"
    assert sum("accelerate" in str(warning.message) for warning in told) == 1
    forget()
    with pytest.warns(LtcWarning, match=r"transformers\.Trainer runs on cpu"):
        arguments = transformers.TrainingArguments(str(tmp_path), report_to=[])
        assert arguments.device.type == "cpu"


@pytest.mark.parametrize("asked", [False, True])
def test_code_that_asks_for_the_cpu_gets_it_without_a_word(asked: bool, saved: Path) -> None:
    with torch_ltc.use_in_libraries() if asked else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("error", LtcWarning)
        assert accelerate.Accelerator(cpu=True).device.type == "cpu"
        forget()
        assert transformers.TrainingArguments(str(saved), report_to=[], use_cpu=True).device.type == "cpu"
        forget()
        made = transformers.pipeline("text-generation", model=str(saved), tokenizer=str(saved), device="cpu")
        assert made.device.type == "cpu"
        model = transformers.AutoModelForCausalLM.from_pretrained(saved, device_map={"": "cpu"})
        assert model.device.type == "cpu"


# ---- pipelines and device maps -------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a model and a tokenizer of sixty words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 60)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    ).save_pretrained(tmp_path)
    return tmp_path


def test_pipeline_chooses_the_device(saved: Path) -> None:
    def generate(device: str) -> Any:
        with torch_ltc.use_in_libraries():
            given = {"device": "cpu"} if device == "cpu" else {}
            made = transformers.pipeline("text-generation", model=str(saved), tokenizer=str(saved), **given)
        assert made.device.type == made.model.device.type == device
        return made("w3 w4 w5", max_new_tokens=8, do_sample=False)[0]["generated_text"]

    compare("transformers", "pipeline, text generation", generate)
    with pytest.warns(LtcWarning, match=r"transformers\.pipeline runs on cpu"):
        transformers.pipeline("text-generation", model=str(saved), tokenizer=str(saved))


@pytest.mark.parametrize("device_map", ["auto", "ltc", {"": "ltc:0"}])
def test_device_map_puts_the_model_there(device_map: Any, saved: Path) -> None:
    words = torch.tensor([[3, 4, 5, 6]])
    expected = transformers.AutoModelForCausalLM.from_pretrained(saved)(words).logits
    with torch_ltc.use_in_libraries():
        model = transformers.AutoModelForCausalLM.from_pretrained(saved, device_map=device_map)
    assert model.device.type == "ltc"
    assert all(parameter.device.type == "ltc" for parameter in model.parameters())
    torch.testing.assert_close(model(words.to("ltc")).logits.cpu(), expected, rtol=0, atol=0)


def test_a_device_map_that_is_made_without_the_device_says_so_once(saved: Path) -> None:
    with pytest.warns(LtcWarning, match=r"device_map='auto' runs on cpu: torch_ltc\.use_in_libraries\(\)") as told:
        for _ in range(2):
            model = transformers.AutoModelForCausalLM.from_pretrained(saved, device_map="auto")
            assert model.device.type == "cpu"
    assert sum("device_map" in str(warning.message) for warning in told) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 5}, {"cache_implementation": "static"}],
    ids=["greedy", "beams", "sampled", "static cache"],
)
def test_generate_gives_the_words_of_the_cpu(options: dict[str, Any]) -> None:
    def generate(device: str) -> Any:
        torch.manual_seed(0)
        model = llama().eval().to(device)
        words = torch.tensor([[3, 4, 5, 6], [0, 0, 7, 8]], device=device)
        mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]], device=device)
        torch.manual_seed(1)
        return model.generate(words, attention_mask=mask, max_new_tokens=6, **options)

    named = ", ".join(f"{name}={value}" for name, value in options.items())
    # What beam search does with the best beams depends on data.
    compare("transformers", f"generate({named})", generate)
