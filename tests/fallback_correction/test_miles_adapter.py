"""fallback_correction.adapters.miles against Miles' documented formulas, written out token by token."""

import dataclasses
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fallback_correction.adapters import miles
from fallback_correction.correction import correct
from fallback_correction.tokens import TokenBatch

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")

YAML = {
    "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token",
    "tis_mode": "truncate", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_lower_bound": None,
    "rs_upper_bound": None, "rs_veto_threshold": 1.0e-4, "tis_batch_normalize": True,
}  # fmt: skip


def keys(**changed):
    return SimpleNamespace(**{**YAML, **changed})


# Multiples of 1/32: sums are exact in float32, so that no order of summation moves a value over a bound.
small = st.integers(-96, 0).map(lambda i: i / 32)
any_log_prob = st.one_of(small, st.integers(-120 * 32, 0).map(lambda i: i / 32))
token = st.tuples(any_log_prob, small, st.integers(0, 1)) | st.tuples(small, small, st.just(1))
sequences = st.lists(st.lists(token, min_size=1, max_size=6), max_size=5)

settings_of_tis = st.fixed_dictionaries({
    "tis_level": st.sampled_from(LEVELS),
    "tis_mode": st.sampled_from(MODES),
    "tis_lower_bound": st.sampled_from([None, 0.0, 0.3, 0.5]),
    "tis_upper_bound": st.sampled_from([1.25, 2.0, 5.0]),
    "use_rs": st.booleans(),
    "rs_level": st.sampled_from(LEVELS),
    "rs_lower_bound": st.sampled_from([None, 0.2]),
    "rs_upper_bound": st.sampled_from([None, 3.0]),
    "rs_veto_threshold": st.sampled_from([None, 1e-4, 0.1]),
    "tis_batch_normalize": st.booleans(),
})  # fmt: skip


def tensors(batch):
    """Lists of 1-D tensors of a list of sequences of (train, rollout, mask)."""
    columns = [
        [torch.tensor([t[i] for t in s], dtype=torch.float32) for s in batch] for i in range(3)
    ]
    return dict(zip(("train_log_probs", "rollout_log_probs", "loss_masks"), columns, strict=True))


def exp20(x):
    return math.exp(min(max(x, -20.0), 20.0))


def reference_ratios(sequence, level):
    r = [train - rollout for train, rollout, _ in sequence]
    total = sum(x for x, (_, _, m) in zip(r, sequence, strict=True) if m)
    if level == "token":
        return [exp20(x) for x in r]
    n = sum(m for _, _, m in sequence)
    return [exp20(total if level == "sequence" else total / max(n, 1))] * len(r)


def reference_ppl(sequence):
    """The mismatch metrics of one sequence, a list of one value a token each."""
    n = max(sum(m for _, _, m in sequence), 1)
    train = sum(a for a, _, m in sequence if m) / n
    rollout = sum(b for _, b, m in sequence if m) / n
    r = [a - b for a, b, _ in sequence]
    total = sum(x for x, (_, _, m) in zip(r, sequence, strict=True) if m)
    squares = sum(exp20(x) ** 2 for x, (_, _, m) in zip(r, sequence, strict=True) if m)
    whole = {
        "training_log_ppl": -train, "training_ppl": math.exp(-train),
        "rollout_log_ppl": -rollout, "rollout_ppl": math.exp(-rollout),
        "log_ppl_diff": rollout - train, "log_ppl_abs_diff": abs(rollout - train),
        "ppl_ratio": math.exp(rollout - train),
        "chi2_token": squares / n - 1, "chi2_seq": exp20(total) ** 2 - 1,
    }  # fmt: skip
    tokens = {"kl": [-x for x in r], "k3_kl": [math.exp(x) - x - 1 for x in r]}
    return tokens | {name: [value] * len(r) for name, value in whole.items()}


