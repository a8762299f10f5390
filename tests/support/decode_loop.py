"""A rollout engine without a server: the trainer's model, fed in chunks over a paged store.

It computes what SGLang computes with the plug-in's operators, in the order in which SGLang does: the
prompts in chunks, then one token of every sequence at a time, keys and values read from pages.
"""

import torch
import torch.nn.functional as F

from onpolicy.models.delta_net import LayerStates, delta_nets, delta_shape
from onpolicy.models.lora.adapters import CHILD
from onpolicy.ops import PagedLayout
from onpolicy.ops.recurrence import RecurrentLayout, state_rows

CHUNK = 48
"""Tokens of each sequence that are fed at once, while it has these and `ALONE` more left."""

ALONE = 16
"""At least so many tokens of a sequence, or all of a short one, are fed one by one."""


class PagedStore:
    """Keys and values of every layer, on pages of one token in random order."""

    def __init__(self, lens):
        self.pages = torch.randperm(sum(lens), generator=torch.Generator().manual_seed(0)).int()
        self.pages = list(self.pages.split(lens))
        self.layers = []
        self.states = {}

    def write(self, layer, slots, k, v):
        """The whole store of a layer, as [pages, 1, H_kv, D], after writing new keys and values."""
        if layer == len(self.layers):
            count = sum(map(len, self.pages))
            empty = (x.new_full((count, 1, *x.shape[1:]), float("nan")) for x in (k, v))
            self.layers.append(tuple(empty))
        for store, new in zip(self.layers[layer], (k, v), strict=True):
            store[slots, 0] = new
        return self.layers[layer]

    def states_of(self, net, layout, like):
        """The states of a gated delta network, one slot a sequence, in the order of a random draw."""
        shape, count = delta_shape(net), len(self.pages)
        if net.layer_idx not in self.states:
            rows = state_rows(shape.key_dim, shape.value_dim)
            self.states[net.layer_idx] = (
                like.new_full((count, shape.kernel_size - 1, shape.channels), float("nan")),
                torch.full((count, shape.value_heads, rows, shape.value_dim), float("nan")),
            )
        return LayerStates(layout, *self.states[net.layer_idx])


def decode_log_probs(policy, operators, sequences, temperature, on_pass=lambda spans, store: None):
    """Log-probabilities of every token of each sequence but its first: float32 [len - 1] each."""
    store = PagedStore([len(s) for s in sequences])
    done = [0] * len(sequences)
    result = [[] for _ in sequences]
    while live := [i for i, s in enumerate(sequences) if done[i] < len(s) - 1]:
        left = [len(sequences[i]) - 1 - done[i] for i in live]
        counts = [CHUNK if n >= CHUNK + ALONE else 1 for n in left]
        parts = [sequences[i][done[i] : done[i] + n + 1] for i, n in zip(live, counts, strict=True)]
        starts = [done[i] for i in live]
        spans = zip(live, starts, counts, strict=True)
        on_pass([(i, start, start + n) for i, start, n in spans], store)
        hidden = _feed(policy, operators, store, [p[:-1] for p in parts], live, starts)
        targets = torch.tensor([token for part in parts for token in part[1:]])
        log_probs = _log_probs(policy, operators, hidden, targets, temperature)
        for i, part in zip(live, log_probs.split(counts), strict=True):
            result[i].append(part)
            done[i] += len(part)
    return [torch.cat(parts) for parts in result]


@torch.no_grad()
def _feed(policy, operators, store, parts, sequences, starts):
    """Hidden states of new tokens, `parts[j]` of sequence `sequences[j]` after `starts[j]` others."""
    counts = torch.tensor([len(part) for part in parts])
    key_lens = torch.tensor(starts) + counts
    pages = [store.pages[i] for i in sequences]
    spans = zip(starts, key_lens.tolist(), strict=True)
    positions = [torch.arange(start, end) for start, end in spans]
    slots = torch.cat([page[where] for page, where in zip(pages, positions, strict=True)]).long()
    layout = PagedLayout(
        page_table=torch.nn.utils.rnn.pad_sequence(pages, batch_first=True),
        page_size=1,
        key_lens=key_lens.int(),
        query_starts=F.pad(counts.cumsum(0), (1, 0)).int(),
        max_query_len=int(counts.max()),
    )
    layers = iter(range(10**6))

    def attention(q, k, v, *how):
        stores = store.write(next(layers), slots, k, v)
        return operators.paged_attention(q, *stores, layout, *how)

    recurrent = RecurrentLayout(
        query_lens=tuple(counts.tolist()), past_lens=tuple(starts), slots=torch.tensor(sequences)
    )
    nets = {net.layer_idx: net for net in delta_nets(policy.causal_lm)}
    like = policy.head().weight

    def recurrence(layer):
        return store.states_of(nets[layer], recurrent, like)

    hidden = policy.causal_lm.base_model(
        input_ids=torch.tensor([token for part in parts for token in part])[None],
        position_ids=torch.cat(positions)[None],
        use_cache=False,
        attention_function=attention,
        **({"recurrence": recurrence} if nets else {}),
    )[0][0]
    return hidden


@torch.no_grad()
def _log_probs(policy, operators, hidden, targets, temperature):
    head = policy.causal_lm.get_output_embeddings()
    product = operators.linear(hidden, head.weight, head.bias)
    if (adapter := head._modules.get(CHILD)) is not None:
        product = adapter(hidden, product)
    logits = policy.logits_rule.apply(operators, product)
    log_probs = operators.log_softmax(logits, torch.full((len(logits), 1), temperature))
    return log_probs.gather(1, targets[:, None])[:, 0]
