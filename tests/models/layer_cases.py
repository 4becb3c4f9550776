"""Models made of PyTorch's own layers, as cases for the training tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from tests.models.training import Batch, Case


def multilayer_perceptron() -> nn.Module:
    """Three linear layers with two kinds of activation."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


class Convnet(nn.Module):
    """Convolutions, batch norm in both forms, pooling, and dropout with probabilities that do and do not round."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.1),
            nn.Conv2d(8, 16, 3, stride=2, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.GELU(),
            nn.Dropout(0.5),
            nn.Linear(16, 4),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Scores of four classes."""
        return self.classifier(self.features(images))


class Recurrent(nn.Module):
    """A two-layer recurrent network with dropout between the layers; the last output is classified."""

    def __init__(self, kind: type[nn.RNNBase], bidirectional: bool) -> None:
        super().__init__()
        self.recurrent = kind(8, 12, num_layers=2, dropout=0.2, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(24 if bidirectional else 12, 4)

    def forward(self, sequence: Tensor) -> Tensor:
        """Scores of four classes."""
        outputs, _ = self.recurrent(sequence)
        return self.head(outputs[:, -1])


class Encoder(nn.Module):
    """PyTorch's transformer encoder layer, dropout included, over an embedding."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layers = [
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
            for _ in range(2)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of four classes from the mean over the sequence."""
        return self.head(self.layers(self.embedding(tokens)).mean(dim=1))


class Attention(nn.Module):
    """One attention layer that calls `scaled_dot_product_attention` itself."""

    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal = causal
        self.dropout = dropout
        self.embedding = nn.Embedding(20, 16)
        self.projection = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of four classes from the mean over the sequence."""
        x = self.embedding(tokens)
        query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.projection(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=self.causal)
        return self.head(self.norm(x + mixed.transpose(1, 2).flatten(2)).mean(dim=1))


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the model's scores for the first tensor against the labels in the second."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def labels(generator: torch.Generator) -> Tensor:
    """Eight labels of four classes."""
    return torch.randint(4, (8,), generator=generator)


def vectors(generator: torch.Generator) -> Batch:
    """Eight vectors and their labels."""
    return torch.randn(8, 16, generator=generator), labels(generator)


def images(generator: torch.Generator) -> Batch:
    """Eight images and their labels."""
    return torch.randn(8, 3, 12, 12, generator=generator), labels(generator)


def sequences(generator: torch.Generator) -> Batch:
    """Eight sequences of vectors and their labels."""
    return torch.randn(8, 6, 8, generator=generator), labels(generator)


def tokens(generator: torch.Generator) -> Batch:
    """Eight sequences of tokens and their labels."""
    return torch.randint(20, (8, 6), generator=generator), labels(generator)


# Everything that changes the formula.
SGD_OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}

LAYER_CASES = [
    Case("mlp_sgd", multilayer_perceptron, vectors, classification_loss, SGD, SGD_OPTIONS),
    Case("mlp_adam", multilayer_perceptron, vectors, classification_loss, Adam),
    Case("convnet", Convnet, images, classification_loss, SGD, SGD_OPTIONS),
    Case("lstm", lambda: Recurrent(nn.LSTM, False), sequences, classification_loss, Adam),
    Case("lstm_bidirectional", lambda: Recurrent(nn.LSTM, True), sequences, classification_loss, SGD, SGD_OPTIONS),
    Case("gru", lambda: Recurrent(nn.GRU, False), sequences, classification_loss, Adam),
    Case("encoder", lambda: Encoder(False), tokens, classification_loss, AdamW),
    Case("encoder_norm_first", lambda: Encoder(True), tokens, classification_loss, AdamW),
    Case("attention", lambda: Attention(False, 0.0), tokens, classification_loss, AdamW),
    Case("attention_causal", lambda: Attention(True, 0.0), tokens, classification_loss, AdamW),
    Case("attention_dropout", lambda: Attention(True, 0.1), tokens, classification_loss, AdamW),
]
