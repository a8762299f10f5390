"""Policies with a vision tower, and prompts with images for them."""

import torch

from onpolicy.images.pixels import PixelReader
from onpolicy.images.placed import PlacedImage
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.ops.cpu import CpuOperators

FAMILIES = ("qwen3_vl", "gemma3")


def seeing_policy(path, dtype=torch.float32, threads=1):
    """The policy of a checkpoint with its tower, its weights in `dtype`."""
    reader = CheckpointReader(path)
    policy = empty_policy(load_config(str(path)), CpuOperators(threads), tower_of=str(path))
    model = policy.causal_lm
    state = {name: tensor.to(dtype) for name, tensor in reader.tensors()}
    state |= {name: reader.read(name, ()).to(dtype) for name in reader.tower}
    missing = model.load_state_dict(state, strict=False, assign=True).missing_keys
    model.tie_weights()
    assert {*missing} <= {"lm_head.weight"} and not any(p.is_meta for p in model.parameters())
    return policy


def prompt_with(path, *images, text=(5, 6, 7), seed=0):
    """Tokens with these images among them, and their places."""
    read, generator = PixelReader(path), torch.Generator().manual_seed(seed)
    tokens, placed = [*text], []
    for data in images:
        seen = read(data)
        placed.append(PlacedImage(len(tokens), len(tokens) + seen.num_rows, data, seen.digest))
        tokens += [read.family.image_token] * seen.num_rows
        tokens += torch.randint(2, 200, (4,), generator=generator).tolist()
    return tokens, tuple(placed)


def packed(*prompts, first=4):
    """Prompts with their images, in which every token from `first` on is asked for."""
    tokens, images = zip(*prompts, strict=True)
    asked = [[i >= first for i in range(len(each))] for each in tokens]
    temperatures = [[1.0] * sum(mask) for mask in asked]
    return PackedTokens.pack(tokens, asked, temperatures, images=images)


def log_probs(policy, *prompts):
    """The log-probabilities of each prompt, packed together."""
    batch = packed(*prompts)
    with torch.no_grad():
        found = policy(batch).log_probs
    return found.split([len(tokens) - 4 for tokens, _ in prompts])
