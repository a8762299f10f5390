"""The digest of some weights, as trainers and engines say it."""

from onpolicy.weights.digest import WeightDigest


def digest_of(weights):
    """name -> tensor, in any order."""
    digest = WeightDigest()
    for name, tensor in weights.items():
        digest.add(name, tensor)
    return digest.hexdigest()