def reference_sequence(args, sequence):
    """Weights, mask and metrics of one sequence before normalisation."""
    lower = 1 / args.tis_upper_bound if args.tis_lower_bound is None else args.tis_lower_bound
    upper = args.tis_upper_bound
    raw = reference_ratios(sequence, args.tis_level)
    mask = [float(m) for _, _, m in sequence]
    low, high = [float(w < lower) for w in raw], [float(w > upper) for w in raw]
    metrics = {"tis_weight_before_bound": raw}
    if args.tis_mode == "truncate":
        weights = [min(w, upper) for w in raw]
        metrics["tis_truncate_fraction"] = high
    else:
        weights = [min(max(w, lower), upper) if args.tis_mode == "clip" else w for w in raw]
        metrics[f"tis_{args.tis_mode}_fraction_low"] = low
        metrics[f"tis_{args.tis_mode}_fraction_high"] = high
    weights = [w * m for w, m in zip(weights, mask, strict=True)]
    kept = list(mask)
    if args.tis_mode == "mask":
        kept = [k * (lower <= w <= upper) for k, w in zip(kept, raw, strict=True)]
    if args.use_rs:
        rs_lower = lower if args.rs_lower_bound is None else args.rs_lower_bound
        rs_upper = upper if args.rs_upper_bound is None else args.rs_upper_bound
        values = reference_ratios(sequence, args.rs_level)
        metrics["rs_mask_fraction_low"] = [float(v < rs_lower) for v in values]
        metrics["rs_mask_fraction_high"] = [float(v > rs_upper) for v in values]
        kept = [k * (rs_lower <= v <= rs_upper) for k, v in zip(kept, values, strict=True)]
        if args.rs_veto_threshold is not None:
            limit = math.log(args.rs_veto_threshold)
            bad = [float(m and a - b < limit) for a, b, m in sequence]
            kept = [k * (1 - max(bad)) for k in kept]
            metrics["rs_catastrophic_token_fraction"] = bad
            metrics["rs_catastrophic_seq_fraction"] = [max(bad)] * len(bad)
    metrics |= {"tis_weight_after_bound": weights, "is_ratio_mean_after_tis_rs": weights}
    return weights, kept, metrics


def reference_mean(args, batch, weights):
    counts = [sum(m for _, _, m in s) for s in batch]
    if args.tis_level == "token":
        return sum(sum(w) for w in weights) / max(sum(counts), 1)
    return sum(sum(w) / max(n, 1) for w, n in zip(weights, counts, strict=True)) / len(batch)


def reference(args, batch):
    """Miles' README, with what its code does where the README is silent."""
    parts = [reference_sequence(args, s) for s in batch]
    weights, masks = [w for w, _, _ in parts], [k for _, k, _ in parts]
    metrics = [reference_ppl(s) | m for s, (_, _, m) in zip(batch, parts, strict=True)]
    if args.tis_batch_normalize and batch:
        mean = reference_mean(args, batch, weights)
        mean = mean if mean > 1e-8 else 1.0
        weights = [[w / mean for w in ws] for ws in weights]
        for m, ws in zip(metrics, weights, strict=True):
            m["batch_norm_factor"] = [mean] * len(ws)
    for m, ws, s in zip(metrics, weights, batch, strict=True):
        inside = [w for w, (_, _, one) in zip(ws, s, strict=True) if one] or [0.0]
        m["is_ratio_mean_final"] = [sum(inside) / len(inside)] * len(ws)
        m["is_ratio_min_final"] = [min(inside)] * len(ws)
        m["is_ratio_max_final"] = [max(inside)] * len(ws)
    names = metrics[0] if metrics else {}
    return weights, masks, {name: [m[name] for m in metrics] for name in names}


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        # What overflows float32 is inf in Miles too.
        b = torch.tensor(b, dtype=torch.float64).float()
        torch.testing.assert_close(a.float(), b, rtol=1e-6, atol=1e-6)


@given(sequences, settings_of_tis)
@settings(max_examples=150)
def test_the_same_as_miles_for_ragged_batches(batch, changed):
    args = keys(**changed)
    if args.tis_level == "geometric":
        args.tis_batch_normalize = False
    weights, masks, metrics = miles.compute_mis_weights(args, **tensors(batch))
    expected_weights, expected_masks, expected_metrics = reference(args, batch)
    assert_same(weights, expected_weights)
    assert_same(masks, expected_masks)
    assert not batch or metrics.keys() == expected_metrics.keys()
    for name, values in expected_metrics.items():
        assert_same(metrics[name], values)


