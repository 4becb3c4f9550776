"""The statements that random programs are made of, by kind, with places for names and numbers.

`{x}` any tensor, `{f}` a floating one, `{y}`, `{g}` others that broadcast with it, `{s}` one of its shape, `{m}` one to
multiply it with, `{b}` a mask; `{n}`, `{o}` numbers, `{k}` a small integer, `{d}`, `{e}` dimensions, `{i}` an
index; `{dt}` a dtype, `{size}` a shape, `{view}` a view of what stands before it, `{t}` a new tensor.
"""

from __future__ import annotations

import random

DTYPES = (
    "torch.float32", "torch.float32", "torch.float64", "torch.int64", "torch.int32", "torch.bool", "torch.float16",
    "torch.bfloat16", "torch.uint8", "torch.complex64", "torch.int8",
)  # fmt: skip

CREATION = """
torch.randn({size}, device=D)
torch.randn({size}, device=D)
torch.randn({size}, device=D, requires_grad=True)
torch.linspace(-2, 2, 24).view(4, 3, 2).mul(1).to(D)
(torch.ones({size}) * {n}).to(D)
torch.randn({size}, device=D).to(memory_format=torch.channels_last)
torch.rand({size}, device=D, dtype=torch.float64)
torch.arange(24., device=D).view(2, 3, 4)
torch.arange(12, device=D).view(3, 4)
torch.linspace(-1, 1, 6, device=D)
torch.zeros({size}, device=D, dtype={dt})
torch.ones({size}, device=D, dtype={dt})
torch.full({size}, {n}, device=D)
torch.full((), {n}, device=D)
torch.tensor([[1, -2], [3, 4]], device=D)
torch.tensor({n}, device=D)
torch.tensor([True, False, True], device=D)
torch.eye(3, device=D)
torch.randint(0, 5, {size}, device=D)
torch.randint(0, 2, {size}, device=D).bool()
torch.empty({size}, device=D).fill_({n})
torch.empty({size}, device=D, memory_format=torch.contiguous_format).zero_()
torch.empty_strided((2, 3), (1, 2), device=D).fill_({n})
torch.zeros_like({x})
torch.ones_like({x}, dtype={dt})
torch.full_like({x}, {n})
{x}.new_zeros({size})
{x}.new_full({size}, {k})
{x}.new_tensor([1.5, 2])
nn.Parameter(torch.randn({size}, device=D))
torch.randn({size}, device=D, dtype=torch.complex64)
"""

POINTWISE = """
torch.sin({x})
{f}.tanh()
{f}.sigmoid()
torch.exp({x})
torch.sqrt({x}.abs())
torch.log1p({x}.abs())
torch.reciprocal({x})
torch.rsqrt({f})
torch.erf({f})
{x}.neg()
{x}.abs()
torch.sign({x})
torch.floor({f})
torch.round({f})
torch.frac({f})
torch.relu({x})
F.gelu({f})
F.silu({f})
F.softplus({f})
F.leaky_relu({f}, 0.1)
F.hardtanh({f})
F.elu({f})
{x} + {y}
{x} - {y}
{x} * {y}
{x} / {y}
{x} // {y}
{x} % {y}
{x} ** 2
{x} ** {n}
{n} - {x}
{n} / {x}
{n} ** {x}
{x} + {n}
{x} * {n}
{x} > {y}
{x} == {y}
{x} <= {n}
{x} & {y}
~{b}
{x} ^ {y}
torch.maximum({x}, {y})
torch.minimum({x}, {y})
torch.where({b}, {x}, {y})
torch.where({x} > {n}, {x}, {n})
torch.where({x} > 0, {x}, {y})
torch.clamp({x}, {n}, {o})
torch.clamp({x}, min={n})
torch.clamp({x}, max={y})
torch.add({x}, {y}, alpha=2)
torch.sub({x}, {y}, alpha={n})
torch.addcmul({x}, {y}, {y}, value={n})
torch.addcdiv({f}, {g}, {g}, value=0.5)
torch.lerp({f}, {g}, {n})
torch.atan2({f}, {g})
torch.hypot({f}, {g})
torch.fmod({x}, {n})
torch.remainder({x}, 3)
torch.copysign({f}, {g})
torch.logaddexp({f}, {g})
torch.heaviside({f}, {g})
torch.nan_to_num({x})
torch.isnan({x})
torch.isfinite({x})
torch.logical_not({x})
torch.logical_and({x}, {y})
{x}.to({dt})
{x}.to({dt}).to(torch.float32)
{x}.float()
{x}.double()
{x}.type_as({y})
{x}.clone()
{x}.contiguous()
{x}.masked_fill({b}, {n})
{x}.masked_fill({x} > 0, {n})
torch.result_type({x}, {y}) and {x} + {y}
torch.angle({x})
{x}.conj()
{x}.conj() * {y}
torch.view_as_real({x})
torch.threshold({f}, 0.1, {n})
torch.polygamma(1, {f})
torch.lgamma({f})
F.mse_loss({f}, {s})
F.smooth_l1_loss({f}, {s})
F.binary_cross_entropy_with_logits({f}, {f}.sigmoid())
torch.special.xlogy({f}, {g})
torch.ldexp({f}, {y})
torch.bitwise_not({x})
torch.square({x})
torch.float_power({x}, {n})
torch.gcd({x}, {y})
"""

