"""What is told of the tokens of samples that people are shown."""

from tests.onpolicy.train.fsdp.test_trainer import RATES, make, make_samples, with_log_prob

__all__ = ["make"]


def train(trainer, samples, shown):
    for number in shown:
        samples[number].sample.is_shown = True
    return trainer.train(samples, 0, RATES).learnt


def test_of_the_shown_samples_alone_it_is_told_what_their_tokens_counted_for(make):
    trainer = make()
    samples = make_samples(trainer)
    assert train(trainer, samples, ()) == {}
    trainer = make()
    learnt = train(trainer, samples, (5, 2))
    assert list(learnt) == [2, 5]
    for number, found in learnt.items():
        sample = samples[number].sample
        (advantage,) = {*found.advantages}
        assert abs(advantage - sample.reward) < 1e-7
        assert len(found.advantages) == len(found.weights) == sample.trajectory.num_sampled
        assert {*found.weights} == {1.0}


def test_weights_are_those_of_the_correction_and_0_where_it_rejects(make):
    """Each token's own: e of the difference between its log-probabilities, up to the bound."""
    flags = {"use_tis": True, "tis_mode": "mask"}
    trainer = make(aligned=False, fallback={**flags, "tis_level": "token"})
    samples = make_samples(trainer)
    own = samples[1].sample.rollout_log_probs
    samples[1] = with_log_prob(with_log_prob(samples[1], 0, own[0] + 0.5), 1, own[1] - 9.0)
    weights = train(trainer, samples, [1])[1].weights
    assert abs(weights[0] - 0.6065307) < 1e-4
    assert weights[1] == 0
    assert all(abs(weight - 1) < 1e-4 for weight in weights[2:])
