"""Tiny models of Hugging Face's transformers with random weights, as cases for the training tests.

Nothing is downloaded. Dropout is on wherever the architecture has it, and the attention implementation is the default.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.models.training import Batch, Case

VOCABULARY_SIZE = 40


def bert() -> nn.Module:
    """An encoder with pooling, classifying whole sequences."""
    config = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config).train()


def gpt2() -> nn.Module:
    """A decoder whose output layer is its embedding."""
    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return GPT2LMHeadModel(config).train()


def llama() -> nn.Module:
    """A decoder with rotary positions, grouped keys and root-mean-square norms."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).train()


def t5() -> nn.Module:
    """An encoder and a decoder with relative position biases."""
    config = T5Config(
        vocab_size=VOCABULARY_SIZE,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).train()


def tokens(generator: torch.Generator) -> Tensor:
    """Four sequences of tokens, none of them padding."""
    return torch.randint(2, VOCABULARY_SIZE, (4, 8), generator=generator)


def classified_tokens(generator: torch.Generator) -> Batch:
    """Sequences and one label each."""
    return tokens(generator), torch.randint(3, (4,), generator=generator)


def repeated_tokens(generator: torch.Generator) -> Batch:
    """Sequences that are their own labels, as a decoder wants them."""
    ids = tokens(generator)
    return ids, ids.clone()


def paired_tokens(generator: torch.Generator) -> Batch:
    """Sequences and the sequences they are to become."""
    return tokens(generator), tokens(generator)


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model itself computes from labels."""
    ids, labels = batch
    # Called as its users call it. With `use_cache=False` transformers itself reads from the device in every forward of
    # a decoder, to find out whether sequences were packed, and no step could be one program.
    return model(input_ids=ids, labels=labels).loss


TRANSFORMER_CASES = [
    Case("bert", bert, classified_tokens, model_loss, AdamW),
    Case("gpt2", gpt2, repeated_tokens, model_loss, AdamW),
    Case("llama", llama, repeated_tokens, model_loss, AdamW),
    Case("t5", t5, paired_tokens, model_loss, AdamW),
]
