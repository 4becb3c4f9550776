"""Stands in for the package `torch._lazy`, where it does more than to call this one by another name."""

import os

import torch_ltc
from torch_ltc.config import settings


def mark_step(device: str = "", wait: bool = False) -> None:
    """End the step. The original reads its environment variables when it needs them, and not at import."""
    with settings.scope(save_tensors_file=os.environ.get("LTC_SAVE_TENSORS_FILE", settings.save_tensors_file)):
        torch_ltc.mark_step(device, wait=wait)
