"""Where every response to a prompt has the advantage b, logits drift by b (mu - pi) (docs/collapse.md).

mu samples, pi learns, both by a table over prefixes. The batch holds every response as often as mu
has it, so that its means are expectations, and a run's own corrections and loss give the mean
gradient exactly: of the logits at prefix s, sum over a of b w(s, a) mu(s, a) (e_a - pi(. | s)).
"""

import math
from functools import cache
from itertools import product

import pytest
import torch

from fallback_correction.score_centering import centering
from onpolicy.algorithm.estimators import group_advantages
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.training import distributed
from onpolicy.training import loss as loss_module
from onpolicy.training.loss import LossSettings, policy_loss
from onpolicy.training.rollout_correction import Corrections
from tests.support.likeliest_bytes import packed
from tests.support.onpolicy_batches import make_micro_batches, scored_batch
from tests.support.samples import make_train_sample, with_trajectory

END, VOCAB, LONGEST = 0, 3, 3
PREFIXES = [p for n in range(LONGEST) for p in product(range(1, VOCAB), repeat=n)]
QUARTERS = torch.tensor([[2, 1, 1], [1, 2, 1], [1, 1, 2]])
B = -0.5


@cache
def responses():
    """All of them: they end with END, or at the largest length."""
    ended = [(*p, END) for p in PREFIXES]
    return [*ended, *product(range(1, VOCAB), repeat=LONGEST)]


def policies(seed, apart=0.7):
    """(mu, logits of pi): float64 [prefixes, VOCAB]; mu in quarters, pi around it."""
    generator = torch.Generator().manual_seed(seed)
    mu = QUARTERS[torch.randint(3, (len(PREFIXES),), generator=generator)].double() / 4
    noise = torch.randn(mu.shape, generator=generator, dtype=torch.float64)
    return mu, (mu.log() + apart * noise).requires_grad_()


def places(response):
    """Indices of a response's tokens in the table."""
    prefixes = [PREFIXES.index(response[:t]) for t in range(len(response))]
    return torch.tensor(prefixes), torch.tensor(response)


def of_tokens(table, response):
    return table[places(response)]


def sampled(mu):
    """Every response as often as mu has it among 4^LONGEST."""
    counts = [round(of_tokens(mu, y).prod().item() * 4**LONGEST) for y in responses()]
    return [y for y, count in zip(responses(), counts, strict=True) for _ in range(count)]


def config_of(flags):
    needed = ["--hf-checkpoint", "/m", "--prompt-data", "/d.jsonl", "--rm-type", "exact"]
    config = parse(TrainConfig, [*needed, *flags], "onpolicy train")
    validate(config)
    return config


def drift(mu, logits, flags, b=B):
    """Minus the mean gradient of a response's summed loss, as a run with these flags has it."""
    own, weighed, config = weighed_batch(mu, logits, flags, lambda _: b)
    others = None
    if weighed.packed.likeliest is not None:
        prefixes = torch.cat([places(y)[0] for y in responses_of(weighed)])
        others = logits.log_softmax(-1)[prefixes].gather(1, weighed.packed.likeliest.tokens).float()
    loss, _ = policy_loss(own, weighed, LossSettings.of(config), likeliest_log_probs=others)
    (gradient,) = torch.autograd.grad(loss, logits)
    return -gradient * len(own) / len(weighed.samples)


def weighed_batch(mu, logits, flags, advantage):
    """(pi's log-probabilities of every token that mu samples, their micro-batch as a run with these
    flags has it, its configuration); advantage(response)"""
    distributed.init_process_group()
    config = config_of(flags)
    likeliest = told(mu, config.num_likeliest)
    samples = [
        with_trajectory(
            make_train_sample([1, *y], 1, of_tokens(mu.log(), y).tolist(), advantage(y), i),
            likeliest=[likeliest[place] for place in places(y)[0]] if likeliest else [],
        )
        for i, y in enumerate(sampled(mu))
    ]
    (packed,) = make_micro_batches(samples, max_tokens=10**6)
    own = torch.cat([of_tokens(logits.log_softmax(-1), y) for y in responses_of(packed)]).float()
    bypass = config.fallback.use_rollout_logprobs
    old = packed.rollout_log_probs if bypass else own.detach()
    scored = scored_batch(packed, old)
    ((weighed,),), _ = Corrections(config).weigh([[scored]], active=True)
    return own, weighed, config


