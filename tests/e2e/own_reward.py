"""A reward with something to learn on a random model: how many tokens of the response are even."""


def score(sample):
    even = sum(token % 2 == 0 for token in sample.response_ids)
    return {"score": even / len(sample.response_ids), "even": even}


def begins_even(sample):
    """As often 1 as 0, so that some groups are without a signal."""
    return float(sample.response_ids[0] % 2 == 0)


def fails_more_and_more(sample):
    """Fails on one sample of the first epoch, two rollouts long, and on every one after it."""
    if sample.weight_version == 2 or (sample.prompt.index, sample.sample_index) == (3, 1):
        raise LookupError("the judge is gone")
    return 1.0


def weighs(sample):
    """Learns from every other token, and holds the others to the reference, or to a teacher."""
    others = [i % 2 for i in range(len(sample.response_ids))]
    rest = [1 - x for x in others]
    return {
        **score(sample),
        "token_weights": {"objective": others, "kl_loss": rest, "opd_kl": [x / 2 for x in rest]},
    }