BATCH = [
    [(-0.5, -1.0, 1), (-2.0, -1.0, 1), (-1.0, -1.0, 0), (-0.25, -1.5, 1)],
    [(-3.0, -3.0, 1)],
    [(-1.0, -2.0, 0), (-1.0, -0.5, 0)],
    [(-12.0, -0.5, 1), (-0.5, -0.25, 1)],
]


@pytest.mark.parametrize("mode", MODES)
def test_every_documented_metric_is_there_if_fixed_too(mode):
    _, _, metrics = miles.compute_mis_weights(keys(tis_mode=mode, mis_fixed=True), **tensors(BATCH))
    assert metrics.keys() == reference(keys(tis_mode=mode), BATCH)[2].keys()
    for values in metrics.values():
        assert [len(v) for v in values] == [len(s) for s in BATCH]


def hook(args, batch, pg_loss, **more):
    lengths = [len(s) for s in batch]
    return miles.compute_mis_weights_with_cp(
        args, pg_loss=pg_loss, **tensors(batch), total_lengths=[n + 3 for n in lengths],
        response_lengths=lengths, max_seq_lens=None, parallel_state=object(), **more,
    )  # fmt: skip


def test_the_hook_multiplies_the_loss_and_flattens_the_metrics():
    tokens = sum(map(len, BATCH))
    pg_loss = torch.arange(1.0, tokens + 1, requires_grad=True)
    loss, masks, metrics = hook(keys(), BATCH, pg_loss)
    weights, expected, plain = miles.compute_mis_weights(keys(), **tensors(BATCH))
    torch.testing.assert_close(loss, pg_loss * torch.cat(weights))
    assert all(torch.equal(a, b) for a, b in zip(masks, expected, strict=True))
    assert metrics.keys() == {f"mis_{name}" for name in plain}
    assert all(len(values) == tokens for values in metrics.values())
    loss.sum().backward()
    torch.testing.assert_close(pg_loss.grad, torch.cat(weights))


def test_without_tis_miles_changes_nothing_and_reports_the_mismatch():
    given_tensors = tensors(BATCH)
    weights, masks, metrics = miles.compute_mis_weights(keys(use_tis=False), **given_tensors)
    assert weights is None and masks is given_tensors["loss_masks"]
    assert metrics.keys() == reference_ppl(BATCH[0]).keys()
    pg_loss = torch.ones(sum(map(len, BATCH)))
    assert hook(keys(use_tis=False), BATCH, pg_loss)[0] is pg_loss


def test_nothing_outside_the_loss_mask_matters():
    inputs = tensors(BATCH)
    poisoned = tensors(BATCH)
    for x, m in zip(poisoned["train_log_probs"], poisoned["loss_masks"], strict=True):
        x[m == 0] = math.nan
    for fixed in (False, True):
        args = keys(tis_level="sequence", rs_level="geometric", mis_fixed=fixed)
        a, b = (miles.compute_mis_weights(args, **x) for x in (inputs, poisoned))
        assert all(map(torch.equal, a[0] + a[1], b[0] + b[1]))


@pytest.mark.parametrize("fixed", [False, True])
def test_no_sequence_at_all(fixed):
    weights, masks, _ = miles.compute_mis_weights(keys(mis_fixed=fixed), **tensors([]))
    assert weights == [] and masks == []
    loss, masks, _ = hook(keys(mis_fixed=fixed), [], torch.zeros(0))
    assert loss.shape == (0,) and masks == []


def test_a_batch_without_a_counting_token_has_weights_zero():
    batch = [[(-1.0, -2.0, 0)], [(-1.0, -2.0, 0)] * 3]
    for level, fixed in itertools.product(("token", "sequence"), (False, True)):
        args = keys(tis_level=level, mis_fixed=fixed)
        weights, masks, metrics = miles.compute_mis_weights(args, **tensors(batch))
        assert not torch.cat(weights + masks).any()
        assert torch.cat(metrics["batch_norm_factor"]).eq(1).all()


