"""A reward with something to learn on a random model: how many tokens of the response are even."""


def score(sample):
    even = sum(token % 2 == 0 for token in sample.response_ids)
    return {"score": even / len(sample.response_ids), "even": even}
