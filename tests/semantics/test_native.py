"""Guard, generators, allocator and storages of the extension in C++; and what both ways of the device must stand."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import torch_ltc
from tests.semantics.support import assert_same
from torch_ltc.native.library import extension
from torch_ltc.pytorch.entries import Patch, table
from torch_ltc.pytorch.patches import changes

native = pytest.mark.skipif(extension is None, reason="the extension in C++ is not built, or LTC_NATIVE=0")


@native
def test_what_only_python_needs_is_not_replaced() -> None:
    unneeded = [entry.path for entry in table.entries(Patch) if entry.python_only]
    assert len(unneeded) > 20
    assert [path for path in unneeded if path in changes._undo] == []
    assert torch.Generator is torch._C.Generator


# ---- generators -----------------------------------------------------------------------------------------------------


def _draws(device: str, generator: torch.Generator) -> list[torch.Tensor]:
    def empty(*size: int) -> torch.Tensor:
        return torch.empty(*size, device=device)

    return [
        torch.rand(5, device=device, generator=generator),
        torch.randn(20, device=device, generator=generator),
        torch.randint(90, (6,), device=device, generator=generator),
        torch.randperm(17, device=device, generator=generator),
        torch.bernoulli(torch.full((20,), 0.3, device=device), generator=generator),
        torch.multinomial(torch.ones(10, device=device), 4, generator=generator),
        empty(7).uniform_(-1, 1, generator=generator),
        empty(18).normal_(1, 3, generator=generator),
        empty(7).exponential_(2.0, generator=generator),
        torch.nn.init.kaiming_uniform_(empty(4, 3), generator=generator),
    ]


def test_a_generator_draws_what_one_of_the_cpu_does() -> None:
    for mine, theirs in zip(
        _draws("ltc", torch.Generator(device="ltc").manual_seed(5)),
        _draws("cpu", torch.Generator().manual_seed(5)),
        strict=True,
    ):
        assert_same(mine, theirs)


def test_a_generator_is_the_devices_and_has_seed_and_state() -> None:
    generator = torch.Generator(device="ltc")
    assert generator.device == torch.device("ltc", 0)
    assert generator.initial_seed() == torch.Generator().initial_seed()
    generator.manual_seed(7)
    assert generator.initial_seed() == 7
    state = generator.get_state()
    assert_same(state, torch.Generator().manual_seed(7).get_state())
    first = torch.rand(3, device="ltc", generator=generator)
    generator.set_state(state)
    assert_same(torch.rand(3, device="ltc", generator=generator), first.cpu())


def test_a_pickled_generator_goes_on_where_it_stands() -> None:
    generator = torch.Generator(device="ltc").manual_seed(3)
    torch.rand(2, device="ltc", generator=generator)
    loaded = pickle.loads(pickle.dumps(generator))
    assert loaded.device == generator.device
    assert_same(loaded.get_state(), generator.get_state())


@native
def test_a_cloned_generator_goes_its_own_way() -> None:
    generator = torch.Generator(device="ltc").manual_seed(3)
    clone = generator.clone_state()
    assert_same(clone.get_state(), generator.get_state())
    torch.rand(2, device="ltc", generator=generator)
    assert not torch.equal(clone.get_state(), generator.get_state())


@native
def test_there_is_no_second_device() -> None:
    with pytest.raises(RuntimeError, match="torch_ltc has one device, ltc:0"):
        torch.Generator(device="ltc:1")


@native
def test_the_devices_own_generator_is_seeded_where_it_stands() -> None:
    own = torch.ltc.default_generators[0]
    own.manual_seed(9)
    assert own.initial_seed() == torch.ltc.initial_seed() == 9
    recorded = torch.rand(3, device="ltc", generator=own)
    state = own.get_state()
    later = torch.rand(3, device="ltc")
    own.set_state(state)
    again = torch.rand(3, device="ltc")
    reference = torch.Generator().manual_seed(9)
    assert_same(recorded, torch.rand(3, generator=reference))
    assert_same(later, torch.rand(3, generator=reference))
    assert_same(again, later.cpu())


# ---- storages -------------------------------------------------------------------------------------------------------


def test_pointers_tell_which_tensors_share_memory_and_where() -> None:
    x = torch.zeros(4, 6, device="ltc")
    y = x + 1
    assert x.data_ptr() != y.data_ptr()
    assert x[2, 3:].data_ptr() == x.data_ptr() + (2 * 6 + 3) * 4
    assert x.t().data_ptr() == x.data_ptr() == x.untyped_storage().data_ptr()
    assert not x.data_ptr() <= y.data_ptr() < x.data_ptr() + 96
    assert torch.empty(0, device="ltc").data_ptr() == 0


def test_a_storage_has_its_size() -> None:
    x = torch.zeros(4, 6, device="ltc")
    for tensor, size_bytes in (
        (x, 96),
        (x[1], 96),
        (x.double() + 1, 192),
        (torch.empty_strided((2, 3), (10, 1), device="ltc"), 52),
        (torch.ones(2, 3, 4, 4, device="ltc").to(memory_format=torch.channels_last), 384),
        (torch.empty(0, device="ltc"), 0),
        (torch.empty(3, device="ltc").resize_(10), 40),
        ((x + 1).resize_(2), 96),
        ((x + 1).resize_(50), 200),
        (torch.arange(5).to("ltc"), 40),
    ):
        assert tensor.untyped_storage().nbytes() == len(tensor.untyped_storage()) == size_bytes


def test_a_resized_tensor_keeps_what_it_held() -> None:
    x = torch.arange(4.0).to("ltc") + 1
    before = x.data_ptr()
    x.resize_(8)
    x[4:] = 0
    assert_same(x, torch.tensor([1.0, 2, 3, 4, 0, 0, 0, 0]))
    assert x.data_ptr() != before


def test_storages_are_copied_and_read() -> None:
    x = torch.arange(6, dtype=torch.uint8).to("ltc") + 1
    storage = x.untyped_storage()
    assert storage.tolist() == [1, 2, 3, 4, 5, 6]
    assert storage[2] == 3
    assert storage.cpu().device.type == "cpu"
    assert storage.cpu().tolist() == storage.clone().tolist() == storage.tolist()
    assert storage.clone().data_ptr() != storage.data_ptr()
    made = torch.UntypedStorage(6, device="ltc")
    assert (made.nbytes(), made.device.type) == (6, "ltc")
    made.copy_(storage)
    assert made.tolist() == [1, 2, 3, 4, 5, 6]
    x.fill_(9)
    assert storage.tolist() == [9] * 6
    assert made.tolist() == [1, 2, 3, 4, 5, 6]


def test_shared_storages_are_saved_once_and_stay_shared() -> None:
    base = torch.arange(12.0).to("ltc") * 2
    items: dict[str, Any] = {"base": base, "view": base[3:7], "other": base + 1}
    file = io.BytesIO()
    torch.save(items, file)
    file.seek(0)
    for loaded in (torch.load(file), copy.deepcopy(items)):
        assert {name: item.device.type for name, item in loaded.items()} == dict.fromkeys(items, "ltc")
        for name, item in items.items():
            assert_same(loaded[name], item.cpu())
        loaded["base"].zero_()
        assert_same(loaded["view"], torch.zeros(4))


def test_memory_that_somebody_else_made_is_refused() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ops.aten.set_.source_Storage(torch.empty(0, device="ltc"), torch.ones(3).untyped_storage()).sum().item()


# ---- what must be safe ----------------------------------------------------------------------------------------------


def test_sixteen_threads_record_sync_and_let_go() -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            generator = torch.Generator(device="ltc").manual_seed(number)
            weight = torch.full((8, 8), 0.01 * number, device="ltc", requires_grad=True)
            for step in range(12):
                x = torch.rand(4, 8, device="ltc", generator=generator)
                loss = (x @ weight).relu().sum() + weight[number % 8].sum()
                loss.backward()
                assert weight.grad is not None
                kept = copy.deepcopy(weight.grad)
                weight.grad = None
                if step % 3 == number % 3:
                    assert torch.isfinite(kept).all().item()
                    assert kept.untyped_storage().nbytes() == 256
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    torch_ltc.sync(wait=True)


PENDING = """
import torch, torch_ltc
weight = torch.ones(64, 64, device="ltc", requires_grad=True)
generator = torch.Generator(device="ltc")
for _ in range(30):
    (torch.rand(64, 64, device="ltc", generator=generator) @ weight).sum().backward()
    torch_ltc.sync()
    kept = weight.grad * 2
"""


def test_a_process_ends_cleanly_with_work_pending() -> None:
    done = subprocess.run([sys.executable, "-c", PENDING], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


FORKED = """
import os, sys, warnings
import torch, torch_ltc
warnings.simplefilter("ignore")
x = torch.ones(3, device="ltc") + 1
x.cpu()
child = os.fork()
if child == 0:
    try:
        (x + 1).cpu()
    except torch_ltc.errors.LtcError as error:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (x + 1).tolist())
"""


def test_a_forked_process_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ)
    )
    assert done.stdout == "7 [3.0, 3.0, 3.0]\n", done.stderr
