"""fallback_correction.adapters.verl against verl's documented formulas, written out token by token."""

import dataclasses
import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fallback_correction.adapters import verl
from fallback_correction.effective_rate import rate_factor, weight_sums
from fallback_correction.tokens import TokenBatch

TOKEN_OPTIONS = ("token_k1", "token_k2", "token_k3", "binary_kl")
SEQUENCE_OPTIONS = (
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip
OPTIONS = TOKEN_OPTIONS + SEQUENCE_OPTIONS

# Multiples of 1/32: sums are exact in float32, so that no order of summation moves a value over a bound.
small = st.integers(-96, -1).map(lambda i: i / 32)
any_log_prob = st.one_of(small, st.integers(-40 * 32, 0).map(lambda i: i / 32))
token = st.tuples(any_log_prob, small, st.integers(0, 1)) | st.tuples(small, small, st.just(1))


@st.composite
def batches(draw):
    """Sequences of (old, rollout, mask), padded to the same length, with a token that counts."""
    rows = draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=5))
    rows[draw(st.integers(0, len(rows) - 1))][0] = (-0.5, -0.75, 1)
    width = max(map(len, rows))
    return [row + [(0.0, 0.0, 0)] * (width - len(row)) for row in rows]


def tensors(batch, dtype=torch.float32):
    columns = [torch.tensor([[t[i] for t in row] for row in batch]) for i in range(3)]
    names = ("old_log_prob", "rollout_log_prob", "response_mask")
    return dict(zip(names, [columns[0], columns[1], columns[2].to(dtype)], strict=True))


def correct(batch, **config):
    return verl.compute_rollout_correction(config, **tensors(batch))


def of_rho(*rhos):
    """One sequence whose tokens have the ratios pi_train / pi_rollout."""
    return [[(math.log(rho) - 1.0, -1.0, 1) for rho in rhos]]


# The formulas


def cut(x):
    return min(max(x, -20.0), 20.0)


def mean(values):
    return sum(values) / len(values)


def sample_std(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


def population_std(values):
    return statistics.pstdev(values) if len(values) > 1 else 0.0


def counting(batch):
    """Lists of r = log rho of the tokens that count, one list a sequence."""
    return [[a - b for a, b, m in row if m] for row in batch]


def reference_weights(batch, level, upper, lower=None, normalize=False):
    rows = counting(batch)
    raw = [[math.exp(cut(x if level == "token" else sum(row))) for x in row] for row in rows]

    def bounded(w):
        return min(w, upper) if lower is None else w * (lower <= w <= upper)

    applied = [[bounded(w) for w in row] for row in raw]
    metrics = reference_is_metrics(level, rows, raw, applied, upper, lower or 1 / upper)
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = mean(
            [not lower <= w <= upper for row in raw for w in row]
        )
    if normalize:
        units = [w for row in applied for w in row]
        if level == "sequence":
            units = [mean(row) for row in applied if row]
        factor = mean(units) if mean(units) > 1e-8 else 1.0
        applied = [[w / factor for w in row] for row in applied]
        metrics["rollout_is_batch_norm_factor"] = factor
    return applied, metrics


def reference_is_metrics(level, rows, raw, applied, upper, lower):
    flat, flat_raw = [[w for row in x for w in row] for x in (applied, raw)]
    means, raw_means = [[mean(row) if row else 0.0 for row in x] for x in (applied, raw)]
    average = mean(flat)
    squares = mean([(w / (average + 1e-8)) ** 2 for w in flat])
    extremes = {
        "max": max(flat), "min": min(flat),
        "ratio_fraction_high": mean([w > upper for w in flat_raw]),
        "ratio_fraction_low": mean([w < lower for w in flat_raw]),
    }  # fmt: skip
    if level == "sequence":
        logs = [sum(row) for row in rows]
        extremes = {
            "max": math.exp(min(max(logs), 20)), "min": math.exp(min(logs)),
            "ratio_fraction_high": mean([x > math.log(upper) for x in logs]),
            "ratio_fraction_low": mean([x < math.log(lower) for x in logs]),
        }  # fmt: skip
    others = {
        "mean": average, "std": population_std(flat),
        "eff_sample_size": 1 / squares if squares else 0.0,
        "seq_mean": mean(means), "seq_std": sample_std(means),
        "seq_max": max(means), "seq_min": min(means),
        "seq_max_deviation": max(abs(x - 1) for x in means),
        "seq_fraction_high": mean([x > upper for x in raw_means]),
        "seq_fraction_low": mean([x < lower for x in raw_means]),
    }  # fmt: skip
    return {f"rollout_is_{name}": value for name, value in (extremes | others).items()}


def bernoulli_kl(a, b):
    p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (a, b))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def token_statistic(option, a, b):
    r = cut(a - b)
    if option == "binary_kl":
        return max(bernoulli_kl(a, b), bernoulli_kl(b, a))
    return {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - 1 - r}[option[-2:]]


