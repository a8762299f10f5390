"""What differs between a whole checkpoint and one that was exported after its text part was trained."""

import json

import torch
from safetensors.torch import load_file

from onpolicy.models.text_part import own_name


def stored(directory):
    """Every tensor of a checkpoint, by the name in its files."""
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def faults(source, exported):
    """In words: a name or a tensor of another part that is not as it was, a text weight that is."""
    before, after = stored(source), stored(exported)
    told, tells = (json.loads((d / "config.json").read_text()) for d in (source, exported))
    for config in (told, tells):
        config.pop("torch_dtype", None), config.pop("dtype", None)
    yield from (f"{name}: in one alone" for name in before.keys() ^ after.keys())
    yield from ["config.json"] * (told != tells)
    for name in before.keys() & after.keys():
        same = torch.equal(bits(before[name]), bits(after[name]))
        if own_name(name) is None and not same:
            yield f"{name}: changed"
        elif own_name(name) is not None and same:
            yield f"{name}: not trained"


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)
