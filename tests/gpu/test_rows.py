"""Norms, softmaxes, activations, routing and sampling: every row, or element, by itself."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from onpolicy.ops.log_probs import token_log_probs
from tests.gpu.row_checks import Numbers, check_gradients, check_rows
from tests.support.heads import whole_head

EPS = 1e-6
HALF_ULP = 2**-8
"""Rounding error of one bfloat16 operation, relative."""

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid}


def exact_rms_norm(x, weight):
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS))


def exact_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


NORMS = {
    "rms_norm": (exact_rms_norm, 1, 0, {}),
    "rms_norm rounded last": (exact_rms_norm, 1, 1, {"round_last": True}),  # Gemma's, OLMo-2's
    "layer_norm": (exact_layer_norm, 2, 1, {}),
}
"""By name: the exact one, its number of parameters, what errors are relative to beside it, and flags."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NORMS)
def test_norms(operators, setting, tally, name, dtype):
    numbers, (exact, count, floor, flags) = Numbers(dtype, setting.device), NORMS[name]
    for size in setting.norm_sizes:
        parameters = (1 + numbers(size, seed=1, scale=0.3), numbers(size, seed=3))[:count]
        x, case = numbers(setting.row_counts[-1], size, seed=2, scale=3), f"{name} {size}"
        norm = partial(getattr(operators, name.split()[0]), eps=EPS, **flags)
        with torch.no_grad():
            got = norm(x, *parameters)
            rows = partial(lambda x, norm, p: norm(x, *p), norm=norm, p=parameters)
            check_rows(rows, x, setting.row_counts, tally, case)
            if exact is exact_rms_norm:  # as the norms of queries and keys are called
                by_head = norm(x.view(-1, 2, size), *parameters)
                tally.equal(by_head.view(x.shape), got, f"{case}, by head")
        want = exact(x.double(), *(p.double() for p in parameters))
        bound = (2 * torch.finfo(dtype).eps + 2**-18) * (floor + want.abs()) + 2**-40
        tally.close(got, want, bound, f"{case} against float64")
        tolerance = 4 * torch.finfo(dtype).eps + 2**-17
        check_gradients(norm, exact, [x[:300], *parameters], tally, case, tolerance)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_do_not_depend_on_the_number_of_elements(
    operators, setting, numbers, tally, name
):
    function, x = ACTIVATIONS[name], numbers(setting.row_counts[-1] * 33 + 7, scale=3)
    check_rows(lambda x: operators.elementwise(function, x), x, setting.row_counts, tally, name)
    bound = 2 * HALF_ULP * function(x.double()).abs() + 2**-20
    tally.close(operators.elementwise(function, x), function(x.double()), bound, name)


def test_gated_activation(operators, model, setting, numbers, tally):
    gate_up = numbers(setting.row_counts[-1], 2 * model.intermediate, scale=2)

    def gated(gate_up):  # halves of one tensor, as experts have them: rows lie apart in memory
        return operators.gated(F.silu, *gate_up.chunk(2, dim=-1))

    check_rows(gated, gate_up, setting.few_row_counts, tally, "gated")
    gate, up = gate_up.chunk(2, dim=-1)
    apart = operators.gated(F.silu, gate.contiguous(), up.contiguous())
    tally.equal(gated(gate_up), apart, "gated, halves of one tensor")
    exact = F.silu(gate.double()) * up.double()
    tally.close(apart, exact, 3 * HALF_ULP * exact.abs() + 2**-20, "gated against float64")
    check_gradients(
        lambda gate, up: operators.gated(F.silu, gate, up),
        lambda gate, up: F.silu(gate) * up,
        [gate[:64], up[:64]],
        tally,
        "gated",
        8 * HALF_ULP,
    )