REDUCTION = """
{x}.sum()
{x}.sum({d})
{x}.sum({d}, keepdim=True)
{x}.sum(dtype=torch.float64)
{f}.mean()
{f}.mean({d})
{f}.var({d})
{f}.std({d}, keepdim=True)
{x}.prod()
{x}.amax({d})
{x}.amin()
{x}.max()
{x}.max({d}).values
{x}.max({d})[1]
{x}.min({d}, keepdim=True)[0]
{x}.argmax({d})
{x}.argmin()
{x}.any()
{x}.all({d})
{f}.norm()
torch.linalg.vector_norm({f}, dim={d})
{f}.logsumexp({d})
{x}.cumsum({d})
{x}.cumprod({d})
{f}.softmax({d})
F.log_softmax({f}, {d})
{x}.sort({d})[0]
{x}.sort({d}, stable=True)[1]
{x}.argsort({d})
{x}.topk(1, {d})[0]
{x}.median()
{f}.nansum({d})
torch.count_nonzero({x})
torch.aminmax({x})[1]
torch.std_mean({f}, {d})[1]
torch.cummax({x}, {d})[0]
torch.logcumsumexp({f}, {d})
torch.trace({x})
torch.diff({x}, dim={d})
torch.bucketize({f}, torch.tensor([-1., 0., 1.], device=D))
torch.histc({f}.float(), 4)
F.cross_entropy({f}, {f}.argmax(1))
F.nll_loss({f}, {f}.argmax(1))
F.normalize({f}, dim={d})
torch.cdist({f}, {f})
"""

MATMUL = """
{f} @ {m}
{f} @ {f}.t()
{f} @ {f}.mT
torch.mm({f}, {m})
torch.bmm({f}, {f}.transpose(1, 2))
torch.matmul({f}, {m})
torch.addmm({g}, {f}, {m})
torch.addmm({g}, {f}, {m}, beta={n}, alpha={o})
F.linear({f}, {m})
F.linear({f}, torch.ones(3, {f}.size(-1), device=D), torch.ones(3, device=D))
torch.outer({f}.flatten(), {f}.flatten())
torch.dot({f}.flatten(), {f}.flatten())
torch.mv({f}, {f}[0])
torch.einsum("ij,kj->ik", {f}, {f})
torch.einsum("...i,...i->...", {f}, {f})
torch.baddbmm({g}, {f}, {f}.mT)
torch.tensordot({f}, {f}, dims=1)
torch.kron({f}, {f})
torch.linalg.det({f} @ {f}.mT)
torch.linalg.inv({f} @ {f}.mT + torch.eye({f}.size(-2), device=D))
torch.linalg.cholesky({f} @ {f}.mT + 2 * torch.eye({f}.size(-2), device=D))
torch.linalg.qr({f})[1]
torch.linalg.svdvals({f})
torch.linalg.solve({f} @ {f}.mT + 2 * torch.eye({f}.size(-2), device=D), {f})
torch.linalg.eigvalsh({f} @ {f}.mT)
torch.fft.fft({f}).abs()
torch.fft.irfft(torch.fft.rfft({f}, dim={d}), dim={d})
torch.cross({f}, {s}, dim={d})
torch.bilinear({f}, {f}, torch.ones(2, {f}.size(-1), {f}.size(-1), device=D), None)
"""