def reference_rejection(batch, option, bounds):
    """Lists of bool of the counting tokens, and metrics. bounds: of the statistic itself."""
    rows = [[token_statistic(option, a, b) for a, b, m in row if m] for row in batch]
    reduce = {"sum": sum, "mean": mean, "max": max}.get(option.split("_")[1], mean)
    sequences = [reduce(row) for row in rows if row]
    if option in SEQUENCE_OPTIONS:
        rows = [[reduce(row)] * len(row) if row else [] for row in rows]
    keep = [[bounds[0] <= x <= bounds[1] for x in row] for row in rows]
    flat = [x for row in rows for x in row]
    units = flat if option in TOKEN_OPTIONS else sequences
    two_sided = option.endswith("k1")
    floor = bounds[0] if two_sided else 0.0
    metrics = {
        "mean": mean(flat), "max": max(flat), "min": min(flat),
        "std": population_std([min(max(x, floor), bounds[1]) for x in flat]),
        "fraction_high": mean([x > bounds[1] for x in units]),
        "fraction_low": mean([x < bounds[0] for x in units]) if two_sided else 0.0,
        "seq_mean": mean(sequences), "seq_std": sample_std(sequences),
        "seq_max": max(sequences), "seq_min": min(sequences),
        "seq_max_deviation": max(map(abs, sequences)),
        "seq_fraction_high": mean([x > bounds[1] for x in sequences]),
        "masked_fraction": mean([not k for row in keep for k in row]),
        "seq_masked_fraction": mean([not all(row) for row in keep if row]),
    }  # fmt: skip
    if two_sided:
        metrics["seq_fraction_low"] = mean([x < bounds[0] for x in sequences])
    return keep, {f"rollout_rs_{option}_{name}": value for name, value in metrics.items()}


def reference_mismatch(batch):
    rows = counting(batch)
    flat = [x for row in rows for x in row]
    old, rollout = (
        [mean([t[i] for t in row if t[2]]) if any(t[2] for t in row) else 0.0 for row in batch]
        for i in range(2)
    )
    gaps = [b - a for a, b in zip(old, rollout, strict=True)]
    return {
        "training_ppl": mean([math.exp(-x) for x in old]), "training_log_ppl": -mean(old),
        "rollout_ppl": mean([math.exp(-x) for x in rollout]), "rollout_log_ppl": -mean(rollout),
        "kl": -mean(flat), "k3_kl": mean([math.exp(x) - x - 1 for x in flat]),
        "log_ppl_diff": mean(gaps), "log_ppl_abs_diff": mean([abs(x) for x in gaps]),
        "log_ppl_diff_max": max(gaps), "log_ppl_diff_min": min(gaps),
        "ppl_ratio": mean([math.exp(x) for x in gaps]),
        "chi2_token": mean([math.exp(2 * cut(x)) for x in flat]) - 1,
        "chi2_seq": mean([math.exp(2 * cut(sum(row))) for row in rows]) - 1,
    }  # fmt: skip


def padded(rows, batch):
    """Values of the counting tokens in their places, 0 elsewhere."""
    values = [iter(row) for row in rows]
    return [
        [float(next(v)) if t[2] else 0.0 for t in row] for v, row in zip(values, batch, strict=True)
    ]


def assert_same(found, rows, batch):
    torch.testing.assert_close(found, torch.tensor(padded(rows, batch)), rtol=1e-6, atol=1e-6)


def assert_metrics(found, expected, only=""):
    found = {name: value for name, value in found.items() if only in name}
    assert found.keys() == {f"rollout_corr/{name}" for name in expected if only in name}
    for name, value in found.items():
        reference = expected[name.removeprefix("rollout_corr/")]
        # Standard deviations are roots of differences: float32 inputs leave half their digits.
        tolerance = 2e-4 if name.endswith("std") else 2e-6
        assert value == pytest.approx(reference, rel=tolerance, abs=tolerance), name


