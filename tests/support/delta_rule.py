"""The gated delta rule token by token in float64, and inputs for it."""

import torch

from onpolicy.ops.recurrence import RecurrentLayout


def exact_rule(q, k, v, g, beta, eps=1e-6):
    """One sequence: q, k [T, H_k, D], v [T, H_v, D_v], g, beta [T, H_v] -> float64 [T, H_v, D_v]."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    group = v.shape[1] // k.shape[1]
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps) for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    state, out = q.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        predicted = (state * k[t][..., None]).sum(1)
        state = state + k[t][..., None] * ((v[t] - predicted) * beta[t][:, None])[:, None]
        out.append((state * q[t][..., None]).sum(1))
    return torch.stack(out)


def delta_inputs(tokens, seed=0, sizes=(2, 4, 16, 24), dtype=torch.float32, decay=0.3):
    """q, k, v, g and beta of `tokens` tokens; sizes: key heads, value heads, D, D_v."""
    generator = torch.Generator().manual_seed(seed)
    keys, values, dim, value_dim = sizes
    q, k, v = (
        torch.randn(tokens, *size, generator=generator).to(dtype)
        for size in ((keys, dim), (keys, dim), (values, value_dim))
    )
    g, beta = torch.rand(2, tokens, values, generator=generator)
    return [q, k, v, -decay * g, beta.to(dtype)]


def rows_of(inputs, first, count):
    return [x[first : first + count] for x in inputs]


def packed(*lens):
    return RecurrentLayout.packed(tuple(lens))


def extension(counts, past, slots):
    """The layout of new tokens after others whose states are in `slots`."""
    return RecurrentLayout(
        query_lens=tuple(counts), past_lens=tuple(past), slots=torch.tensor(list(slots))
    )