LAYER = """
F.conv1d({f}.reshape(1, 1, -1), torch.ones(2, 1, 2, device=D))
F.conv2d({f}.reshape(1, 1, -1, 2), torch.ones(3, 1, 1, 2, device=D), torch.ones(3, device=D))
F.conv2d({f}.reshape(1, 1, -1, 2).to(memory_format=torch.channels_last), torch.ones(3, 1, 1, 2, device=D))
F.conv2d({f}, torch.ones(2, {f}.size(1), 1, 1, device=D), padding=1)
F.conv2d({f}, torch.ones({f}.size(1), 1, 2, 2, device=D), padding=1, groups={f}.size(1))
F.conv_transpose2d({f}, torch.ones({f}.size(1), 2, 2, 2, device=D))
F.max_pool2d({f}, 2)
F.max_pool2d({f}, 2, return_indices=True)[1]
F.avg_pool2d({f}, 2, padding=1)
F.adaptive_avg_pool2d({f}, 1)
F.max_pool1d({f}, 2)
F.interpolate({f}, scale_factor=2)
F.interpolate({f}, size=(3, 3), mode="bilinear")
F.pad({f}, (1, 1))
F.pad({f}, (1, 0), mode="reflect")
F.pad({f}, (1, -1), value={n})
F.layer_norm({f}, {f}.shape[-1:])
F.layer_norm({f}, {f}.shape[-1:], torch.ones({f}.size(-1), device=D), torch.zeros({f}.size(-1), device=D))
F.batch_norm({f}, None, None, training=True)
F.batch_norm({f}, torch.zeros({f}.size(1), device=D), torch.ones({f}.size(1), device=D))
F.group_norm({f}, 1)
F.instance_norm({f})
F.rms_norm({f}, {f}.shape[-1:])
F.local_response_norm({f}, 2)
F.embedding(torch.tensor([0, 1, 0], device=D), {f})
F.embedding_bag(torch.tensor([[0, 1], [0, 0]], device=D), {f})
F.one_hot({x}.abs() % 3, 3)
F.scaled_dot_product_attention({f}, {f}, {f})
F.scaled_dot_product_attention({f}, {f}, {f}, is_causal=True)
F.scaled_dot_product_attention({f}, {f}, {f}, attn_mask={f} @ {f}.mT > 0)
F.unfold({f}, 2)
F.pixel_shuffle({f}, 2)
F.glu({f}, {d})
F.cosine_similarity({f}, {s}, dim={d})
F.kl_div(F.log_softmax({f}, {d}), {f}.softmax({d}), reduction="sum")
F.prelu({f}, torch.full((1,), 0.2, device=D))
recurrent("rnn_relu", {f})
recurrent("gru", {f}, True)
recurrent("lstm", {f})
recurrent("lstm", {f}.double(), True)
F.conv3d({f}.reshape(1, 1, 1, -1, 2), torch.ones(2, 1, 1, 1, 2, device=D))
F.conv3d({f}.reshape(1, 1, 1, -1, 2).to(memory_format=torch.channels_last_3d), torch.ones(2, 1, 1, 1, 1, device=D))
F.avg_pool3d({f}.reshape(1, 1, -1, 2, 1).expand(1, 1, -1, 2, 2), 2)
F.fold({f}.reshape(1, -1, 4), (2, 2), 1)
nn.TransformerEncoderLayer(2, 1, 4, 0.0, device=D)({f}.reshape(-1, 1, 2))
nn.MultiheadAttention(2, 2, device=D)(*[{f}.reshape(-1, 1, 2)] * 3)[0]
F.triplet_margin_loss({f}, {s}, {s} * {n})
F.grid_sample({f}, torch.zeros({f}.size(0), 2, 2, 2, device=D), align_corners=False)
"""