def test_a_mask_of_another_length_is_refused_with_the_way_out():
    inputs = tensors(BATCH)
    inputs["loss_masks"] = [torch.ones(9) for _ in BATCH]
    with pytest.raises(ValueError, match=r"loss_masks=\(9,\).*sequence 0: .*context_shard"):
        miles.compute_mis_weights(keys(), **inputs)
    inputs["loss_masks"] = tensors(BATCH)["loss_masks"][:-1]
    with pytest.raises(ValueError, match=r"loss_masks=None.*sequence 3: "):
        miles.compute_mis_weights(keys(), **inputs)


# mis_fixed


@given(sequences.filter(bool), settings_of_tis)
def test_fixed_weights_average_to_one_over_what_is_left(batch, changed):
    args = keys(**{**changed, "tis_batch_normalize": True}, mis_fixed=True)
    weights, masks, metrics = miles.compute_mis_weights(args, **tensors(batch))
    flat, kept = torch.cat(weights), torch.cat(masks).bool()
    assert not flat[~kept].any()
    if kept.any() and metrics["batch_norm_factor"][0][0] != 1:  # 1 where they vanish altogether
        if args.tis_level == "token":
            mean = flat[kept].double().mean()
        else:
            some = [
                w[m > 0].double().mean() for w, m in zip(weights, masks, strict=True) if m.any()
            ]
            mean = torch.stack(some).mean()
        assert mean.item() == pytest.approx(1, abs=1e-5)


@given(sequences, settings_of_tis)
def test_fixed_keeps_what_miles_keeps_when_both_reject(batch, changed):
    changed = {**changed, "use_rs": True, "tis_batch_normalize": False}
    _, masks, _ = miles.compute_mis_weights(keys(**changed), **tensors(batch))
    _, fixed, _ = miles.compute_mis_weights(keys(**changed, mis_fixed=True), **tensors(batch))
    assert all(map(torch.equal, masks, fixed))


@given(sequences, settings_of_tis, st.booleans())
def test_fixed_weights_are_those_of_the_correction_that_the_keys_mean(batch, changed, counted):
    args = keys(**changed, mis_fixed=True)
    weights, masks, _ = miles.compute_mis_weights(args, **tensors(batch))
    columns = [torch.tensor([t[i] for s in batch for t in s]) for i in range(3)]
    packed = TokenBatch.packed(columns[0], columns[1], [len(s) for s in batch], columns[2])
    config = dataclasses.replace(miles.correction_config(args), rejected_in_denominator=counted)
    ours = correct(packed, config)
    assert torch.equal(torch.cat([torch.zeros(0), *weights]), ours.weights)
    assert torch.equal(torch.cat([torch.zeros(0), *masks]).bool(), ours.mask)


def test_a_rejected_outlier_empties_the_other_weights_only_in_miles():
    batch = [[(-1.0, -1.0, 1)] * 3, [(0.0, -19.0, 1)]]
    changed = {"tis_mode": "mask", "use_rs": False}
    weights, _, _ = miles.compute_mis_weights(keys(**changed), **tensors(batch))
    fixed, _, _ = miles.compute_mis_weights(keys(**changed, mis_fixed=True), **tensors(batch))
    assert weights[0].max() < 1e-6
    assert_same(fixed, [[1.0] * 3, [0.0]])


def test_geometric_weights_are_normalised_only_when_fixed():
    args = keys(tis_level="geometric")
    with pytest.raises(ValueError, match=r"tis_batch_normalize=True: .*mis_fixed=True"):
        miles.compute_mis_weights(args, **tensors(BATCH))
    args.mis_fixed = True
    assert miles.compute_mis_weights(args, **tensors(BATCH))[0] is not None


def test_fixed_rejects_without_weights():
    args = keys(use_tis=False, rs_veto_threshold=None, mis_fixed=True)
    weights, masks, metrics = miles.compute_mis_weights(args, **tensors(BATCH))
    _, expected, _ = reference(keys(rs_veto_threshold=None), BATCH)
    assert weights is None
    assert_same(masks, expected)
    assert metrics.keys() >= {"rs_mask_fraction_low", "rs_mask_fraction_high"}
    pg_loss = torch.ones(sum(map(len, BATCH)))
    assert hook(args, BATCH, pg_loss)[0] is pg_loss


