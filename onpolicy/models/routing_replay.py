"""Rollout routing replay (R3): every token is trained with the experts that the rollout chose.

The engines' kernels differ in the last bits of a router's scores. That sometimes puts another
expert into the top k, which changes the token's log-probability a lot. Here the choice is the
rollout's, and the routing weights are the trainer's own, with gradient.
Source: Ma et al., Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers
(arXiv 2510.11370).
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor, nn

from onpolicy.models.by_operators import watch_choices
from onpolicy.models.experts import AlignedExperts, expert_sizes, experts_of
from onpolicy.models.facts import ModelFacts

OWN_CHOICE = -1
"""Placeholder where the rollout's experts are not known: the trainer's router chooses."""


class RoutingReplay:
    """The rollout's experts for the tokens of a micro-batch, and counts of the differing choices.

    T: tokens; L: layers of the model, dense ones included; k: experts per token.
    """

    def __init__(self, experts: Tensor, chosen_per_token: int):
        """Take the experts, integer [T, L * k], layer by layer."""
        self.experts = experts.view(len(experts), -1, chosen_per_token).long()
        # Counts stay on the device: reading them would synchronise in every layer.
        self._replayed = self._differing = torch.zeros((), device=experts.device)

    def choose(self, layer: int, num_experts: int, own: Tensor, candidates: int) -> Tensor:
        """Return the rollout's experts in place of `own`, the router's: int64 [..., k] -> [..., k].

        A choice out of fewer `candidates` is a choice of expert groups, and is returned as it is.
        """
        if candidates != num_experts:
            return own
        rollout = self.experts[:, layer].view(own.shape)
        known = (rollout != OWN_CHOICE).all(-1)
        differs = known & (rollout.sort(-1).values != own.sort(-1).values).any(-1)
        self._replayed = self._replayed + known.sum()
        self._differing = self._differing + differs.sum()
        return torch.where(known[..., None], rollout, own)

    def counts(self) -> dict[str, Tensor]:
        """Return the numbers of replayed (token, layer) pairs, and of pairs where `own` differed."""
        return {"routing/num_replayed": self._replayed, "routing/num_differing": self._differing}


def replay_routing(model: nn.Module, replay: RoutingReplay | None) -> None:
    """Make every router of `model` follow `replay` from now on; None: its own choice."""
    for name, block in model.named_modules():
        if hasattr(block, "replayed_choice"):
            experts = next(m for m in block.children() if isinstance(m, AlignedExperts))
            layer = int(re.findall(r"layers\.(\d+)", name)[-1])
            choice = replay and partial(replay.choose, layer, len(experts.gate_up_proj))
            block.replayed_choice = choice


def can_be_replayed(facts: ModelFacts) -> bool:
    """Return whether every router of the model chooses by one top-k over all experts of its layer.

    A router that cannot run on the meta device counts as one that does not.
    """
    wanted = [expert_sizes(experts)[0] for experts in experts_of(facts.model)]
    try:
        with watch_choices() as candidates:
            facts.run_one_token()
    except Exception:  # a model's own code may raise anything
        return False
    return [n for n in candidates if n in wanted] == wanted