VIEW = """
{x}.t()
{x}.mT
{x}.transpose({d}, {e})
{x}.permute(*reversed(range({x}.dim())))
{x}.view(-1)
{x}.view({size})
{x}.reshape(-1)
{x}.reshape({size})
{x}.flatten()
{x}.unsqueeze({d})
{x}.squeeze()
{x}.squeeze({d})
{x}.select({d}, {k})
{x}.narrow({d}, 0, {k})
{x}[{i}]
{x}[{i}]
{x}[{i}][{k}]
{x}[{k}]
{x}[..., 0]
{x}.expand(2, *{x}.shape)
{x}.unsqueeze(-1).expand(*{x}.shape, 3)
{x}.expand_as({y})
torch.broadcast_to({x}, {size})
{x}.diagonal()
{x}.unfold({d}, 2, 1)
{x}.as_strided({shape}, {strides})
{x}.as_strided((2, 2), (1, 1))
{x}.as_strided((2,), (1,), {k})
{x}.chunk(2, {d})[0]
{x}.chunk(2, {d})[-1]
{x}.split(1, {d})[0]
{x}.unbind({d})[-1]
{x}.movedim(0, -1)
{x}.swapaxes(0, -1)
{x}.detach()
{x}.data
{x}.view_as({s})
{x}.view(torch.int32)
{x}.view(torch.uint8)
{x}.real
{x}.imag
{x}.view({x}.shape)
{x}.unflatten({d}, (1, -1))
{x}.tile(2)
{x}.ravel()
{x}.requires_grad_() if {x}.is_floating_point() and {x}.is_leaf else {x}
torch.atleast_2d({x})
torch.narrow_copy({x}, {d}, 0, 1)
{x}.contiguous().view(-1)
{x}.to(memory_format=torch.channels_last)
{x}.contiguous(memory_format=torch.channels_last)
torch.view_as_complex({f}.reshape(-1, 2))
"""

INDEXING = """
torch.cat([{x}, {x}], {d})
torch.cat([{x}, {y}], {d})
torch.stack([{x}, {s}], {d})
torch.stack([{x}, {x}])
{x}.index_select({d}, torch.tensor([0, 0], device=D))
{x}.gather({d}, torch.zeros_like({x}, dtype=torch.int64))
torch.take({x}, torch.tensor([0, 0], device=D))
{x}.flip({d})
{x}.roll(1, {d})
{x}.repeat(2, *[1] * {x}.dim())
{x}.repeat_interleave(2, {d})
{x}.tril()
{x}.triu(1)
torch.diag({x})
torch.diag_embed({x})
torch.rot90({x})
{x}.scatter({d}, torch.zeros_like({x}, dtype=torch.int64), {n})
{x}.scatter_add({d}, torch.zeros_like({x}, dtype=torch.int64), {x})
{x}.index_add({d}, torch.tensor([0], device=D), {x}.narrow({d}, 0, 1))
{x}.index_fill({d}, torch.tensor([0], device=D), {n})
{x}.masked_scatter({x} > 0, {x})
torch.slice_scatter({x}, {x}.narrow({d}, 0, 1), {d}, 0, 1)
torch.select_scatter({x}, {x}.select({d}, 0), {d}, 0)
torch.meshgrid({x}.flatten(), {x}.flatten(), indexing="ij")[0]
torch.nonzero({x})
{x}[{x} > 0]
torch.unique({x})
torch.masked_select({x}, {b})
torch.searchsorted(torch.tensor([0., 1.], device=D), {f})
torch.bincount({x}.flatten().long().abs() % 5)
torch.combinations({x}.flatten()[:3])
torch.cartesian_prod({x}.flatten()[:2], {x}.flatten()[:2])
torch.block_diag({x}, {x})
torch.vander({x}.flatten())
torch.tril_indices(3, 3, device=D)
"""

