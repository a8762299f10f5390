"""The bytes in which the likeliest tokens travel (`onpolicy/ops/likeliest_tokens.py`)."""


def packed(ids, values):
    """Returns the bytes of each of R sampled tokens from arrays [R, k] each."""
    pairs = zip(ids.astype("<i4"), values.astype("<f4"), strict=True)
    return [of_ids.tobytes() + of_values.tobytes() for of_ids, of_values in pairs]