def test_fixed_vetoes_without_rejection():
    args = keys(use_tis=False, use_rs=False, mis_fixed=True)
    _, masks, _ = miles.compute_mis_weights(args, **tensors(BATCH))
    assert_same(masks, [[1.0, 1.0, 0.0, 1.0], [1.0], [0.0, 0.0], [0.0, 0.0]])


def on_ranks(parts, run):
    """run(part, gather) of every part at once, each with a gather that joins what all of them sent."""
    barrier, sent = threading.Barrier(len(parts), timeout=100), [None] * len(parts)

    def rank(i):
        def gather(values):
            sent[i] = values
            barrier.wait()
            joined = torch.cat(sent)
            barrier.wait()
            return joined

        return run(parts[i], gather)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(rank, range(len(parts))))


@given(sequences.filter(lambda b: len(b) > 1), st.sampled_from(LEVELS), st.sampled_from(MODES))
@settings(max_examples=30)
def test_fixed_weights_are_the_same_bits_however_ranks_share_the_batch(batch, level, mode):
    args = keys(tis_level=level, tis_mode=mode, mis_fixed=True)

    def run(part, gather):
        return miles.compute_mis_weights(args, **tensors(part), gather=gather)

    whole, masks, _ = miles.compute_mis_weights(args, **tensors(batch))
    first, second = on_ranks([batch[:1], batch[1:]], run)
    assert all(map(torch.equal, whole, first[0] + second[0]))
    assert all(map(torch.equal, masks, first[1] + second[1]))


def test_fixed_refuses_log_probabilities_that_are_not_finite():
    with pytest.raises(ValueError, match=r"must be finite"):
        miles.compute_mis_weights(keys(mis_fixed=True), **tensors([[(-math.inf, -1.0, 1)]]))


# correction_config


def test_rejection_and_veto_need_no_weights_and_not_each_other():
    config = miles.correction_config(keys(use_tis=False, use_rs=False))
    assert config.level == "none" and config.rules == () and config.veto is not None
    config = miles.correction_config(keys(use_tis=False, rs_veto_threshold=None))
    assert config.level == "none" and len(config.rules) == 1 and config.veto is None


def test_missing_keys_have_miles_defaults():
    config = miles.correction_config(SimpleNamespace(use_tis=True))
    found = (config.level, config.upper, config.rules, config.self_normalize)
    assert found == ("token", 2.0, (), False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tis_level": "word"}, r"tis_level='word': .*token, sequence, geometric"),
        ({"rs_level": "max"}, r"rs_level='max'"),
        ({"tis_mode": "cut"}, r"tis_mode='cut': .*truncate, clip, mask"),
        ({"tis_upper_bound": 0.0}, r"tis_upper_bound=0\.0: must be greater"),
        ({"tis_upper_bound": None}, r"tis_upper_bound=None"),
        ({"tis_lower_bound": -1.0}, r"tis_lower_bound=-1\.0: .*at least 0"),
        ({"rs_veto_threshold": "1e-4"}, r"rs_veto_threshold='1e-4': must be a number.*1\.0e-4"),
        ({"rs_lower_bound": 3.0}, r"rs_lower_bound=3\.0, rs_upper_bound=2\.0"),
        ({"tis_mode": "clip", "tis_lower_bound": 3.0, "use_rs": False}, r"tis_lower_bound=3\.0"),
    ],
)
def test_bad_keys_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        miles.correction_config(keys(**changed))
    with pytest.raises(ValueError, match=message):
        miles.compute_mis_weights(keys(**changed), **tensors(BATCH))


def test_truncation_may_be_below_one():
    args = keys(tis_lower_bound=None, tis_upper_bound=0.5, use_rs=False, tis_batch_normalize=False)
    weights, _, _ = miles.compute_mis_weights(args, **tensors(BATCH))
    assert torch.cat(weights).max() == 0.5
    assert miles.correction_config(args).upper == 0.5


# Context parallelism