def responses_of(batch):
    return [tuple(s.trajectory.token_ids[1:]) for s in batch.samples]


def told(mu, k):
    """What an engine of mu tells at each prefix; nothing for k = 0."""
    values, ids = mu.log().topk(k or 1)
    return packed(ids.numpy().astype("i4"), values.float().numpy()) if k else []


def expected(mu, logits, pull):
    """The sum above; pull(rho [T], delta [T]) is b w of a response's tokens."""
    pi = logits.detach().softmax(-1)
    result = torch.zeros_like(mu)
    for y in responses():
        of_mu, of_pi = of_tokens(mu, y), of_tokens(pi, y)
        states, actions = places(y)
        pulls = of_mu.prod() * pull(of_pi / of_mu, (of_pi - of_mu).abs())
        result[states, actions] += pulls
        result[states] -= pulls[:, None] * pi[states]
    return result


def close(found, wanted):
    return torch.allclose(found, wanted, rtol=0, atol=1e-6)


def reached(mu):
    """Probability under mu of coming to each prefix."""
    return torch.stack([of_tokens(mu, p).prod() if p else mu.new_ones(()) for p in PREFIXES])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("b", [-0.5, 0.5])
def test_uncorrected_logits_drift_by_b_times_what_the_engines_are_apart(seed, b):
    mu, logits = policies(seed)
    wanted = b * reached(mu)[:, None] * (mu - logits.detach().softmax(-1))
    assert close(drift(mu, logits, [], b), wanted)
    assert wanted.abs().max() > 0.01


def test_equal_engines_do_not_drift():
    mu, logits = policies(0, apart=0)
    assert close(drift(mu, logits, []), torch.zeros_like(mu))


def geometric(rho):
    return rho.log().mean().exp()


def smallest_before(rho):
    """Of the ratios before each token; 1 before the first."""
    return torch.stack([rho[:t].min() if t else rho.new_ones(()) for t in range(len(rho))])


def binary_kl(rho, mu):
    """The larger KL between two policies of one token: mu, and rho mu."""
    both = [torch.stack([q, 1 - q]) for q in (mu, rho * mu)]
    return torch.stack([(p * (p / q).log()).sum(0) for p, q in (both, both[::-1])]).amax(0)


