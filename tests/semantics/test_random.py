"""Random numbers: each drawn once, those of CPU eager for the same seed, in program order, whatever is read when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import assert_like_eager, assert_same, observe, run_script
from tests.support.backends import FunctionalBackend, registered
from torch_ltc.config import settings

pytestmark = pytest.mark.usefixtures("any_fingerprints")


def test_a_random_tensor_is_drawn_once_however_often_it_is_read() -> None:
    # a = randn; b = a + 1; b.cpu(); a.cpu()
    for _ in range(3):
        torch.manual_seed(3)
        a = torch.randn(5, device="ltc")
        b = a + 1
        later, earlier = b.cpu(), a.cpu()
        torch.manual_seed(3)
        expected = torch.randn(5)
        assert_same(earlier, expected)
        assert_same(later, expected + 1)
        assert_same(a.cpu(), expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_random_tensors_have_eagers_numbers_in_any_order_of_reading(order: tuple[int, ...]) -> None:
    # Two randoms read in the other order must not swap values.
    torch.manual_seed(11)
    expected = [torch.randn(3), torch.rand(3), torch.randint(100, (3,))]
    torch.manual_seed(11)
    drawn = [torch.randn(3, device="ltc"), torch.rand(3, device="ltc"), torch.randint(100, (3,), device="ltc")]
    for place in order:
        assert_same(drawn[place], expected[place])


DRAWS: dict[str, Callable[[str], Any]] = {
    "randn": lambda device: torch.randn(7, device=device),
    "randn 64": lambda device: torch.randn(64, device=device),
    "rand": lambda device: torch.rand(4, 5, device=device),
    "randint": lambda device: torch.randint(-5, 90, (6,), device=device),
    "randperm": lambda device: torch.randperm(17, device=device),
    "randn_like": lambda device: torch.randn_like(torch.ones(3, 4, device=device).t()),
    "rand_like": lambda device: torch.rand_like(torch.ones(3, device=device), dtype=torch.float64),
    "randint_like": lambda device: torch.randint_like(torch.ones(5, device=device), 9),
    "normal": lambda device: torch.normal(torch.arange(5.0, device=device), 2.0),
    "normal of numbers": lambda device: torch.normal(1.0, 2.0, (4,), device=device),
    "bernoulli": lambda device: torch.bernoulli(torch.full((20,), 0.3, device=device)),
    "bernoulli_": lambda device: torch.empty(20, device=device).bernoulli_(0.7),
    "multinomial": lambda device: torch.multinomial(torch.ones(10, device=device), 4),
    "uniform_": lambda device: torch.empty(5, device=device).uniform_(-2, 3),
    "normal_": lambda device: torch.empty(18, device=device).normal_(1, 3),
    "random_": lambda device: torch.empty(5, dtype=torch.int64, device=device).random_(0, 50),
    "exponential_": lambda device: torch.empty(5, device=device).exponential_(2.0),
    "cauchy_": lambda device: torch.empty(5, device=device).cauchy_(),
    "log_normal_": lambda device: torch.empty(5, device=device).log_normal_(),
    "geometric_": lambda device: torch.empty(5, device=device).geometric_(0.2),
    "poisson": lambda device: torch.poisson(torch.full((9,), 3.0, device=device)),
    "binomial": lambda device: torch.binomial(
        torch.full((9,), 8.0, device=device), torch.full((9,), 0.5, device=device)
    ),
    "dropout": lambda device: F.dropout(torch.ones(50, device=device), 0.4),
    "dropout2d": lambda device: F.dropout2d(torch.ones(2, 8, 3, 3, device=device), 0.4),
    "alpha_dropout": lambda device: F.alpha_dropout(torch.ones(50, device=device), 0.4, training=True),
    "feature_alpha_dropout": lambda device: F.feature_alpha_dropout(torch.ones(2, 8, 3, device=device), 0.4, True),
    "gamma": lambda device: torch._standard_gamma(torch.full((9,), 2.0, device=device)),
    "dirichlet": lambda device: torch._sample_dirichlet(torch.full((3, 4), 2.0, device=device)),
    "rrelu": lambda device: F.rrelu(-torch.ones(50, device=device), training=True),
    "gumbel_softmax": lambda device: F.gumbel_softmax(torch.ones(3, 4, device=device)),
    "kaiming_uniform_": lambda device: nn.init.kaiming_uniform_(torch.empty(4, 3, device=device)),
    "trunc_normal_": lambda device: nn.init.trunc_normal_(torch.empty(30, device=device)),
    "xavier_normal_": lambda device: nn.init.xavier_normal_(torch.empty(4, 3, device=device)),
    "layer": lambda device: nn.Linear(3, 4, device=device).weight,
    "attention with dropout": lambda device: F.scaled_dot_product_attention(
        *[torch.ones(1, 2, 4, 8, device=device)] * 3, dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.usefixtures("backend", "no_fallback")
def test_drawing_gives_the_numbers_of_cpu_eager(name: str) -> None:
    # The numbers of CPU eager for the same seed; the state afterwards too, as the second draw shows.
    for _ in range(3):
        assert_like_eager(lambda device: (DRAWS[name](device), torch.rand(2, device=device)))


@pytest.mark.parametrize("name", DRAWS)
def test_drawing_around_compiled_code_in_functional_form_moves_the_devices_generator_alone(name: str) -> None:
    with registered(FunctionalBackend), settings.scope(backend="functional"):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        for _ in range(3):
            torch.ltc.manual_seed(4)
            made = DRAWS[name]("ltc") * 1
            after = torch.ltc.get_rng_state().cpu()
            assert torch.equal(torch.get_rng_state(), before)
            torch.manual_seed(4)
            assert_same(made, DRAWS[name]("cpu") * 1)
            assert torch.equal(after, torch.get_rng_state())
            torch.set_rng_state(before)


@pytest.mark.usefixtures("backend")
def test_manual_seed_takes_effect_where_it_stands_in_the_program() -> None:
    # seed; randn; seed; randn; sync.
    def draw(device: str) -> list[Tensor]:
        drawn = []
        for seed in (5, 6, 5):
            torch.manual_seed(seed)
            drawn.append(torch.randn(4, device=device))
            drawn.append(torch.rand(4, device=device))
        torch_ltc.sync()
        return drawn

    for _ in range(3):
        assert_like_eager(draw)
    values = draw("ltc")
    assert_same(values[0].cpu(), values[4].cpu())
    assert not torch.equal(values[0].cpu(), values[2].cpu())


def test_seeding_without_pending_draws_cuts_nothing() -> None:
    with observe() as seen:
        x = torch.ones(3, device="ltc") + 1
        torch.manual_seed(1)
        y = x * torch.rand(3, device="ltc")
        y.cpu()
    assert seen.reasons == ["READ"]


@pytest.mark.usefixtures("backend")
def test_reading_the_loss_before_backward_does_not_change_the_dropout_mask() -> None:
    # Loss and gradient belong to one mask.
    def train(device: str, read_first: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1)).to(device)
        inputs = torch.linspace(-1, 1, 24).view(4, 6).to(device)
        seen: list[Any] = []
        for step in range(3):
            torch.manual_seed(step)
            model.zero_grad()
            loss = model(inputs).square().mean()
            if read_first:
                seen.append(loss.item())
            loss.backward()
            seen.append(loss.item())
            seen += [parameter.grad.clone() for parameter in model.parameters()]
        return seen

    for read_first in (True, False):
        assert_same(train("ltc", read_first), train("cpu", read_first), exact=False)


def test_a_model_draws_the_same_when_it_is_read_in_the_middle() -> None:
    # Reads do not move the generator.
    def walk(device: str, read: bool) -> Tensor:
        torch.manual_seed(9)
        value = torch.zeros(4, device=device)
        for _ in range(5):
            value = value + torch.randn(4, device=device)
            if read:
                value.sum().item()
        return value

    expected = walk("cpu", False)
    assert_same(walk("ltc", True), expected)
    assert_same(walk("ltc", False), expected)


def test_device_seed_functions() -> None:
    torch.ltc.manual_seed(123)
    assert torch.ltc.initial_seed() == 123
    first = torch.randn(4, device="ltc")
    torch.ltc.manual_seed_all(123)
    assert_same(torch.randn(4, device="ltc"), first.cpu())
    assert_same(first, torch.randn(4, generator=torch.Generator().manual_seed(123)))
    fresh = torch.ltc.seed()
    assert torch.ltc.initial_seed() == fresh != 123
    drawn = torch.randn(4, device="ltc")
    assert_same(drawn, torch.randn(4, generator=torch.Generator().manual_seed(fresh)))
    assert torch.ltc.seed_all() != fresh


def test_torch_manual_seed_seeds_the_device_and_the_cpu_alike() -> None:
    torch.manual_seed(77)
    assert torch.ltc.initial_seed() == 77
    device = torch.randn(3, device="ltc")
    assert_same(device, torch.randn(3))


def test_device_draws_do_not_move_the_cpu_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    torch.randn(10, device="ltc").cpu()
    assert torch.equal(torch.get_rng_state(), before)


def test_generator_state_is_read_and_set_where_it_stands() -> None:
    torch.manual_seed(4)
    first = torch.randn(3, device="ltc")
    state = torch.ltc.get_rng_state()
    second = torch.randn(3, device="ltc")
    torch.ltc.set_rng_state(state)
    again = torch.randn(3, device="ltc")
    torch.manual_seed(4)
    expected = [torch.randn(3), torch.randn(3)]
    assert_same([first, second, again], [expected[0], expected[1], expected[1]])
    states = torch.ltc.get_rng_state_all()
    assert len(states) == 1
    third = torch.randn(3, device="ltc").cpu()
    torch.ltc.set_rng_state_all(states)
    assert_same(torch.randn(3, device="ltc"), third)


def test_generator_state_has_the_form_of_the_cpu_generators() -> None:
    torch.manual_seed(4)
    assert torch.equal(torch.ltc.get_rng_state(), torch.get_rng_state())


def test_fork_rng_gives_the_device_its_state_back() -> None:
    torch.manual_seed(8)
    torch.randn(2, device="ltc")
    with torch.random.fork_rng(devices=[0], device_type="ltc"):
        torch.manual_seed(1)
        inside = torch.randn(2, device="ltc")
    after = torch.randn(2, device="ltc")
    torch.manual_seed(8)
    expected = torch.randn(4)
    torch.manual_seed(1)
    assert_same(inside, torch.randn(2))
    assert_same(after, expected[2:])


def test_fork_rng_takes_every_device_by_default() -> None:
    torch.manual_seed(8)
    with torch.random.fork_rng(device_type="ltc"):
        torch.randn(5, device="ltc")
    drawn = torch.randn(2, device="ltc")
    torch.manual_seed(8)
    assert_same(drawn, torch.randn(2))


GENERATOR_DRAWS: dict[str, Callable[[str, torch.Generator], Tensor]] = {
    "randn": lambda device, generator: torch.randn(5, device=device, generator=generator),
    "rand": lambda device, generator: torch.rand(5, device=device, generator=generator),
    "randint": lambda device, generator: torch.randint(9, (5,), device=device, generator=generator),
    "randperm": lambda device, generator: torch.randperm(9, device=device, generator=generator),
    "normal_": lambda device, generator: torch.empty(5, device=device).normal_(generator=generator),
    "uniform_": lambda device, generator: torch.empty(3, 2, device=device).t().uniform_(generator=generator),
    "bernoulli": lambda device, generator: torch.bernoulli(torch.full((9,), 0.5, device=device), generator=generator),
    "multinomial": lambda device, generator: torch.multinomial(torch.ones(5, device=device), 3, generator=generator),
    "exponential_": lambda device, generator: torch.empty(3, device=device).exponential_(generator=generator),
}


@pytest.mark.parametrize("own", ["cpu", "ltc"])
@pytest.mark.parametrize("name", GENERATOR_DRAWS)
@pytest.mark.filterwarnings("ignore::torch_ltc.errors.FallbackWarning")
def test_an_explicit_generator_is_drawn_from_and_nothing_else(name: str, own: str) -> None:
    # A CPU generator, and torch.Generator(device="ltc").
    torch.manual_seed(0)
    draw = GENERATOR_DRAWS[name]
    ours, theirs = torch.Generator(device=own).manual_seed(42), torch.Generator().manual_seed(42)
    for _ in range(3):
        assert_same(draw("ltc", ours), draw("cpu", theirs))
    device_draw = torch.randn(3, device="ltc")
    torch.manual_seed(0)
    assert_same(device_draw, torch.randn(3))


def test_generator_of_the_device_knows_its_device_and_state() -> None:
    # torch.Generator(device="ltc").
    generator = torch.Generator(device="ltc")
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("ltc", 0)
    generator.manual_seed(5)
    assert generator.initial_seed() == 5
    state = generator.get_state()
    first = torch.randn(3, device="ltc", generator=generator)
    generator.set_state(state)
    assert_same(torch.randn(3, device="ltc", generator=generator), first.cpu())
    assert isinstance(torch.Generator(), torch.Generator)
    assert torch.Generator().device == torch.device("cpu")


def test_wrong_probability_raises_as_eager_where_it_is_recorded() -> None:
    target = torch.empty(4, device="ltc")
    target.bernoulli_(0.5)
    with pytest.raises(RuntimeError, match=r"bernoulli_ expects p to be in \[0, 1\]"):
        target.bernoulli_(2.0)
    with pytest.raises(RuntimeError, match="expects std >= 0"):
        target.normal_(0.0, -1.0)
    assert target.cpu().numel() == 4


LIMITS: dict[str, Callable[[str], Any]] = {
    "random_ beyond the dtype": lambda d: torch.empty(2, dtype=torch.int16, device=d).random_(0, 1 << 40),
    "random_ of nothing": lambda d: torch.empty(2, device=d).random_(5, 5),
    "randint of nothing": lambda d: torch.randint(5, 3, (2,), device=d),
    "uniform_ backwards": lambda d: torch.empty(2, device=d).uniform_(3, 1),
    "normal_ of a negative deviation": lambda d: torch.empty(2, device=d).normal_(0, -1),
    "exponential_ of a negative rate": lambda d: torch.empty(2, device=d).exponential_(-1),
    "geometric_ beyond 1": lambda d: torch.empty(2, device=d).geometric_(2.0),
    "cauchy_ of integers": lambda d: torch.empty(2, dtype=torch.int64, device=d).cauchy_(),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_random_fills_are_checked_at_the_call(name: str) -> None:
    # The same operators with good numbers come first: their shapes are known, and shape inference is not asked again.
    for good in (
        lambda x: x.random_(0, 4),
        lambda x: x.uniform_(0, 1),
        lambda x: x.normal_(),
        lambda x: x.exponential_(),
    ):
        good(torch.empty(2, device="ltc"))
    torch.empty(2, dtype=torch.int16, device="ltc").random_(0, 3)
    torch.empty(2, device="ltc").geometric_(0.5)
    with pytest.raises(RuntimeError) as expected:
        LIMITS[name]("cpu")
    with pytest.raises(type(expected.value)) as actual:
        LIMITS[name]("ltc")
    assert str(actual.value) == str(expected.value)


def test_the_first_draws_of_a_process_have_the_seed_before_them_when_another_follows_at_once() -> None:
    # Nothing has run yet when the second seed comes: the draws are queued only.
    printed = run_script(
        """
        import torch
        import torch_ltc

        torch.manual_seed(1)
        x = torch.ones(300, 300, device="ltc")
        for _ in range(20):
            x = x @ x * 0.001
        torch_ltc.sync()
        first = torch.randn(3, device="ltc")
        torch.manual_seed(2)
        second = torch.randn(3, device="ltc")
        torch.manual_seed(1)
        print(torch.equal(first.cpu(), torch.randn(3)))
        torch.manual_seed(2)
        print(torch.equal(second.cpu(), torch.randn(3)))
        """
    )
    assert printed.split() == ["True", "True"]