class FakeShard:
    """One rank of a group whose other ranks' values are known."""

    def __init__(self, index, wholes):
        self.index, self.wholes = index, iter(wholes)

    def gather(self, values):
        full = next(self.wholes)
        assert torch.equal(values, full[self.index])
        return full

    def take(self, full):
        return full[self.index]


lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4)


@given(lengths, st.integers(1, 4))
def test_zigzag_shards_are_a_partition_in_order(prompts_and_responses, size):
    totals = [p + r for p, r in prompts_and_responses]
    responses = [r for _, r in prompts_and_responses]
    shards = [miles.zigzag_shard(totals, responses, rank, size) for rank in range(size)]
    held = torch.cat([shard.index for shard in shards])
    assert sorted(held.tolist()) == list(range(sum(responses)))
    assert all(shard.index.tolist() == sorted(shard.index.tolist()) for shard in shards)


def test_zigzag_chunks_are_those_of_megatron():
    # 8 positions over 2 ranks: chunks of 2; rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5. The logits at
    # 2 .. 6 predict the response's 5 tokens.
    assert miles.zigzag_shard([8], [5], 0, 2).index.tolist() == [4]
    assert miles.zigzag_shard([8], [5], 1, 2).index.tolist() == [0, 1, 2, 3]
    # Padded to 16: chunks of 4; rank 0 holds 0 .. 3 and 12 .. 15.
    assert miles.zigzag_shard([8], [5], 0, 2, padded_lengths=[16]).index.tolist() == [0, 1]


@given(sequences.filter(bool), settings_of_tis, st.integers(1, 3), st.booleans())
@settings(max_examples=40)
def test_context_parallel_ranks_take_their_part_of_the_whole(batch, changed, size, fixed):
    args = keys(**{**changed, "tis_batch_normalize": fixed}, mis_fixed=fixed)
    responses = [len(s) for s in batch]
    totals = [n + 3 for n in responses]
    pg_loss = torch.arange(1.0, sum(responses) + 1)
    whole = tensors(batch)
    loss, masks, metrics = hook(args, batch, pg_loss)
    for rank in range(size):
        index = miles.zigzag_shard(totals, responses, rank, size).index
        flat = {name: torch.cat(whole[name]) for name in ("train_log_probs", "rollout_log_probs")}
        held = {name: [values[index]] for name, values in flat.items()}
        part, part_masks, part_metrics = miles.compute_mis_weights_with_cp(
            args, pg_loss=pg_loss[index], **held, loss_masks=whole["loss_masks"],
            total_lengths=totals, response_lengths=responses,
            context_shard=FakeShard(index, flat.values()),
        )  # fmt: skip
        assert torch.equal(part, loss[index])
        assert all(map(torch.equal, part_masks, masks))
        assert all(torch.equal(part_metrics[name], metrics[name][index]) for name in metrics)


# What Miles lacks, in its layout: a loss mask that leaves out what a tool answered.

OURS = [
    [(-0.5, -1.0, 1), (-2.0, -1.0, 1), (8.0, -1.0, 0), (-0.75, -1.0, 1)],
    [(-0.25, -1.0, 1), (-1.5, -1.0, 1)],
]


def fixed_keys(**changed):
    plain = {"use_rs": False, "rs_veto_threshold": None, "tis_batch_normalize": False}
    return keys(**{**plain, "tis_upper_bound": 9.0, "mis_fixed": True, **changed})


def of_ours(pg_loss=None, **changed):
    loss = torch.ones(6) if pg_loss is None else torch.tensor(pg_loss)
    return hook(fixed_keys(**changed), OURS, loss)


@pytest.mark.parametrize(
    ("level", "logs"),
    [
        ("prefix-min", [0.5, -0.5, None, -0.75, 0.75, 0.25]),
        ("turn", [-0.5, -0.5, None, 0.25, 0.25, 0.25]),
        ("turn-geometric", [-0.25, -0.25, None, 0.25, 0.125, 0.125]),
    ],
)
def test_minpro_and_turns_weigh_what_miles_gives(level, logs):
    wanted = [0.0 if x is None else math.exp(x) for x in logs]
    assert of_ours(tis_level=level)[0].tolist() == pytest.approx(wanted)
    with pytest.raises(ValueError, match=f"tis_level='{level}': Miles has no such correction"):
        of_ours(tis_level=level, mis_fixed=False)


