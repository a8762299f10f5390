"""The micro-batch that peers' functions were given, whose answers tests/data/peer_losses.json has."""

import json
from pathlib import Path

import torch

PEERS = json.loads((Path(__file__).parents[1] / "data/peer_losses.json").read_text())
INPUTS = PEERS["inputs"]


def packed(rows):
    return torch.tensor([x for row in rows for x in row])