RANDOM = """
torch.rand_like({f})
torch.randn_like({f})
F.dropout({f}, 0.5)
torch.bernoulli({f}.sigmoid())
torch.normal({f}, 1.0)
torch.randperm(5, device=D)
torch.multinomial(torch.ones(4, device=D), 2)
torch.poisson({f}.abs())
F.alpha_dropout({f}, 0.3, training=True)
F.dropout1d({f}.reshape(1, 1, -1), 0.5)
F.rrelu({f}, training=True)
F.gumbel_softmax({f}, dim={d})
"""

AUTOGRAD = """
torch.autograd.grad({f}.sum(), {g}, create_graph=True, allow_unused=True)[0]
torch.autograd.grad(({f} * {f}).sum(), {f}, create_graph=True)[0]
{f}.grad
torch.utils.checkpoint.checkpoint(torch.sin, {f}, use_reentrant=False)
torch.autograd.functional.jacobian(torch.sin, {f})
torch.func.grad(lambda v: (v * v).sum())({f})
torch.func.vmap(torch.sin)({x})
Doubled.apply({f})
torch.func.jvp(torch.sin, ({f}.nan_to_num(0, 1, -1),), ({f}.nan_to_num(0, 1, -1),))[1] + 0.0
torch.func.grad(lambda v: (v @ v.mT).square().sum())({f})
torch.func.grad(lambda v: F.scaled_dot_product_attention(v, v, v).sum())({f})
torch.func.grad(lambda v: F.linear(v, torch.ones(3, v.size(-1), device=D)).tanh().sum())({f})
torch.func.grad(lambda v: F.layer_norm(v, v.shape[-1:]).square().sum())({f})
torch.func.grad(lambda v: (v * {g}).softmax({d}).square().sum())({f})
torch.func.grad(lambda v: torch.func.grad(lambda w: (w ** 3).sum())(v).sum())({f})
torch.func.grad(lambda v: recurrent("rnn_tanh", v).sum())({f})
torch.func.grad(lambda v: recurrent("gru", v).square().sum())({f})
torch.func.grad(lambda v: recurrent("lstm", v).square().sum())({f})
torch.func.vmap(lambda v: (v * {n}).sum())({x})
torch.func.vmap(torch.func.grad(lambda v: (v * v).sum()))({f})
torch.func.vmap(lambda v: F.linear(v, torch.ones(3, v.size(-1), device=D)))({f})
torch.func.vmap(lambda v: v @ v.mT)({f})
torch.func.vjp(lambda v: v.cumsum({d}), {f})[1]({f})[0]
torch.func.jacrev(lambda v: v.sin().sum({d}))({f})
torch.func.jacfwd(lambda v: v.sin() * v)({f}.nan_to_num(0, 1, -1)) + 0.0
torch.func.hessian(lambda v: (v ** 3).sum())({f}.nan_to_num(0, 1, -1)) + 0.0
"""

