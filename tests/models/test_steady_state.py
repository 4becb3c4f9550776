"""A training that goes on and on keeps nothing more than it kept after its first steps."""

from __future__ import annotations

import gc
import json
import os
from dataclasses import asdict, dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam

import torch_ltc
from tests.semantics.support import run_script
from torch_ltc.config import settings
from torch_ltc.events import catch_up
from torch_ltc.program.tree import Node

SETTLED_STEP = 20
LAST_STEP = 500
SAMPLES = (SETTLED_STEP, 140, 260, 380, LAST_STEP)
# Something kept in every step would be at least 480; a few come and go with the test runner.
OBJECT_SLACK = 40
# The allocator's own drift, measured on eager CPU, is below 1 MiB; 8 KiB kept in every step would be 3.75 MiB.
MEMORY_SLACK_BYTES = 3 * 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process holds at one moment."""

    step: int
    objects: int
    nodes: int
    resident_bytes: int


def take_sample(step: int) -> Sample:
    """Count after everything queued has run and the collector has taken what it can."""
    torch_ltc.wait_device_ops()
    # Figures of events are added up some hundred at a time.
    catch_up()
    gc.collect()
    objects = gc.get_objects()
    nodes = sum(type(thing) is Node for thing in objects)
    with open("/proc/self/statm") as statistics:
        resident_bytes = int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Sample(step, len(objects), nodes, resident_bytes)


def train_and_sample(backend: str) -> list[Sample]:
    """500 identical steps of a small network with Adam on the device; a sample at some of them."""
    settings.backend, settings.tiers = backend, "blocking"
    device = "ltc"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(device)
    optimizer = Adam(model.parameters())
    inputs, labels = torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)
    samples = []
    for step in range(1, LAST_STEP + 1):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if step in SAMPLES:
            samples.append(take_sample(step))
    return samples


def print_samples(backend: str) -> None:
    print(json.dumps([asdict(sample) for sample in train_and_sample(backend)]))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident memory from /proc")
@pytest.mark.parametrize("backend", ["interpreter", "torchscript"])
def test_500_identical_steps_keep_nothing_more(backend: str) -> None:
    # A process of its own: what other tests have left lets memory go up and down.
    printed = run_script(f"from tests.models.test_steady_state import print_samples; print_samples({backend!r})")
    samples = [Sample(**each) for each in json.loads(printed)]
    settled = samples[0]
    assert settled.nodes > 0
    assert [sample.nodes for sample in samples] == [settled.nodes] * len(samples), samples
    assert max(sample.objects for sample in samples) - settled.objects < OBJECT_SLACK, samples
    assert max(sample.resident_bytes for sample in samples) - settled.resident_bytes < MEMORY_SLACK_BYTES, samples