@given(
    batches(),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from([(None, 2.0), (None, 0.7), (0.5, 5.0), (0.9, 1.1)]),
    st.booleans(),
)
def test_weights_are_those_of_verl(batch, level, bounds, normalize):
    lower, upper = bounds
    weights, mask, metrics = correct(
        batch, rollout_is=level, rollout_is_batch_normalize=normalize,
        rollout_is_threshold=upper if lower is None else f"{lower}_{upper}",
    )  # fmt: skip
    expected, expected_metrics = reference_weights(batch, level, upper, lower, normalize)
    assert_same(weights, expected, batch)
    assert torch.equal(mask, tensors(batch)["response_mask"])
    assert_metrics(metrics, expected_metrics, only="rollout_is_")


@given(batches(), st.sampled_from(OPTIONS), st.sampled_from([0.3, 0.05, 1.3]))
@settings(max_examples=150)
def test_rejection_is_that_of_verl(batch, option, upper):
    bounds = (-math.inf, upper)
    threshold = upper
    if option.endswith("k1"):
        bounds, threshold = (math.log(0.7), math.log(1.2)), "0.7_1.2"
    weights, mask, metrics = correct(batch, rollout_rs=option, rollout_rs_threshold=threshold)
    keep, expected_metrics = reference_rejection(batch, option, bounds)
    assert weights is None
    assert_same(mask, keep, batch)
    expected_metrics["rollout_rs_masked_fraction"] = mean([not k for row in keep for k in row])
    expected_metrics["rollout_rs_seq_masked_fraction"] = mean([not all(row) for row in keep])
    assert_metrics(metrics, expected_metrics, only="rollout_rs_")


@given(batches())
def test_mismatch_metrics_are_those_of_verl(batch):
    weights, mask, metrics = correct(batch)
    assert weights is None
    assert torch.equal(mask, tensors(batch)["response_mask"])
    assert_metrics(metrics, reference_mismatch(batch))


@given(batches(), st.sampled_from(list(itertools.combinations(OPTIONS, 2))))
@settings(max_examples=40)
def test_several_options_must_all_keep(batch, options):
    thresholds = {name: "0.7_1.2" if name.endswith("k1") else "0.3" for name in options}
    masks = [correct(batch, rollout_rs=n, rollout_rs_threshold=t)[1] for n, t in thresholds.items()]
    names = ", ".join((*options, options[0]))  # named twice, which counts once
    both = correct(batch, rollout_rs=names, rollout_rs_threshold=",".join(thresholds.values()))[1]
    assert torch.equal(both, masks[0] * masks[1])


def test_one_number_bounds_k1_on_both_sides():
    mask = correct(of_rho(0.45, 0.55, 1.9, 2.1), rollout_rs="token_k1", rollout_rs_threshold=2.0)[1]
    assert mask.tolist() == [[0, 1, 1, 0]]


def test_rejected_tokens_keep_their_weight_and_count_in_the_mean():
    batch = of_rho(0.5, 1.0)
    config = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    plain, _, _ = correct(batch, **config)
    weights, mask, _ = correct(batch, **config, rollout_rs="token_k1", rollout_rs_threshold=1.5)
    assert mask.tolist() == [[0, 1]]
    assert torch.equal(weights, plain)


def test_the_mean_is_over_what_is_gathered():
    config = {"rollout_is": "token", "rollout_is_batch_normalize": True}
    weights, _, _ = verl.compute_rollout_correction(
        config, **tensors(of_rho(1.0)), gather=lambda x: torch.cat([x, 0 * x])
    )
    # The other rank's weights are 0, and its tokens count 0: the mean stays.
    assert weights.item() == 1
    weights, _, _ = verl.compute_rollout_correction(
        config, **tensors(of_rho(1.0, 0.5)), gather=lambda x: torch.cat([x, x])
    )
    assert weights.tolist() == [[pytest.approx(4 / 3), pytest.approx(2 / 3)]]


PRESET_NAMES = {
    "decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "decoupled_seq_is_rs",
    "decoupled_geo_rs", "decoupled_geo_rs_seq_tis", "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs", "decoupled_k3_rs_seq_tis", "decoupled_k3_rs_token_tis", "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs", "bypass_pg_is", "bypass_pg_token_icepop",
    "bypass_pg_geo_rs", "bypass_pg_geo_rs_seq_tis", "bypass_pg_geo_rs_token_tis", "disabled",
}  # fmt: skip