IN_PLACE = """
{x}.mul_({n})
{x}.add_({y})
{x}.sub_({y}, alpha=2)
{x}.div_({n})
{x}.add_(1)
{f}.tanh_()
{f}.sigmoid_()
{x}.neg_()
{x}.relu_()
{x}.clamp_({n}, {o})
{x}.zero_()
{x}.fill_({n})
{x}.copy_({y})
{x}.pow_(2)
{x}[{i}] = {n}
{x}[{i}] = {y}
{x}[{i}] += 1
{x}[{i}].mul_({n})
{x}[{i}].copy_({y})
{x}[{x} > 0] = {n}
{x}[{b}] = {n}
{x}.view(-1)[0] = {n}
{x}.view(-1)[1:].add_({n})
{x}.t()[0].add_({y})
{x}.transpose({d}, {e}).mul_(2)
{x}.select({d}, 0).add_({n})
{x}.diagonal().zero_()
{x}.as_strided((2,), (1,), 1).add_({n})
{x}.masked_fill_({x} > {n}, {o})
{x}.index_fill_({d}, torch.tensor([0], device=D), {n})
{x}.index_add_({d}, torch.tensor([0], device=D), {x}.narrow({d}, 0, 1).clone())
{x}.index_copy_({d}, torch.tensor([0], device=D), {x}.narrow({d}, 0, 1).clone())
{x}.scatter_({d}, torch.zeros_like({x}, dtype=torch.int64), {n})
{x}.index_put_((torch.tensor([0, 0], device=D),), {x}.new_tensor(1), accumulate=True)
{x}.transpose_({d}, {e})
{x}.t_()
{x}.unsqueeze_({d})
{x}.squeeze_()
{x} += {y}
{x} *= {n}
{x} -= {x}
{x} /= 2
{f}.addcmul_({g}, {g}, value={n})
{f}.lerp_({g}, 0.25)
{f}.addmm_({m}, {m})
{f}.erfinv_()
{x}.cumsum_({d})
{x}.tril_()
{x}.real.mul_(2)
{x}.set_({y})
{x}.set_()
{x}.resize_(min(1, {x}.numel()))
{x}.as_strided_((2,), (1,))
{f}.detach_()
{x}.fill_diagonal_({n})
torch._foreach_add_([{f}, {g}], {n})
torch._foreach_mul_([{f}], [{g}])
torch._foreach_copy_([{f}], [{g}])
torch._foreach_add_([{f}, {g}, {f}], [{g}, {f}, {g}], alpha=2)
torch._foreach_sqrt_([{f}, {g}])
{x}.logical_not_()
{x}.eq_({y})
{x}.copy_(torch.arange({x}.numel()).view({x}.shape))
{x}.copy_({y}.clone().cpu())
{x}.swapdims_({d}, {e})
{x}.clamp_min_({y})
{f}.requires_grad_({bool})
F.relu({x}, inplace=True)
F.dropout({f}, 0.5, inplace=True)
{f}.normal_()
{f}.uniform_()
{f}.bernoulli_(0.5)
{f}.random_(0, 5)
{f}.exponential_()
nn.init.xavier_uniform_({f})
nn.init.orthogonal_({f})
"""

OUT = """
torch.add({x}, {y}, out={s})
torch.add({x} * 1, {y} * 1, out={s}{view})
torch.mul({x}, {y} * 1, out={x})
torch.sin({f}, out={s})
torch.sin({f} * 1, out={g}{view})
torch.cat([{x} + 0, {x} * 1], out={y}{view})
torch.mm({f} + 0, {m} * 1, out={g}{view})
torch.sum({x}.clone(), {d}, out={y}{view})
torch.sum({x} * 1, {d}, out={y})
torch.where({x} > 0, {x}, {y}, out={s})
torch.max({x}.clone(), {d}, out=({y}, {x}.argmax({d})))
torch.arange(3, out={x}{view})
torch.clamp({x} * 1, {n}, {o}, out={s}{view})
torch.stack([{x} + 0, {x} * 1], out={y})
torch.matmul({f} + 0, {m} * 1, out={g})
torch.randn(2, 2, out={x}{view})
torch.index_select({x} * 1, {d}, torch.tensor([0], device=D), out={y}{view})
torch.cumsum({x} * 1, {d}, out={s}{view})
torch.nonzero({x} * 1, out={y})
torch.zeros(2, 3, out={x})
torch.full((2,), {n}, out={x}{view})
torch.eye(2, out={x}{view})
torch.linspace(0, 1, 3, out={f})
torch.div({x}, {y}, out={s})
torch.norm({f} * 1, dim={d}, out={g}{view})
torch.bmm({f} * 1, {f}.mT * 1, out={g})
torch.sort({x}.clone(), {d}, out=({s}, {x}.argsort({d})))
"""

