"""Random training loops and functions under `torch_ltc.jit`, as statements.

Parameters are made on the host, with the host's random numbers; a seed follows, so that the device draws as eager does.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from tests.fuzz.program import Program

LAYERS = (
    "nn.Linear({i}, {o})",
    "nn.Linear({i}, {o}, bias=False)",
    "nn.Sequential(nn.Linear({i}, {o}), nn.ReLU())",
    "nn.Sequential(nn.Linear({i}, {o}), nn.GELU(), nn.LayerNorm({o}))",
    "nn.Sequential(nn.Linear({i}, {o}), nn.BatchNorm1d({o}))",
    "nn.Sequential(nn.Dropout(0.25), nn.Linear({i}, {o}), nn.Tanh())",
    "nn.Sequential(nn.Unflatten(1, (1, {i})), nn.Conv1d(1, {o}, 3, padding=1), nn.AdaptiveAvgPool1d(1), nn.Flatten())",
    "nn.Sequential(nn.Linear({i}, {o}), nn.PReLU(), nn.RMSNorm({o}))",
    "nn.Sequential(nn.Unflatten(1, (1, 1, {i})), nn.Conv2d(1, {o}, (1, 3), padding=(0, 1), bias=False), "
    "nn.BatchNorm2d({o}), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()).to(memory_format=torch.channels_last)",
    "nn.Sequential(nn.Unflatten(1, (1, {i})), nn.TransformerEncoderLayer({i}, 1, 8, 0.1, batch_first=True), "
    "nn.Flatten(), nn.Linear({i}, {o}))",
    "nn.Sequential(nn.Linear({i}, 2 * {o}), nn.GLU(), nn.GroupNorm(1, {o}))",
    "nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear({i}, {o})), nn.AlphaDropout(0.2))",
)
OPTIMIZERS = (
    "torch.optim.SGD({p}, n0, foreach={b})",
    "torch.optim.SGD({p}, 0.1, momentum=0.9, nesterov={b}, foreach=True)",
    "torch.optim.SGD({p}, 0.1, momentum=0.5, weight_decay=n1, maximize={b}, foreach=False)",
    "torch.optim.Adam({p}, 0.01, amsgrad={b}, foreach={c})",
    "torch.optim.Adam({p}, torch.tensor(0.01), foreach=False)",
    "torch.optim.AdamW({p}, 0.01, weight_decay=0.1, foreach={b})",
    "torch.optim.Adam({p}, 0.01, fused=True)",
    "torch.optim.RMSprop({p}, 0.01, momentum=0.5, centered={b}, foreach={c})",
    "torch.optim.Adagrad({p}, 0.1, lr_decay=0.1, foreach={b})",
    "torch.optim.Adadelta({p}, foreach={b})",
    "torch.optim.Adamax({p}, 0.01, foreach={b})",
    "torch.optim.NAdam({p}, 0.01, foreach={b})",
    "torch.optim.RAdam({p}, 0.01, foreach={b})",
    "torch.optim.Rprop({p}, 0.01, foreach={b})",
    "torch.optim.ASGD({p}, 0.01, lambd=0.1, foreach={b})",
    "torch.optim.Adafactor({p}, 0.01, foreach={b})",
    "torch.optim.SGD({p}, 0.1, momentum=0.5, fused=True)",
    "torch.optim.NAdam({p}, 0.01, decoupled_weight_decay=True, weight_decay=0.1, foreach={b})",
)
SCHEDULES = (
    "torch.optim.lr_scheduler.StepLR(o, 2, 0.5)",
    "torch.optim.lr_scheduler.ExponentialLR(o, 0.9)",
    "torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)",
    "torch.optim.lr_scheduler.LinearLR(o, total_iters=3)",
    "torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1))",
    "torch.optim.lr_scheduler.MultiStepLR(o, [1, 3], 0.5)",
    "torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40, cycle_momentum=False)",
    "torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False)",
    "torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2)",
    "torch.optim.lr_scheduler.PolynomialLR(o, 4)",
    "torch.optim.lr_scheduler.SequentialLR(o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), "
    "torch.optim.lr_scheduler.ExponentialLR(o, 0.8)], [2])",
)
LOSSES = (
    "F.mse_loss({y}, t1)",
    "F.cross_entropy({y}, t2)",
    "({y} - t1).abs().mean()",
    "F.smooth_l1_loss({y}, t1) + 0.1 * sum(p.square().sum() for p in m.parameters())",
    "F.binary_cross_entropy_with_logits({y}, t1.sigmoid())",
)
# Between steps.
CHANGES = (
    "m[0].requires_grad_(False)",
    "m[0].requires_grad_(True)",
    "m.eval()",
    "m.train()",
    "o.param_groups[0]['lr'] = n1",
    "o.param_groups[0]['lr'] = 0.0",
    "o.param_groups[0]['lr'] = 1",
    "o.param_groups[0]['lr'] = torch.tensor(n1)",
    "next(m.parameters()).data = next(m.parameters()).data * n2",
    "next(m.parameters()).data.mul_(n2)",
    "with torch.no_grad(): next(m.parameters()).add_(n1)",
    # Moves memory, as it does on the device: what shared it with something else shares it no more.
    "m.to('cpu').to(D) if D != 'cpu' else m._apply(torch.clone)",
    "m.to(torch.float64).to(torch.float32)",
    "m.load_state_dict(copy.deepcopy(m.state_dict()))",
    "o.load_state_dict(copy.deepcopy(o.state_dict()))",
    "saved = copy.deepcopy(o.state_dict())",
    "o.load_state_dict(saved)",
    "o.load_state_dict(o.state_dict())",
    "o.state.clear()",
    "o.state.pop(next(m.parameters()), None)",
    "o.state[next(m.parameters())] = {}",
    "o.state = copy.copy(o.state)",
    "for held in o.state.values(): held.update({k: x.clone() for k, x in held.items() if torch.is_tensor(x)})",
    "for held in o.state.values(): [x.add_(1) for x in held.values() if torch.is_tensor(x)]",
    "for held in o.state.values(): held['step'] = held['step'] + 2",
    "o = type(o)(m.parameters(), 0.05, foreach=False)",
    "o = torch.optim.Adam(m.parameters(), 0.02, foreach=True)",
    "o = torch.optim.SGD(m.parameters(), 0.02, momentum=0.5, foreach=False)",
    "o = copy.deepcopy(o)",
    "o.param_groups[0]['weight_decay'] = n1",
    "o.param_groups[0]['betas'] = (0.5, 0.75)",
    "o.param_groups[0]['momentum'] = 0.25",
    "o.param_groups[0]['maximize'] = True",
    "o.param_groups[0]['amsgrad'] = True",
    "o.param_groups[0]['params'].pop()",
    "o.param_groups[0]['params'].reverse()",
    "o.param_groups[0] = dict(o.param_groups[0])",
    "o.add_param_group({'params': [nn.Parameter(torch.ones(2, device=D))], 'lr': 0.5})",
    "o.step()",
    "s.step()",
    "o.zero_grad()",
    "h = o.register_step_pre_hook(lambda *_: m.zero_grad())",
    "h = o.register_step_post_hook(lambda *_: o.param_groups[0].update(lr=n1))",
    "h.remove()",
    "m[-1] = copy.deepcopy(m[-1])",
    "m2 = copy.deepcopy(m)",
    "m2 = torch.optim.swa_utils.AveragedModel(m)",
    "m2.update_parameters(m)",
    "m[0].weight = nn.Parameter(m[0].weight * n1) if isinstance(m[0], nn.Linear) else m[0].weight",
    "m[0].bias = None",
    "h = m[-1].register_forward_hook(lambda module, given, made: made * n2)",
    "h = m[0].register_full_backward_hook(lambda module, before, after: None)",
    # Before any gradient is there: in which order they come is not promised.
    "h = m[-1].register_full_backward_pre_hook(lambda module, grads: [][1])",
    "h = m[-1].register_forward_pre_hook(lambda module, given: [][1])",
    "m.apply(lambda module: nn.init.ones_(module.bias) if isinstance(module, nn.Linear) and module.bias is not None "
    "else None)",
    "nn.utils.prune.l1_unstructured(m[0], 'weight', 0.5) if isinstance(m[0], nn.Linear) else None",
    "m.to(memory_format=torch.channels_last)",
    "m.half().float()",
    "[p.grad.mul_(n2) for p in m.parameters() if p.grad is not None]",
    "torch.set_default_dtype(torch.float64)",
    "torch.use_deterministic_algorithms(True, warn_only=True)",
    "o.register_state_dict_pre_hook(lambda optimizer: None)",
    "o.load_state_dict(pickle.loads(pickle.dumps(o.state_dict())))",
    "F.mse_loss(m(t0), t1).backward()",
    "t0 = t0 * n1",
    "t0.mul_(n1)",
    "t1 = t1[:, :]",
    "t0, t1, t2 = t0[:2], t1[:2], t2[:2]",
    "sync()",
    "sync(wait=True)",
    "read([p.sum() for p in m.parameters()])",
    "read(next(m.parameters()).flatten()[0].item())",
    "read([p.grad for p in m.parameters()])",
    "for p in m.parameters(): p.grad = None",
    "h = next(m.parameters()).register_hook(lambda grad: grad * n1)",
    "torch.manual_seed(3)",
    "torch.nn.utils.parametrizations.weight_norm(m[0]) if isinstance(m[0], nn.Linear) else None",
    "m.zero_grad(set_to_none=False)",
    "t9 = F.linear(t0, next(m.parameters()))",
    "del t9",
    "raise ValueError('in the middle')",
)


def _fill(choose: random.Random, template: str, **given: Any) -> str:
    flags = {key: choose.choice(("True", "False")) for key in "bc"}
    return template.format(**flags, **given)


def _model(choose: random.Random) -> list[str]:
    """Statements that make a model `m`, data `t0`, targets `t1` and `t2`, an optimizer `o` and a schedule `s`."""
    widths = [4, *(choose.choice((3, 4, 6)) for _ in range(choose.randint(0, 2))), 3]
    layers = [choose.choice(LAYERS).format(i=i, o=o) for i, o in pairwise(widths)]
    parameters = choose.choice(("m.parameters()", "[p for p in m.parameters()]", "[{'params': list(m.parameters())}]"))
    optimizer = _fill(choose, choose.choice(OPTIMIZERS), p=parameters)
    return [
        f"m = nn.Sequential({', '.join(layers)}).to(D); torch.manual_seed(7)",
        "t0 = torch.linspace(-1, 1, 4 * A, device=D).view(A, 4).sin()",
        "t1 = torch.linspace(0, 1, 3 * A, device=D).view(A, 3)",
        "t2 = torch.arange(A, device=D) % 3",
        f"o = {optimizer}",
        f"s = {choose.choice(SCHEDULES)}",
    ]


def _body(choose: random.Random, returns: bool) -> list[str]:
    """The lines of a step."""
    loss = choose.choice(LOSSES).format(y="m(t0)")
    lines = [choose.choice(("o.zero_grad()", "o.zero_grad(set_to_none=False)"))]
    if choose.random() < 0.2:
        lines += [f"with torch.autocast(D, dtype=torch.bfloat16): loss = {loss}"]
    else:
        lines += [f"loss = {loss}"]
    if choose.random() < 0.15:
        lines += ["loss.backward(retain_graph=True)", "loss.backward()"]
    else:
        lines += [choose.choice(("loss.backward()", "(loss * n0).backward()"))]
    if choose.random() < 0.3:
        lines += [
            choose.choice(
                ("nn.utils.clip_grad_norm_(m.parameters(), 0.5)", "nn.utils.clip_grad_value_(m.parameters(), 0.1)")
            )
        ]
    lines += ["o.step()"]
    if returns:
        return [*lines, "return loss.detach()"]
    if choose.random() < 0.6:
        lines += ["s.step()"]
    if choose.random() < 0.4:
        lines += [choose.choice(("read(loss.item())", "read(loss)", "t8 = loss.detach()"))]
    return lines


def _variants(choose: random.Random, executions: int) -> tuple[dict[str, Any], ...]:
    made = []
    first = {"n0": 0.1, "n1": 0.05, "n2": 0.5, "k0": 2, "k1": 1, "A": choose.choice((1, 2, 4, 5))}
    for place in range(executions):
        other = {"n0": 0.2, "n1": 0.01, "n2": 2.0, "k0": 2, "k1": 0, "A": choose.choice((2, 3, first["A"]))}
        made.append(first if place < 2 or choose.random() < 0.5 else other)
    return tuple(made)


def training(seed: int, executions: int) -> Program:
    """Steps of a training, with changes between them."""
    choose = random.Random(f"training-{seed}")
    statements = _model(choose)
    body = _body(choose, returns=False)
    loop = "for _ in range({count}):\n" + "\n".join(f"    {line}" for line in body)
    statements.append(loop.format(count=choose.randint(1, 4)))
    for _ in range(choose.randint(0, 5)):
        statements.append(choose.choice(CHANGES))
        if choose.random() < 0.6:
            statements.append(loop.format(count=choose.randint(1, 3)))
    return Program(f"training-{seed}", seed, tuple(statements), _variants(choose, min(executions, 3)))


FUNCTIONS = (
    "def f(a, b, c=1.5):\n    return (a * w + b).sum()",
    "def f(a, b, c=1.5):\n    return torch.relu(a @ w.t()) + n1, b * 2",
    "def f(a, b, c=1.5):\n    a.add_(n1)\n    return a * b",
    "def f(a, b, c=1.5):\n    return a * c + b / (c + 1)",
    "def f(a, b, c=1.5):\n    return a.clamp(-c, c), (b * w).add(a.mean(), alpha=c)",
    "def f(a, b, c=1.5):\n    return a * w.mean() if c > 0 else b - c",
    "def f(a, b, c=1.5):\n    c = F.dropout(a, 0.5)\n    return c, c.sum(0), b.view(-1)",
    "def f(a, b, c=1.5):\n    w.mul_(n2)\n    return (a - b).softmax(-1) * w.mean()",
    "def f(a, b, c=1.5):\n    with torch.no_grad():\n        w[0] = b.sum()\n    return a[..., :2] + w.sum()",
    "def f(a, b, c=1.5):\n    return a.t().contiguous() * n0, b[0]",
    "def f(a, b, c=1.5):\n    c = torch.randn(3, device=D)\n    return a + c.sum(), c",
    "def f(a, b, c=1.5):\n    d = (a * w.mean()).sum()\n    if d.requires_grad: d.backward()\n    return d.detach()",
    "def f(a, b, c=1.5):\n    return torch.cat([a, b]), a.sum().item()",
    "def f(a, b, c=1.5):\n    d = a * c\n    if c <= 0: raise ValueError('in the middle')\n    return d + b",
    "def f(a, b, c=1.5):\n    b.view(-1)[0] = c\n    return a + b, {'sum': b.sum(), 'all': [a, c]}",
    "def f(a, b, c=1.5):\n    with torch.autocast(D, dtype=torch.bfloat16):\n        return (a @ w.t()) * c",
    "def f(a, b, c=1.5):\n    def inner(d):\n        return d * w.sum() + c\n    return inner(a), inner(b)",
    "def f(a, b, c=1.5):\n    return torch.where(a > c, a, b * n0), a.expand(2, *a.shape)",
    "def f(a, b, c=1.5):\n    return F.layer_norm(a, a.shape[-1:]) * k0, a.new_zeros(a.shape[0], k1 + 1)",
    "def f(a, b, c=1.5):\n    torch.add(a, b, alpha=c, out=b)\n    return b * 2",
    "def f(a, b, c=1.5):\n    return (a.double() * c).to(a.dtype), Doubled.apply(b)",
)
CALLS = (
    "t5 = f(t0, t1)",
    "t5 = f(t0, t1)",
    "t5 = f(t0, t1)",
    "t6 = f(t1, t0)",
    "t5 = f(t0 * n0, t1)",
    "t5 = f(t0, t1, n1)",
    "for c in (0.5, 0.5, n2, -0.0, 0.0, n1): t5 = f(t0, t1, c)",
    "for c in (0.0, 0.0, 0.0, -0.0, 2, 2, float('inf')): t5 = f(t0, t1, c=c)",
    "t5 = f(t0, t1[:, :])",
    "for _ in range(4): t5 = f(t0, t1)",
    "for _ in range(3): t0 = t0 + 1; t5 = f(t0, t1)",
    "t5 = f(t0, t0)",
    "t5 = f(t0, t0.view(A, 3))",
    "t5 = f(t0.double(), t1)",
    "t5 = f(t0[:1].expand(A, 3), t1)",
    "t5 = f(t0.t().clone().t(), t1)",
    "t5 = f(t0[:1], t1[:1])",
    "t5 = f(t0[:0], t1[:0])",
    "k0 = k0 + 1",
    "k1 = 2",
    "w.requires_grad_(not w.requires_grad)",
    "w[0].zero_() if not w.requires_grad else None",
    "w = nn.Parameter(w.detach() + 1, requires_grad=w.requires_grad)",
    "w = w.t().contiguous().t()",
    "torch.set_default_dtype(torch.float64)",
    "with torch.autocast(D, dtype=torch.bfloat16): t5 = f(t0, t1)",
    "with torch.no_grad(): t5 = f(t0, t1)",
    "t8 = t5[0].add_(1) if isinstance(t5, tuple) else t5.add_(1)",
    "raise KeyError('in the middle')",
    "w = w * 2",
    "w.data = w.data + 1",
    "w = w.detach().requires_grad_()",
    "w.grad = None",
    "w.mul_(2) if not w.requires_grad else None",
    "n1 = n1 + 1",
    "n2 = 3.0",
    "t0 = t0.double().float()",
    "t0 = t0.t().contiguous().t()",
    "t0, t1 = t1, t0",
    "read(t5)",
    "read(w)",
    "t7 = t0.view(-1)",
    "t7.add_(1)",
    "sync()",
    "torch.manual_seed(4)",
    "torch.set_grad_enabled(False)",
    "torch.set_grad_enabled(True)",
    "del t5",
    "with torch.inference_mode(): t6 = f(t0.clone(), t1)",
)


def replayed(seed: int, executions: int) -> Program:
    """Calls of a function under jit, with what it uses rebound between them."""
    choose = random.Random(f"jit-{seed}")
    if choose.random() < 0.5:
        statements = _model(choose)
        body = _body(choose, returns=True)
        statements += ["def step():\n" + "\n".join(f"    {line}" for line in body), "step = jit(step)"]
        calls: tuple[str, ...] = (*("for _ in range(4): t8 = step()",) * 12, *("t8 = step()",) * 4, *CHANGES)
    else:
        function = choose.choice(FUNCTIONS)
        # What a replay returns has no graph: only functions that return none take part in autograd.
        trains = "backward" in function and choose.random() < 0.7
        statements = [
            "torch.manual_seed(7)",
            "t0 = torch.linspace(-1, 1, 3 * A, device=D).view(A, 3)",
            "t1 = torch.linspace(0, 2, 3 * A, device=D).view(A, 3).cos()",
            f"w = torch.ones(3, 3, device=D, requires_grad={trains})",
            function,
            "f = jit(f)",
        ]
        calls = CALLS if trains else tuple(call for call in CALLS if "requires_grad_" not in call)
    statements += [choose.choice(calls) for _ in range(choose.randint(4, 12))]
    return Program(f"jit-{seed}", seed, tuple(statements), _variants(choose, min(executions, 2)))