def test_the_presets_are_those_of_verl_and_each_runs():
    assert verl.PRESETS.keys() == PRESET_NAMES
    for name, preset in verl.PRESETS.items():
        assert preset.bypass_mode == name.startswith("bypass"), name
        assert preset.loss_type == ("reinforce" if name.startswith("bypass_pg") else "ppo_clip")
        batch = tensors([*of_rho(1.0005, 1.0, 0.9995), *of_rho(3.0, 1.0, 1.0)])
        weights, mask, metrics = verl.compute_rollout_correction(preset, **batch)
        assert all(map(math.isfinite, metrics.values())), name
        assert (weights is None) == (preset.rollout_is is None), name
        assert mask.tolist() == [[1] * 3, [0 if preset.rollout_rs else 1] * 3], name
    geo = verl.PRESETS["decoupled_geo_rs_token_tis"]
    assert (geo.rollout_is, geo.rollout_is_threshold) == ("token", 2.0)
    assert (geo.rollout_rs, geo.rollout_rs_threshold) == ("seq_mean_k1", "0.999_1.001")
    assert verl.PRESETS["decoupled_seq_is_rs"].rollout_rs_threshold == "0.5_2.0"
    assert verl.PRESETS["decoupled_k3_rs"].rollout_rs_threshold == 0.01
    assert verl.PRESETS["bypass_pg_token_icepop"].rollout_is_threshold == "0.5_5.0"


def test_a_mapping_an_object_and_a_dataclass_are_configs():
    batch = tensors(of_rho(0.5, 1.5))
    given_keys = {"rollout_is": "token", "rollout_is_threshold": "1.2"}
    preset = dataclasses.replace(verl.PRESETS["decoupled_token_is"], rollout_is_threshold=1.2)
    results = [
        verl.compute_rollout_correction(config, **batch)[0]
        for config in (given_keys, SimpleNamespace(**given_keys), preset)
    ]
    assert all(torch.equal(results[0], x) for x in results)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_mask_keeps_its_type(dtype):
    config = {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.5}
    _, mask, _ = verl.compute_rollout_correction(config, **tensors(of_rho(1.0, 2.0), dtype))
    assert mask.dtype == dtype and mask.tolist() == [[1, 0]]


def test_weights_that_icepop_zeroes_altogether_are_not_normalised():
    config = {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"}
    weights, mask, metrics = correct(of_rho(9.0, 0.1), **config, rollout_is_batch_normalize=True)
    assert weights.tolist() == [[0, 0]] and mask.tolist() == [[1, 1]]
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0


def test_nothing_outside_the_mask_matters():
    batch = [[(-1.0, -1.5, 1), (-1.0, -9.0, 0)]]
    poisoned = [[batch[0][0], (math.nan, -math.inf, 0)]]
    config = {
        "rollout_is": "sequence", "rollout_rs": ",".join(OPTIONS),
        "rollout_rs_threshold": ",".join("2.0" for _ in OPTIONS),
    }  # fmt: skip
    a, b = correct(batch, **config), correct(poisoned, **config)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rollout_is": "word"},
            r"rollout_is='word': unknown. Use one of token, sequence",
        ),
        ({"rollout_is": "token", "rollout_is_threshold": "a"}, r"rollout_is_threshold='a'"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, r"rollout_is_threshold='True'"),
        ({"rollout_is": "token", "rollout_is_threshold": -1}, r"must be positive"),
        ({"rollout_is": "token", "rollout_is_threshold": "3_2"}, r"lower bound 3\.0 exceeds"),
        ({"rollout_rs": "token_k1"}, r"rollout_rs_threshold=None"),
        (
            {"rollout_rs": "seq_max_kl", "rollout_rs_threshold": 1},
            r"verl's rollout keeps the log-prob",
        ),
        ({"loss_type": "centered"}, r"loss_type=centered: score centering needs .* does not keep"),
        ({"rollout_is": "token", "rollout_is_taper": True}, r"mode=taper: needs the advantages"),
        (
            {"rollout_is": "token", "rollout_is_taper": True, "rollout_is_threshold": "0.5_2"},
            r"rollout_is_taper=True: truncates weights, .* rollout_is_threshold='0.5_2'",
        ),
        (
            {"rollout_is_taper": True},
            r"rollout_is_taper=True: truncates weights, and rollout_is=None",
        ),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, r"rollout_rs='seq_max_k1'"),
        ({"rollout_rs": "", "rollout_rs_threshold": 2}, r"rollout_rs='': must name"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, r"token_k2 has an upper"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, r"exceeds the upper one"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, r"2 thresholds for 1 options"),
    ],
)
def test_bad_keys_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        correct(of_rho(1.0), **config)


def test_a_batch_without_a_token_is_refused():
    with pytest.raises(ValueError, match=r"response_mask: must have a token"):
        correct([[(-1.0, -1.0, 0)]])