BACKWARD = """
{f}.sum().backward()
{f}.backward(torch.ones_like({f}))
({f} * {g}).sum().backward()
{f}.sum().backward(retain_graph=True)
({f} ** 2).sum().backward()
{f}.square().mean().backward(inputs=[{f}])
{f}.register_hook(lambda grad: grad * 2)
{f}.register_hook(lambda grad: read(grad))
{f}.register_hook(lambda grad: [][{k}])
{f}.sum().backward(create_graph=True)
Doubled.apply({f}).sum().backward()
Doubled.apply({f}).square().sum().backward(retain_graph=True)
{f}.register_post_accumulate_grad_hook(lambda leaf: leaf.grad.mul_(2))
{f}.retain_grad()
{f}.grad = None
{f}.grad = torch.ones_like({f})
{f}.grad.zero_()
{f}.requires_grad_()
{f}.grad.add_({n})
torch.autograd.backward([{f}.sum(), {g}.sum()])
torch.autograd.grad(torch.autograd.grad(({f} ** 3).sum(), {f}, create_graph=True)[0].sum(), {f})[0].sum().backward()
nn.utils.clip_grad_norm_([{f}], 0.5)
torch.optim.SGD([{f}], 0.1, foreach={bool}).step()
torch.optim.Adam([{f}], 0.1, foreach={bool}).step()
"""

STATE = """
del {x}
del {x}
{x}.data = {s}.data
{x}.data = {x}.data * 2
{x}.data = {s}.data.clone()
{x} = {s}
{x} = {x}.detach()
{x} = {x} * {n}
torch.set_grad_enabled(False)
torch.set_grad_enabled(True)
torch.set_default_dtype(torch.float64)
torch.set_default_dtype(torch.float32)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("medium")
torch.set_default_device(D)
torch.set_default_device(None)
torch.autograd.set_detect_anomaly(True)
{x} = copy.deepcopy({x}.detach())
{x} = copy.copy({x})
{x} = pickle.loads(pickle.dumps({x}.detach()))
{x} = ({x}.clone() if D == "cpu" else {x}.cpu()).to(D)
{x} = ({x}.double().clone() if D == "cpu" else {x}.cpu()).to(D, torch.float64)
torch.manual_seed({k})
torch.get_device_module(D).manual_seed({k}) if D != "cpu" else torch.manual_seed({k})
"""

READ = """
read({x})
read({x}.sum().item())
read({x}.tolist())
read(bool({x}.any()))
read(repr({x}.detach().cpu()))
read({x}.shape)
read({x}.is_contiguous())
read(({x}.stride(), {x}.storage_offset()))
read(float({x}.flatten()[0]))
read(torch.equal({x}, {s}))
read(torch.allclose({f}, {g}))
read({x}.cpu().clone().numpy().sum())
read(len({x}))
read(int({x}.max()))
read({x}.is_set_to({y}))
read(copy.deepcopy({x}.detach()))
read({x}.data_ptr() == {y}.data_ptr())
sync()
sync()
sync(wait=True)
"""