def test_topr_tapers_by_the_sign_of_miles_loss():
    """pg_loss is positive where the advantage is negative."""
    wanted = [math.exp(-0.25), math.exp(-0.25), 0.0, math.exp(-0.25), -1.0, -1.0]
    changed = {"tis_mode": "taper", "tis_level": "sequence", "tis_upper_bound": 1.0}
    loss, _, metrics = of_ours([1.0] * 4 + [-1.0] * 2, **changed)
    assert loss.tolist() == pytest.approx(wanted)
    assert metrics["mis_tis_weight_after_bound"].tolist() == pytest.approx(list(map(abs, wanted)))
    with pytest.raises(ValueError, match="advantage_estimator=cispo has a log-probability"):
        of_ours(**changed, advantage_estimator="cispo")


@pytest.mark.parametrize(("level", "mode"), [("prefix-min", "clip"), ("turn", "taper")])
def test_context_parallel_ranks_take_their_part_of_ours_too(level, mode):
    """radixark/miles#3097: a prefix over one rank's shard alone is another number."""
    args, whole = fixed_keys(tis_level=level, tis_mode=mode, tis_lower_bound=0.8), tensors(OURS)
    pg_loss = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    loss, *_ = hook(args, OURS, pg_loss)
    flat = {name: torch.cat(whole[name]) for name in ("train_log_probs", "rollout_log_probs")}
    gathered = [*flat.values(), pg_loss][: 3 if mode == "taper" else 2]
    for rank in range(2):
        index = miles.zigzag_shard([9, 5], [4, 2], rank, 2).index
        part, _, _ = miles.compute_mis_weights_with_cp(
            args, pg_loss=pg_loss[index], loss_masks=whole["loss_masks"],
            **{name: [values[index]] for name, values in flat.items()},
            total_lengths=[9, 5], response_lengths=[4, 2],
            context_shard=FakeShard(index, gathered),
        )  # fmt: skip
        assert torch.equal(part, loss[index])


def test_kpop_rejects_what_miles_gives_and_what_it_does_not_give_is_refused():
    loss, masks, metrics = of_ours(use_tis=False, use_rs=True, rs_rules=["token_binary_kl=0.15"])
    kept = [bool(t[2]) and binary(*t[:2]) <= 0.15 for row in OURS for t in row]
    assert torch.cat(masks).bool().tolist() == kept and 0 < sum(kept) < 5
    assert loss.tolist() == [1.0] * 6 and "mis_rs_mask_fraction_high" not in metrics
    with pytest.raises(ValueError, match="only use_rs reads it"):
        of_ours(rs_rules=["token_binary_kl=0.15"])
    with pytest.raises(ValueError, match="seq_max_kl needs whole distributions, and Miles gives"):
        of_ours(use_rs=True, rs_rules="seq_max_kl=0.05")
    with pytest.raises(ValueError, match=r"rs_rules=\('token_k3=1',\): Miles has no such"):
        of_ours(use_rs=True, rs_rules=["token_k3=1"], mis_fixed=False)


def binary(train, rollout):
    """The larger KL between a token and all others, in float64."""
    p, q = math.exp(train), math.exp(rollout)

    def kl(p, q):
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    return max(kl(p, q), kl(q, p))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_the_hook_is_that_of_miles_newest_code(level, mode):
    name = "examples.infra_features.train_infer_mismatch_helper.mis"
    newest = pytest.importorskip(name, reason="no Miles: put a checkout of it on PYTHONPATH")
    sequence = [t for t in OURS[0] if t[2]]
    args = keys(
        tis_level=level, tis_mode=mode, rs_level=level, tis_batch_normalize=level != "geometric"
    )
    batch = [sequence, OURS[1]]
    theirs = newest.compute_mis_weights(args, **tensors(batch))
    weights, masks, _ = miles.compute_mis_weights(args, **tensors(batch))
    for ours, wanted in ((weights, theirs[0]), (masks, theirs[1])):
        assert all(map(torch.allclose, ours, wanted))