def test_shapes_must_agree():
    inputs = tensors(of_rho(1.0, 2.0))
    inputs["response_mask"] = torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"response_mask=\(1, 3\): must be the same"):
        verl.compute_rollout_correction({}, **inputs)


def test_one_threshold_serves_all_options():
    batch = of_rho(0.5, 1.0, 2.0)
    a = correct(batch, rollout_rs="token_k2,token_k3", rollout_rs_threshold=0.2)[1]
    b = correct(batch, rollout_rs="token_k2,token_k3", rollout_rs_threshold="0.2,0.2")[1]
    assert torch.equal(a, b)


# What verl lacks, in its layout: padded, and the mask leaves out what a tool answered.

R = torch.tensor([[0.5, -1.0, 9.0, 0.25, -0.5, 7.0], [0.75, 0.5, -0.25, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
IN_VERL = {
    "old_log_prob": R - 1,
    "rollout_log_prob": torch.full((2, 6), -1.0),
    "response_mask": MASK,
}


def weights_of_verl(**config):
    inputs = {**IN_VERL, **config.pop("inputs", {})}
    return verl.compute_rollout_correction({"rollout_is_threshold": 9.0, **config}, **inputs)[0]


def exps(rows):
    return torch.tensor(rows).exp() * MASK


@pytest.mark.parametrize(
    ("level", "logs"),
    [
        ("prefix-min", [[0.5, -0.5, 0, -0.75, -1.5, 0], [0.75, 1.25, 0.25, 0, 0, 0]]),
        ("turn", [[-0.5, -0.5, 0, -0.25, -0.25, 0], [1, 1, 1, 0, 0, 0]]),
        ("turn-geometric", [[-0.25, -0.25, 0, -0.125, -0.125, 0], [1 / 3] * 3 + [0] * 3]),
    ],
)
def test_minpro_and_turns_weigh_what_verl_gives(level, logs):
    found = weights_of_verl(rollout_is=level)
    assert torch.allclose(found, exps(logs), rtol=1e-6)
    assert not torch.allclose(found, weights_of_verl(rollout_is="sequence"))


def test_topr_tapers_what_verl_gives():
    advantages = torch.tensor([[-1.0] * 6, [0.5] * 6])
    config = {"rollout_is": "sequence", "rollout_is_threshold": 1.0, "rollout_is_taper": True}
    found = weights_of_verl(**config, inputs={"advantages": advantages})
    assert torch.allclose(found, exps([[-0.75] * 6, [0.0] * 6]))


def test_the_weights_and_the_rate_of_vcpo_are_those_of_verls_newest_code():
    """verl lacks KPop, MinPRO, TOPR, turns and VCPO; it has OTB, and ESS / B among its metrics."""
    reason = "no verl: pip install verl==0.9.1 tensordict"
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason=reason)
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos", reason=reason)
    assert "binary_kl" not in helper.SUPPORTED_ROLLOUT_RS_OPTIONS
    assert {"optimal_token_baseline", "bypass_mode"} <= {
        *algorithms.ADV_ESTIMATOR_REGISTRY, *algorithms.POLICY_LOSS_REGISTRY
    }  # fmt: skip
    keys = {"rollout_rs": "seq_max_k3,token_k1", "rollout_rs_threshold": "2.0,0.4_1.5"}
    for level in ("token", "sequence"):
        config = {"rollout_is": level, "rollout_is_threshold": 1.4, **keys}
        theirs, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(
            **IN_VERL, **config
        )
        ours = verl.compute_rollout_correction(config, **IN_VERL)
        assert torch.allclose(ours[0], theirs.batch["rollout_is_weights"])
        assert torch.equal(ours[1].bool(), mask.bool())
        assert ours[2].keys() == metrics.keys()
        assert ours[2] == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    for lacks in ("prefix-min", "turn"):
        with pytest.raises(ValueError, match="Invalid rollout_is"):
            helper.compute_rollout_correction_and_rejection_mask(**IN_VERL, rollout_is=lacks)
    token = {"rollout_is": "token", "rollout_is_threshold": 1.4}
    weights, _, metrics = verl.compute_rollout_correction(token, **IN_VERL)
    batch = TokenBatch.padded(*IN_VERL.values())
    factor = rate_factor(*map(float, weight_sums(batch, weights.reshape(-1), "token")))
    share = metrics["rollout_corr/rollout_is_eff_sample_size"]
    assert 0 < factor < 1 and factor == pytest.approx(math.sqrt(share), rel=1e-6)