BLOCK = """
with torch.autocast(D, dtype=torch.bfloat16): {t} = {f} @ {m}
with torch.autocast(D, dtype=torch.bfloat16): {t} = F.linear({f}, {m}).softmax(-1).sum()
with torch.autocast(D, dtype=torch.bfloat16, enabled={bool}): {t} = torch.mm({f}, {m}) + {f}.sum()
with torch.no_grad(): {t} = {x} * {n}
with torch.no_grad(): {t} = recurrent("lstm", {f})
with torch.no_grad(): {f}.mul_({n})
with torch.no_grad(): {f}[{i}] = {n}
with torch.inference_mode(): {t} = {x} + {y}
with torch.inference_mode(): {t} = {x}.view(-1)
with torch.enable_grad(): {t} = {f} * 2
with torch.device(D): {t} = torch.ones(2, 3) * {n}
with torch.autograd.graph.saved_tensors_hooks(lambda held: held * 1, lambda held: held + 0): {t} = {f} * {f}
with torch.autograd.graph.save_on_cpu(): {t} = {f}.sin() * {f}
with torch.autograd.set_multithreading_enabled(False): {f}.sum().backward()
with torch.autograd.forward_ad.dual_level(): {t} = {f} * 2 + {n}
try:\\n    {x}.add_({n})\\n    raise KeyError\\nexcept KeyError: {t} = {x} * {n}
with torch.no_grad():\\n    {t} = {f} * {n}\\n    raise KeyError('in the middle')
with torch.autocast(D, dtype=torch.bfloat16):\\n    {t} = {f} @ {m}\\n    [][{k}]
with torch.random.fork_rng(devices=[]): {t} = {x} + 1
for _ in range(3): {x} = {x} + {n}
for _ in range(3): {x}.mul_({n})
for _ in range(2): {t} = {x}.sum() * {n}
if {x}.sum() > 0: {t} = {x} * 2
try: {t} = {x} @ {y} @ {x}\\nexcept RuntimeError: {t} = {x} * 1
"""

# Errors that only the data show: raised late by the device.
LATE = """
{f}[torch.tensor([0, 99], device=D)]
F.embedding(torch.tensor([0, 99], device=D), {f})
{f}.index_select(0, torch.tensor([77], device=D))
{f}.gather(0, torch.full_like({f}, 55, dtype=torch.int64))
torch.linalg.cholesky(-torch.eye(2, device=D))
F.nll_loss(torch.zeros(2, 3, device=D), torch.tensor([0, 9], device=D))
torch.take({f}, torch.tensor([999], device=D))
F.one_hot(torch.tensor([5], device=D), 3)
torch.linalg.inv(torch.zeros(2, 2, device=D))
"""


def _lines(text: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in text.strip().splitlines()]


# By kind: how often, and the templates.
KINDS: dict[str, tuple[float, list[str]]] = {
    "creation": (8, _lines(CREATION)),
    "pointwise": (18, _lines(POINTWISE)),
    "reduction": (6, _lines(REDUCTION)),
    "matmul": (5, _lines(MATMUL)),
    "layer": (4, _lines(LAYER)),
    "view": (16, _lines(VIEW)),
    "indexing": (5, _lines(INDEXING)),
    "random": (2, _lines(RANDOM)),
    "autograd": (2, _lines(AUTOGRAD)),
    "in_place": (18, _lines(IN_PLACE)),
    "out": (5, _lines(OUT)),
    "backward": (6, _lines(BACKWARD)),
    "state": (4, _lines(STATE)),
    "read": (6, _lines(READ)),
    "block": (3, _lines(BLOCK)),
    "late": (0.5, _lines(LATE)),
}
EXPRESSIONS = {
    "creation", "pointwise", "reduction", "matmul", "layer", "view", "indexing", "random", "autograd", "late",
}  # fmt: skip
# How often a statement that fails stays in the program, by kind: errors of shapes and dtypes, and those of `late`.
MAY_FAIL = {
    **dict.fromkeys(("pointwise", "reduction", "matmul", "layer", "view", "in_place", "out", "backward", "block"), 0.1),
    "late": 1.0,
}


def themes(choose: random.Random) -> tuple[list[str], list[float]]:
    """Kinds with their weights for one program: some kinds more than others, so that programs differ."""
    weights = {kind: weight for kind, (weight, _) in KINDS.items()}
    for kind in choose.sample(sorted(weights), 3):
        weights[kind] *= choose.choice((0.0, 3.0, 6.0)) if kind != "late" else 3.0
    return list(weights), list(weights.values())