def test_softmax_and_topk_of_the_router(operators, setting, numbers, tally):
    experts, k = 128, 8
    logits = numbers(setting.row_counts[-1], experts, scale=3)
    check_rows(operators.softmax, logits, setting.row_counts, tally, "softmax")
    got, exact = operators.softmax(logits), torch.softmax(logits.double(), -1)
    tally.close(got, exact, 2**-15 * exact, "softmax against float64")
    for part in (0, 1):
        check_rows(
            lambda x, part=part: operators.topk(operators.softmax(x), k)[part],
            logits,
            setting.row_counts,
            tally,
            f"topk {('values', 'indices')[part]}",
        )
    values, indices = operators.topk(got, k)
    tally.equal(values, got.gather(1, indices), "topk, values at the indices")
    tally.equal(values, got.sort(dim=-1, descending=True).values[:, :k], "topk, the largest first")
    check_gradients(
        lambda x: operators.softmax(x), lambda x: torch.softmax(x, -1), [logits[:64]], tally,
        "softmax", 8 * HALF_ULP,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_log_softmax_and_the_log_probabilities_of_tokens(operators, setting, tally, dtype):
    rows = setting.few_row_counts[-1]
    numbers = Numbers(dtype, setting.device)
    logits = numbers(rows, setting.vocab, scale=4)
    targets = numbers.order(setting.vocab)[torch.arange(rows) % setting.vocab]
    for temperature in (1.0, 0.7):
        t = torch.full((rows, 1), temperature, device=setting.device)
        case = f"log_softmax, temperature {temperature}"

        def log_softmax(x, t=t):
            return operators.log_softmax(x, t[: len(x)])

        check_rows(log_softmax, logits, setting.few_row_counts, tally, case)
        got, exact = log_softmax(logits), torch.log_softmax(logits.double() / temperature, -1)
        tally.close(got, exact, 2**-18 * (1 + exact.abs()), f"{case} against float64")
        chosen, entropy = operators.gather_log_probs(logits, t, targets)
        tally.equal(chosen, got.gather(1, targets[:, None])[:, 0], f"{case}, at the targets")
        exact_entropy = -(exact.exp() * exact).sum(-1)
        tally.close(entropy, exact_entropy, 2**-12 * (1 + exact_entropy), f"{case}, entropy")
        for m in setting.few_row_counts:
            part, _ = operators.gather_log_probs(logits[:m], t[:m], targets[:m])
            tally.equal(part, chosen[:m], f"{case}, at the targets of the first {m} rows")


def test_log_probabilities_straight_from_hidden_states(operators, setting, numbers, tally):
    """Check the trainer's chunks and the rollout's batches, and the gradients of the loss."""
    rows, hidden = setting.few_row_counts[-1], setting.norm_sizes[-1]
    x = numbers(rows, hidden, seed=1)
    weight = numbers(setting.vocab, hidden, seed=2, scale=2 * hidden**-0.5)
    targets = numbers.order(setting.vocab)[torch.arange(rows) % setting.vocab]
    temperature = torch.full((rows,), 0.7, device=setting.device)

    def score(x, weight):
        inputs = targets[: len(x)], temperature[: len(x)]
        return token_log_probs(whole_head(operators, weight), x, *inputs)[0]

    def exact(x, weight):
        every = torch.log_softmax(F.linear(x, weight) / 0.7, -1)
        return every.gather(1, targets[: len(x), None])[:, 0]

    with torch.no_grad():
        whole = score(x, weight)
        for m in setting.few_row_counts:
            tally.equal(score(x[:m], weight), whole[:m], f"{m} rows")
            logits = operators.linear(x[:m], weight)
            rollout = operators.log_softmax(logits, temperature[:m, None])
            chosen = rollout.gather(1, targets[:m, None])[:, 0]
            tally.equal(chosen, whole[:m], f"a decode step of {m} rows")
    check_gradients(score, exact, [x[:33], weight], tally, "token_log_probs", 8 * HALF_ULP)


def test_rotary_embedding(operators, setting, numbers, tally):
    rows, heads, kv_heads = setting.few_row_counts[-1], 8, 2
    for dim in setting.head_dims:
        q, k = numbers(1, heads, rows, dim, seed=1), numbers(1, kv_heads, rows, dim, seed=2)
        angles = torch.arange(rows, device=setting.device)[:, None] * torch.logspace(
            0, -4, dim // 2, device=setting.device
        )
        angles = torch.cat([angles, angles], -1)[None]
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        whole = operators.rotary(q, k, cos, sin)
        for part, stock in zip(whole, apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            tally.equal(part, stock, f"rotary {dim}, transformers' rounding")
        for m in setting.few_row_counts:
            got = operators.rotary(q[:, :, :m], k[:, :, :m], cos[:, :m], sin[:, :m])
            for part, all_rows in zip(got, whole, strict=True):
                tally.equal(part, all_rows[:, :, :m], f"rotary {dim}, first {m} rows")


def test_a_sample_depends_on_its_own_row_alone(operators, setting, tally):
    """Check that the drawn token is float64's, for uniform numbers that include the ends."""
    rows = setting.few_row_counts[-1]
    logits = Numbers(torch.float32, setting.device)(rows, setting.vocab, scale=4)
    t = torch.ones(rows, 1, device=setting.device)
    log_probs = operators.log_softmax(logits, t)
    uniform = torch.linspace(0, math.nextafter(1, 0), rows, dtype=torch.float64)
    uniform = uniform.to(setting.device)
    whole = operators.sample(log_probs, uniform)
    for m in setting.few_row_counts:
        tally.equal(operators.sample(log_probs[:m], uniform[:m]), whole[:m], f"first {m} rows")
        tally.equal(operators.sample(log_probs[-m:], uniform[-m:]), whole[-m:], f"last {m} rows")
    cumulative = log_probs.double().exp().cumsum(-1)
    got = cumulative.gather(1, whole[:, None])[:, 0]
    before = got - log_probs.double().exp().gather(1, whole[:, None])[:, 0]
    target = uniform * cumulative[:, -1]
    tally.close(
        torch.minimum(target - before, got - target).clamp(max=0), 0 * got, 1e-9, "interval"
    )


def test_what_torch_computes_between_the_operators(setting, numbers, tally):
    """Check torch's own residual additions, products, embeddings and the router's normalisation."""
    rows = setting.row_counts[-1]
    x, y = numbers(rows, 256, seed=1), numbers(rows, 256, seed=2)
    both = torch.cat([x, y], -1)
    check_rows(lambda z: z[:, :256] + z[:, 256:], both, setting.row_counts, tally, "residual")
    check_rows(lambda z: z[:, :256] * z[:, 256:], both, setting.row_counts, tally, "product")
    table, ids = numbers(997, 256, seed=3), torch.arange(rows, device=setting.device) * 31 % 997
    check_rows(lambda i: F.embedding(i, table), ids, setting.row_counts, tally, "embedding")
    chosen = torch.softmax(numbers(rows, 8, seed=4).float(), -1)
    check_rows(
        lambda w: w / w.sum(-1, keepdim=True), chosen, setting.row_counts, tally, "router weights"
    )
