"""Scripts that repeat a program: what they hold, that they run, and when they are written."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.conformance.wrong_backends import FailsToRun, Inexact, NoProducts
from tests.support.backends import Misbehaving, registered
from torch_ltc.config import settings
from torch_ltc.debug import dump_repro, repro
from torch_ltc.errors import BackendWarning, ExecutionError, LtcError
from torch_ltc.lowering.interface import Form

pytestmark = pytest.mark.blocking_tiers


@pytest.fixture(autouse=True)
def own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test may write as many scripts as a process."""
    monkeypatch.setattr(repro.policy, "_written", {})


def run_script(path: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the script in this process."""
    main = runpy.run_path(path)["main"]
    seen: list[str] = []
    main.__globals__["print"] = lambda text: seen.append(str(text))
    with settings.scope(recompiles="allow"):
        return main(*arguments), "\n".join(seen)


def run_alone(path: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the script in a process of its own."""
    done = subprocess.run([sys.executable, path, *arguments], capture_output=True, text=True, timeout=90)
    return done.returncode, done.stdout + done.stderr


def test_the_script_in_full(tmp_path):
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to("ltc")
    torch_ltc.sync(wait=True)
    total = (values.t() * 0.5).sum()
    path = dump_repro(total, tmp_path)
    text = Path(path).read_text()
    assert "tiers='blocking', cache_dir='off', recompiles='allow'" in text
    head, _, rest = text.partition("def made(")
    head = re.sub(r"rogram ?\d+", "rogramN", head)
    head = re.sub(r"# /\S*/(\w+\.py):\d+", r"# \1:LINE", head)
    head = re.sub(r"(Written by|Settings): .*", r"\1: ...", head)
    # Other tests may have assigned some.
    head = re.sub(r"SETTINGS = {.*}", "SETTINGS = {}", head)
    assert head == (
        '"""ProgramN, 3 calls, as torch_ltc recorded it.\n'
        "\n"
        "Run it with: python programN.py [BACKEND]\n"
        "It runs in eager PyTorch and on the backend, torchscript if none is named, and says whether they agree.\n"
        "\n"
        "Inputs: those of the pending program\n"
        "Written by: ...\n"
        "Settings: ...\n"
        '"""\n'
        "\n"
        "import sys\n"
        "import warnings\n"
        "from pathlib import Path\n"
        "\n"
        "import torch\n"
        "\n"
        "import torch_ltc\n"
        "from torch_ltc.debug.compare_runs import difference\n"
        "from torch_ltc.lowering.tolerance import program_tolerance\n"
        "\n"
        'BACKEND = "torchscript"\n'
        'DEVICE = torch.device("cpu")\n'
        "SETTINGS = {}\n"
        'SAVED, RANDOM_STATE = torch.load(Path(__file__).with_suffix(".pt"))\n'
        "\n"
        "\n"
        "def program(inputs, generator, device):\n"
        '    """The calls as they were recorded."""\n'
        "    [v0] = inputs\n"
        "    # test_repro.py:LINE in test_the_script_in_full\n"
        "    v1 = torch.ops.aten.t.default(v0)\n"
        "    v2 = torch.ops.aten.mul.Tensor(v1, 0.5)\n"
        "    v3 = torch.ops.aten.sum.default(v2)\n"
        "    return [v3]\n"
        "\n"
        "\n"
        "def buffers():\n"
        '    """The memory behind the inputs, made anew."""\n'
        "    random = torch.Generator().manual_seed(0)\n"
        "    return [\n"
        "        SAVED[0].clone(),\n"
        "    ]\n"
        "\n"
        "\n"
        "def inputs_on(memory):\n"
        '    """The inputs as they see the memory."""\n'
        "    return [\n"
        "        memory[0],  # v0: float32[2,2]\n"
        "    ]\n"
        "\n"
        "\n"
    )
    assert rest.endswith("sys.exit(main(*sys.argv[1:2]))\n")
    assert run_alone(path) == (0, "eager and torchscript agree\n")
    assert total.item() == 5.0


def _views(values: Tensor) -> Tensor:
    values[0].add_(2.5)
    left, right = values.split(2, dim=1)
    return torch.cat([left, right.flip(0)], 1)


def _random(values: Tensor) -> Tensor:
    return torch.nn.functional.dropout(values, 0.4) + torch.rand_like(values).bernoulli() + torch.randn_like(values)


def _numbers(values: Tensor) -> Tensor:
    return (values * 0.25 - 3).clamp(float("-inf"), 2.0).add(values, alpha=2) * 1e-30


def _dtypes(values: Tensor) -> Tensor:
    short = values.bfloat16() * 2
    turned = torch.complex(values, values.neg()).conj() * (1 + 2j)
    chosen = torch.where(short > 0, turned.imag, short.float())
    return chosen + values.long().remainder(3) + values.double().round().half()


def _layouts(values: Tensor) -> Tensor:
    image = values.reshape(1, 2, 2, -1).contiguous(memory_format=torch.channels_last)
    return torch.nn.functional.max_pool2d(image.permute(0, 1, 3, 2), 1).sum((0, 1))


def _lists(values: Tensor) -> Tensor:
    parts = torch._foreach_mul(list(values.unbind(0)), 3.0)
    torch._foreach_add_(parts, list(values.unbind(0)))
    return torch.stack(parts) + values[torch.tensor([1, 0, 1, 2], device="ltc")]


@pytest.mark.parametrize("function", [_views, _random, _numbers, _dtypes, _layouts, _lists])
@pytest.mark.parametrize("backend", ["torchscript", "interpreter"])
def test_scripts_run_and_agree(tmp_path, function, backend):
    values = torch.arange(16.0).view(4, 4).to("ltc")
    torch_ltc.sync(wait=True)
    result = function(values)
    path = dump_repro(result, tmp_path, backend=backend)
    assert run_script(path) == (0, f"eager and {backend} agree")
    # What the script computes is what the program computes here.
    namespace = runpy.run_path(path)
    [repeated], _ = namespace["in_eager"]()
    torch.testing.assert_close(repeated, result.cpu())


def test_inputs_that_share_memory_are_repeated(tmp_path):
    base = torch.arange(10.0).to("ltc")
    head, tail, turned = base[1:6], base[4:], base.view(torch.int32)[:2]
    torch_ltc.sync(wait=True)
    head.mul_(2)
    result = tail.sum() + turned.sum()
    path = dump_repro(result, tmp_path)
    text = Path(path).read_text()
    assert "memory[0].as_strided((5,), (1,), 1),  # v0: float32[5] stride=(1) offset=1" in text
    assert "memory[0].view(torch.int32).as_strided((2,), (1,), 0)" in text
    namespace = runpy.run_path(path)
    [repeated], [memory] = namespace["in_eager"]()
    assert run_script(path) == (0, "eager and torchscript agree")
    torch.testing.assert_close(repeated, result.cpu())
    torch.testing.assert_close(memory, base.cpu())


def test_a_whole_and_a_part_of_one_memory_are_repeated(tmp_path):
    base = torch.arange(6.0).view(2, 3).to("ltc")
    part, turned = base[1], torch.tensor([1 + 2j, 3 - 1j]).to("ltc").conj()
    torch_ltc.sync(wait=True)
    base.mul_(2)
    result = part.sum() * turned
    path = dump_repro(result, tmp_path)
    assert "torch._conj(memory[1].as_strided((2,), (1,), 0))" in Path(path).read_text()
    [repeated], _ = runpy.run_path(path)["in_eager"]()
    assert run_script(path) == (0, "eager and torchscript agree")
    assert repeated.tolist() == result.cpu().tolist() == [24 - 48j, 72 + 24j]


def test_a_backend_that_is_wrong_is_told_apart(tmp_path):
    values = torch.tensor([1.0, 2.0]).to("ltc")
    with registered(Inexact):
        path = dump_repro(values.neg(), tmp_path, backend="inexact")
        status, output = run_script(path)
    assert status == 1
    assert output == (
        "result 0: 2 of 2 numbers differ, most at [1]: -2.00200009 instead of -2 (allowed: 4.1e-05)\n"
        "eager and inexact differ"
    )
    assert (
        "# Register the backend here: from tests.conformance.wrong_backends import Inexact;" in Path(path).read_text()
    )


def test_without_data_numbers_are_made_up_and_the_script_says_so(tmp_path):
    values, places = torch.randn(3, 4).to("ltc"), torch.tensor([2, 0]).to("ltc")
    kept = values[places] * 2.5
    torch_ltc.sync(wait=True)
    path = dump_repro(None, tmp_path, seed=7)
    text = Path(path).read_text()
    assert "Inputs: made up from their sizes: those of the run are not kept" in text
    assert "made(torch.float32, (3, 4), (4, 1), random)," in text
    assert "(v2, 2.5)" in text
    assert run_script(path) == (0, "eager and torchscript agree")
    identity = int(re.search(r"program(\d+)\.py", path).group(1))
    again = dump_repro(identity, tmp_path / "again", seed=7)
    assert Path(again).read_text() == text
    assert kept.shape == (2, 4)


def test_inputs_beyond_the_bound_are_made_up(tmp_path):
    large, small = torch.zeros(1000).to("ltc"), torch.full((2,), 3.0).to("ltc")
    torch_ltc.sync(wait=True)
    path = dump_repro(large.sum() + small, tmp_path, max_bytes=100)
    text = Path(path).read_text()
    assert "Inputs: those of the pending program, but 1 of 2 made up from their sizes: too large, or lost" in text
    memory = runpy.run_path(path)["buffers"]()
    assert sorted(tensor.numel() for tensor in memory) == [2, 1000]
    assert [tensor.tolist() for tensor in memory if tensor.numel() == 2] == [[3.0, 3.0]]
    assert run_script(path) == (0, "eager and torchscript agree")


def test_what_cannot_be_repeated_is_said(tmp_path):
    values = torch.ones(2).to("ltc")
    torch_ltc.sync(wait=True)
    with pytest.raises(LtcError, match=r"float32\[2\], is not pending: no program that computes it is left"):
        dump_repro(values, tmp_path)
    with pytest.raises(LtcError, match="takes tensors on ltc, got one on cpu"):
        dump_repro(torch.ones(2), tmp_path)
    with pytest.raises(LtcError, match="program 999999 is not known"):
        dump_repro(999999, tmp_path)


# ---- by policy ------------------------------------------------------------------------------------------------------


# In this process a backend that has failed with a program is not asked again: scripts are run on its likes.
class NoProductsEither(NoProducts):
    name = "no_products_either"


class FailsAgain(FailsToRun):
    name = "fails_again"


class InexactAgain(Inexact):
    name = "inexact_again"


def steps(step: Callable[[], Any], count: int = 3) -> list[str]:
    """Warnings and errors of so many steps, as text."""
    texts: list[str] = []
    for _ in range(count):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            try:
                kept = step()
                torch_ltc.sync(wait=True)
                del kept
            except LtcError as error:
                texts.append(str(error))
        texts += [str(warning.message) for warning in shown if issubclass(warning.category, BackendWarning)]
    return texts


def path_in(text: str) -> str:
    found = re.search(r"repeat it with: python (\S+\.py)", text)
    assert found is not None, text
    return found.group(1)


def test_a_program_that_cannot_be_compiled_gets_a_script(tmp_path):
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to("ltc")
    with registered(NoProducts), torch_ltc.use_backend("no_products"), settings.scope(repro_dir=str(tmp_path)):
        [text] = steps(lambda: (values @ values).relu())
        path = path_in(text)
        assert path.endswith("_compile.py")
    with registered(NoProductsEither):
        status, output = run_script(path, "no_products_either")
    assert "The error was:\n    no_products cannot compile program" in Path(path).read_text()
    assert "Inputs: those of the run that failed" in Path(path).read_text()
    assert status == 1
    assert re.sub(r"program \d+", "program N", output).startswith(
        "no_products_either refuses to compile it: no_products_either cannot compile program N of 2 calls at aten::mm"
    )
    assert output.endswith("eager and no_products_either agree")
    # A process of its own does not know the backend, and says so; a known one runs.
    status, output = run_alone(path)
    assert status == 1
    assert "there is no backend named 'no_products'" in output
    assert run_alone(path, "interpreter") == (0, "eager and interpreter agree\n")


def test_a_program_that_cannot_be_run_gets_a_script_with_its_inputs(tmp_path):
    weight = torch.ones(3).to("ltc")
    with registered(FailsToRun), torch_ltc.use_backend("fails_to_run"), settings.scope(repro_dir=str(tmp_path)):
        [text] = steps(lambda: weight.mul_(2).sum())
        path = path_in(text)
    with registered(FailsAgain):
        status, output = run_script(path, "fails_again")
    assert path.endswith("_run.py")
    # The second run failed: before it the weight was 2.
    [memory] = runpy.run_path(path)["buffers"]()
    assert memory.tolist() == [2.0, 2.0, 2.0]
    assert (status, "fails_again refuses to run it" in output) == (1, True)
    assert weight.cpu().tolist() == [8.0, 8.0, 8.0]


def test_a_failing_operation_gets_a_script(tmp_path):
    table, places = torch.ones(4, 2).to("ltc"), torch.tensor([0, 9]).to("ltc")
    torch_ltc.sync(wait=True)
    with settings.scope(repro_dir=str(tmp_path)):
        kept = torch.nn.functional.embedding(places, table) * 2
        with pytest.raises(ExecutionError) as caught:
            torch_ltc.sync(wait=True)
        del kept
    path = path_in(str(caught.value))
    assert path.endswith("_call.py")
    status, output = run_script(path)
    assert status == 1
    assert "eager fails: IndexError: index out of range in self" in output
    assert "torchscript fails: ExecutionIndexError: aten::embedding failed when its program ran" in output


def test_wrong_results_get_a_script(tmp_path):
    values = torch.tensor([1.0, 2.0]).to("ltc")
    scope = settings.scope(repro_dir=str(tmp_path), check="validate", recompiles="allow")
    with registered(Inexact), torch_ltc.use_backend("inexact"), scope:
        [text] = steps(lambda: values.sin() + 1)
        path = path_in(text)
        assert path.endswith("_validate.py")
    with registered(InexactAgain):
        status, output = run_script(path, "inexact_again")
    assert (status, output.endswith("eager and inexact_again differ")) == (1, True)


def test_scripts_are_written_once_and_not_without_end(tmp_path, monkeypatch):
    def fails(program: object, attempt: int, given: Sequence[Tensor]) -> None:
        raise ValueError("no")

    monkeypatch.setattr(repro, "_MOST_WRITTEN", 2)
    scope = settings.scope(repro_dir=str(tmp_path), recompiles="allow", promotion=False)
    with registered(Misbehaving("fails", Form.RECORDED, fails)), torch_ltc.use_backend("fails"), scope:
        for size in (2, 3, 4):
            values = torch.ones(size).to("ltc")
            steps(lambda: values.exp() + 1)  # noqa: B023 (used at once)
    assert len(list(tmp_path.glob("*.py"))) == 2
    assert len(list(tmp_path.glob("*.pt"))) == 2


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = torch.ones(2, 2).to("ltc")
    with registered(NoProducts), torch_ltc.use_backend("no_products"), settings.scope(recompiles="allow"):
        [text] = steps(lambda: (values @ values).sigmoid())
    assert "repeat it with" not in text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_loses_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    values = torch.ones(2, 2).to("ltc")
    scope = settings.scope(repro_dir=str(blocked))
    with (
        registered(NoProducts),
        torch_ltc.use_backend("no_products"),
        scope,
        warnings.catch_warnings(record=True) as shown,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            result = (values @ values).tanh()
            torch_ltc.sync(wait=True)
    texts = [str(warning.message) for warning in shown]
    assert any(text.startswith(f"no script could be written to {blocked} for program") for text in texts)
    torch.testing.assert_close(result.cpu(), torch.full((2, 2), 2.0).tanh())
