"""Which of a machine's devices a process has: `ltc:i` is the GPU `cuda:i`, and on the CPU that of the local rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from torch_ltc.native.library import extension

pytestmark = pytest.mark.distributed
needs_extension = pytest.mark.skipif(extension is None, reason="without the extension PyTorch knows ltc:0 alone")
RANK_ONE = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SECOND_GPU = """
    import torch
    torch.cuda.device_count = lambda: 2
    import torch_ltc
    from torch_ltc.config import settings
    settings.device_type = "cuda"
"""


def run(*parts: str, **environment: str) -> list[str]:
    """What a process of its own prints."""
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "LTC_DEVICE_ORDINAL")}
    done = subprocess.run(
        [sys.executable, "-c", "".join(map(textwrap.dedent, parts))],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@needs_extension
def test_the_device_of_a_local_rank_has_its_number() -> None:
    printed = run(
        """
        import torch, torch_ltc
        model = torch.nn.Linear(2, 2, device="ltc:1")
        x = torch.ones(1, 2, device="ltc")
        model(x).sum().backward()
        generator = torch.Generator(device="ltc")
        drawn = torch.rand(2, device="ltc:1", generator=generator)
        devices = {value.device for value in (x, x.cpu().to("ltc:1"), model.weight.grad, drawn, generator, x.float())}
        print(*devices)
        print(torch.ltc.device_count(), torch.ltc.current_device(), torch.accelerator.device_count())
        print(torch.accelerator.current_device_index(), torch.tensor([1.0], device="ltc"))
        torch.ltc.set_device(1)
        torch.ltc.synchronize("ltc:1")
        """,
        **RANK_ONE,
    )
    assert printed == ["ltc:1", "2 1 2", "1 tensor([1.], device='ltc:1')"]


@needs_extension
def test_a_second_device_of_a_process_is_refused() -> None:
    printed = run(
        """
        import torch, torch_ltc
        kept = torch.ones(2, device="ltc")
        for ask in (
            lambda: torch.ones(2, device="ltc:0"),
            lambda: kept.to("ltc:0"),
            lambda: kept.cpu().to("ltc:0"),
            lambda: torch.randn(2, device="ltc:0"),
            lambda: torch.nn.Linear(2, 2).to("ltc:0"),
            lambda: torch.ltc.synchronize(0),
            lambda: torch.Generator(device="ltc:0"),
            lambda: torch.ltc.set_device(0),
            lambda: torch.ltc.set_device(2),
        ):
            try:
                print("accepted", ask())
            except RuntimeError as error:
                print(str(error).splitlines()[0])
        """,
        **RANK_ONE,
    )
    assert len(printed) == 9
    assert all("torch_ltc has one device, ltc:1, in each process" in line for line in [*printed[:7], printed[8]])
    assert printed[7] == "there are tensors on ltc:1 already, and a process has one device"


@needs_extension
def test_a_process_may_choose_before_its_first_tensor() -> None:
    code = """
        import torch, torch_ltc
        torch.ltc.set_device(0)
        print(torch.ones(2, device="ltc").device, torch.ones(2, device="ltc:0").sum().item(), torch.ltc.device_count())
    """
    assert run(code, **RANK_ONE) == ["ltc:0 2.0 2"]


@needs_extension
def test_what_another_rank_saved_is_loaded_onto_the_device_of_this_one(tmp_path: Path) -> None:
    file = tmp_path / "saved.pt"
    run(f"""
        import torch, torch_ltc
        parameter = torch.nn.Parameter(torch.ones(2, device="ltc"))
        torch.save({{"x": torch.arange(3, device="ltc"), "p": parameter}}, "{file}")
    """)
    printed = run(
        f"""
        import torch, torch_ltc
        for place in (None, "ltc", "ltc:1", "cpu"):
            loaded = torch.load("{file}", map_location=place)
            print(loaded["x"].device, loaded["x"].tolist(), loaded["p"].device)
        """,
        **RANK_ONE,
    )
    assert printed == [*["ltc:1 [0, 1, 2] ltc:1"] * 3, "cpu [0, 1, 2] cpu"]


def test_the_proxy_before_the_first_tensor_knows_the_local_rank() -> None:
    code = """
        import torch, torch_ltc_autoload
        proxy = torch_ltc_autoload._Proxy("torch.ltc")
        print(proxy.device_count(), proxy.current_device())
    """
    assert run(code) == ["1 0"]
    assert run(code, **RANK_ONE) == ["2 1" if extension is not None else "1 0"]


@needs_extension
def test_the_number_is_that_of_the_gpu() -> None:
    chosen = """
        print(settings.device_ordinal, torch.ltc.current_device())
        torch.ltc.set_device(1)
        print(settings.device_ordinal, torch.ltc.current_device(), torch.ltc.device_count())
        print(torch.accelerator.current_device_index(), torch_ltc.record.buffer.physical_device())
    """
    assert run(SECOND_GPU, chosen) == ["0 0", "1 1 2", "1 cuda:1"]
    shown = "    print(settings.device_ordinal, torch.ltc.current_device())"
    assert run(SECOND_GPU, shown, **RANK_ONE) == ["1 1"]
    # More ranks than GPUs share them.
    assert run(SECOND_GPU, shown, LOCAL_RANK="3", LOCAL_WORLD_SIZE="4") == ["1 1"]
    assert run(SECOND_GPU, shown, **RANK_ONE, LTC_DEVICE_ORDINAL="0") == ["0 0"]


def test_without_the_extension_the_device_is_number_zero_on_any_gpu() -> None:
    code = """
        torch.ltc.set_device(1)
        print(settings.device_ordinal, torch.ltc.current_device(), torch.ltc.device_count())
    """
    assert run(SECOND_GPU, code, LTC_NATIVE="0") == ["1 0 1"]


SCRIPT = """
import json, os, sys, torch, torch_ltc
import torch.distributed as dist

rank = int(os.environ["LOCAL_RANK"])
torch.ltc.set_device(rank)
device = torch.device("ltc", rank)
dist.init_process_group("ltc", device_id=device)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1).to(device)
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank], output_device=rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.full((2, 3), float(rank + step), device=device)).square().mean()
    loss.backward()
    optimizer.step()
found = {"device": str(loss.device), "weight": model.module.weight.tolist(), "count": torch.ltc.device_count()}
with open(f"{sys.argv[1]}/found.{rank}", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@needs_extension
def test_a_script_for_several_gpus_runs_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    assert [one["device"] for one in found] == ["ltc:0", "ltc:1"]
    assert [one["count"] for one in found] == [2, 2]
    assert found[0]["weight"] == found[1]["weight"]
    assert torch.tensor(found[0]["weight"]).isfinite().all()