TIS, MIS = ["--use-tis", "--tis-upper-bound", "1.3"], ["--use-tis", "--tis-mode", "mask"]
BOUNDS = ["--tis-lower-bound", "0.8", "--tis-upper-bound", "1.3"]
DC = ["--dc-mode", "fixed", "--dc-lambda", "0.4"]
CORRECTIONS = {
    "token TIS": (TIS, lambda rho, _: B * rho.clamp(max=1.3)),
    "token MIS": ([*MIS, *BOUNDS], lambda rho, _: B * rho * (rho >= 0.8) * (rho <= 1.3)),
    "token clip": (
        ["--use-tis", "--tis-mode", "clip", *BOUNDS],
        lambda rho, _: B * rho.clamp(0.8, 1.3),
    ),
    "sequence TIS": (
        [*TIS, "--tis-level", "sequence"],
        lambda rho, _: B * rho.prod().clamp(max=1.3) + 0 * rho,
    ),
    "sequence MIS": (
        [*MIS, "--tis-level", "sequence", "--tis-upper-bound", "1.3"],
        lambda rho, _: B * rho.prod() * (rho.prod() <= 1.3) + 0 * rho,
    ),
    "geometric TIS": (
        [*TIS, "--tis-level", "geometric"],
        lambda rho, _: B * geometric(rho).clamp(max=1.3) + 0 * rho,
    ),
    "TOPR": (
        ["--use-tis", "--tis-mode", "taper", "--tis-level", "sequence", "--tis-upper-bound", "1"],
        lambda rho, _: B * rho.prod().clamp(max=1) + 0 * rho,
    ),
    "MinPRO": (
        ["--use-tis", "--tis-level", "prefix-min", "--tis-mode", "clip", *BOUNDS],
        lambda rho, _: B * (rho * smallest_before(rho)).clamp(0.8, 1.3),
    ),
    "MinPRO of the current policy": (
        ["--use-rollout-logprobs", "--policy-loss", "reinforce", *TIS, "--tis-level", "prefix-min"],
        lambda rho, _: B * (rho * smallest_before(rho)).clamp(max=1.3),
    ),
    "geometric mask": (
        [
            "--use-rs",
            "--rs-level",
            "geometric",
            "--rs-lower-bound",
            "0.9",
            "--rs-upper-bound",
            "1.2",
        ],
        lambda rho, _: B * (0.9 <= geometric(rho) <= 1.2) + 0 * rho,
    ),
    "KPop": (
        ["--use-rs", "--rs-rules", "token_binary_kl=0.05"],
        lambda rho, delta: B * (binary_kl(rho, delta / (rho - 1).abs()) <= 0.05),
    ),
    "discrepancy": (DC, lambda rho, delta: B - 0.4 * delta),
    "bypass": (["--use-rollout-logprobs"], lambda rho, _: B * rho * (rho >= 0.8)),
}
"""{name: (flags, b w of a response's tokens)}"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_drifts_as_its_weights_say(name, seed):
    mu, logits = policies(seed)
    flags, pull = CORRECTIONS[name]
    found = drift(mu, logits, flags)
    assert close(found, expected(mu, logits, pull))
    assert not close(found, drift(mu, logits, [])), "the flags had no effect"


def test_tapered_weights_leave_good_responses_as_they_are():
    mu, logits = policies(1)
    flags = CORRECTIONS["TOPR"][0]
    assert torch.equal(drift(mu, logits, flags, 0.5), drift(mu, logits, [], 0.5))


@pytest.mark.parametrize("level", ["token", "sequence", "prefix-min"])
@pytest.mark.parametrize("seed", range(3))
def test_unbounded_weights_take_the_drift_away(level, seed):
    mu, logits = policies(seed)
    flags = ["--use-tis", "--tis-level", level, "--tis-upper-bound", "inf"]
    assert close(drift(mu, logits, flags), torch.zeros_like(mu))


def test_normalised_weights_drift_as_much_less_as_their_mean_is_larger():
    mu, logits = policies(2, apart=1.5)
    pi, batch = logits.detach().softmax(-1), sampled(mu)
    flags = [*TIS, "--tis-level", "geometric"]
    weights = [geometric(of_tokens(pi, y) / of_tokens(mu, y)).clamp(max=1.3) for y in batch]
    mean = math.fsum(weights) / len(batch)
    assert abs(mean - 1) > 0.01
    assert close(
        drift(mu, logits, [*flags, "--tis-batch-normalize"]) * mean, drift(mu, logits, flags)
    )


WEIGHED = {
    "nothing": ([], lambda rho: 1 + 0 * rho),
    "token TIS": (TIS, lambda rho: rho.clamp(max=1.3)),
    "token MIS": ([*MIS, *BOUNDS], lambda rho: rho * (rho >= 0.8) * (rho <= 1.3)),
    "token clip": (["--use-tis", "--tis-mode", "clip", *BOUNDS], lambda rho: rho.clamp(0.8, 1.3)),
    "bypass": (["--use-rollout-logprobs", *TIS], lambda rho: rho.clamp(max=1.3)),
}
"""{name: (flags, w)}: what score centering may stand beside."""


def centered(k):
    return ["--policy-loss", "centered", "--opd-top-k", str(k)]


@pytest.mark.parametrize("name", WEIGHED)
@pytest.mark.parametrize("b", [-0.5, 2.0])
def test_centered_over_the_whole_vocabulary_no_advantage_drifts(name, b):
    mu, logits = policies(1)
    flags, _ = WEIGHED[name]
    assert close(drift(mu, logits, [*flags, *centered(VOCAB)], b), torch.zeros_like(mu))
    uncentered = [*flags, "--policy-loss", "reinforce"]
    assert not close(drift(mu, logits, uncentered, b), torch.zeros_like(mu))


def test_with_the_other_sign_centering_doubles_the_drift(monkeypatch):
    mu, logits = policies(1)
    before = drift(mu, logits, [])
    monkeypatch.setattr(loss_module, "centering", lambda *given: -centering(*given))
    assert close(drift(mu, logits, centered(VOCAB)), 2 * before)
    assert not close(before, torch.zeros_like(mu))


def left_by(mu, logits, weight, k, b=B):
    """What b times the mean of the tokens that are not told, less that of pi rescaled, leaves:
    sum over them of b (w mu - alpha pi) (e_v - pi), alpha = rho w(1 / rho)."""
    pi = logits.detach().softmax(-1)
    is_told = torch.zeros_like(mu).scatter(1, mu.topk(k).indices, 1).bool()
    rests = [x.masked_fill(is_told, 0).sum(-1, True) for x in (mu, pi)]
    rho = rests[0] / rests[1]
    apart = (mu * weight(pi / mu) - rho * weight(1 / rho) * pi).masked_fill(is_told, 0)
    return b * reached(mu)[:, None] * (apart - apart.sum(-1, True) * pi)


@pytest.mark.parametrize("name", WEIGHED)
@pytest.mark.parametrize("seed", range(3))
def test_centered_over_the_likeliest_tokens_it_leaves_what_the_others_are_apart(name, seed):
    """One token is told and two are not."""
    mu, logits = policies(seed)
    flags, weight = WEIGHED[name]
    found = drift(mu, logits, [*flags, *centered(1)])
    assert close(found, left_by(mu, logits, weight, 1))
    assert not close(found, torch.zeros_like(mu))
    # With a single other token, its share is known exactly.
    assert close(drift(mu, logits, [*flags, *centered(2)]), torch.zeros_like(mu))


def test_equal_engines_are_centered_by_0_to_the_bit():
    mu, logits = policies(0, apart=0)
    assert torch.equal(drift(mu, logits, centered(2)), drift(mu, logits, []))


def test_an_unsolvable_prompt_is_below_zero_only_where_a_baseline_is_shared_between_prompts():
    rewards, lengths = [[1.0, 0.0], [0.0, 0.0]], [[3, 3], [3, 3]]
    plus_plus = group_advantages(rewards, "reinforce_plus_plus", lengths)
    assert plus_plus[1][0] == plus_plus[1][1] < -0.4
    for estimator in ("grpo", "dr_grpo", "rloo"):
        assert group_advantages(rewards, estimator)[1] == [0, 0]


MASK = ["--use-rs", "--rs-level", "geometric", "--rs-lower-bound=0.97", "--rs-upper-bound=1.03"]


@pytest.mark.parametrize(("right", "sign"), [([1], -1), ([0, 2], 1)], ids=["rare", "frequent"])
def test_a_mask_of_what_learning_moved_takes_a_groups_mean_advantage_from_zero(right, sign):
    """So GRPO has a b of its own on samples that lag: what is rarer moves more, and is masked. A quarter
    or three of the responses are right, by their first token, whose logit pi has raised."""
    mu, _ = policies(0)
    mean = mu[0, right].sum().item()
    logits = mu.log()
    logits[0, right] += 0.2
    assert mean in (0.25, 0.75)

    def mean_advantage(flags):
        _, weighed, _ = weighed_batch(mu, logits, flags, lambda y: (y[0] in right) - mean)
        kept = weighed.kept.split([len(y) for y in responses_of(weighed)])
        pairs = zip(weighed.samples, kept, strict=True)
        return math.fsum(s.reward * bool(k[0]) for s, k in pairs) / len(weighed.samples)

    assert mean_advantage([]) == 0
    assert sign * mean_advantage(MASK) > 0.1
