"""A policy that generates as a rollout engine does, without one: chunked prefill, paged decoding.

The keys and values of every sequence lie on pages in random order. Each step computes the log-
probabilities of a batch of any composition, with the same modules as the trainer's forward pass.
"""

import torch
from transformers import AutoModelForCausalLM

from onpolicy.models.align import align_modules
from onpolicy.models.attention_function import ATTENTION_NAME
from onpolicy.models.policy import PolicyModel
from tests.support.gpu.paged_attention import PagedBatch


def random_policy(config, operators, dtype, device, seed=0):
    """A policy with random weights, norms included, made on `device`.

    Rotary frequencies stay float32, as in a loaded checkpoint: only parameters are in `dtype`.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    for name, parameter in causal_lm.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.data = parameter.data.to(dtype)
    causal_lm.eval()
    align_modules(causal_lm, operators)
    return PolicyModel(causal_lm, operators)


class PagedModel:
    """The policy and one paged key/value store per layer, for sequences numbered from 0."""

    def __init__(self, policy, attention, sequences, longest, page_size, seed=0):
        config = policy.causal_lm.config
        self.policy, self.attention, self.page_size = policy, attention, page_size
        self.head = policy.causal_lm.get_output_embeddings()
        self.device = self.head.weight.device
        pages = -(-longest // page_size)
        generator = torch.Generator().manual_seed(seed)
        table = torch.randperm(sequences * pages, generator=generator).view(sequences, pages)
        self.page_table = table.to(self.device, torch.int32)
        offsets = torch.arange(page_size, device=self.device)
        self.rows = (self.page_table[..., None].long() * page_size + offsets).flatten(1)
        shape = (self.rows.numel(), config.num_key_value_heads, config.head_dim)
        self.stores = [
            (self.head.weight.new_zeros(shape), self.head.weight.new_zeros(shape))
            for _ in range(config.num_hidden_layers)
        ]

    @torch.no_grad()
    def hidden(self, tokens, positions, rows, batch):
        """Hidden states of a batch's tokens, all int64 [T] -> [T, K]; `rows` receive their keys."""
        layers = iter(self.stores)

        def attend(q, k, v, scores):
            keys, values = next(layers)
            keys[rows], values[rows] = k, v
            return self.attention(q, keys, values, batch, scores.scale)[0]

        return self.policy.causal_lm.base_model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            attention_function=attend,
        )[0][0]

    @torch.no_grad()
    def log_probs(self, hidden, temperature):
        """Of every next token: [M, K], float32 [M, 1] -> float32 [M, V]"""
        operators = self.policy.operators
        logits = operators.linear(hidden, self.head.weight, self.head.bias)
        return operators.log_softmax(logits, temperature)

    def extend(self, sequences, tokens, starts):
        """Compute tokens of several sequences; hidden state of the last one of each: [S, K].

        `starts[i]` tokens of `sequences[i]` are in the cache already.
        """
        lens = [len(some) for some in tokens]
        ends = [start + n for start, n in zip(starts, lens, strict=True)]
        chosen = torch.tensor(sequences, device=self.device)
        spans = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        positions = torch.cat(spans).to(self.device)
        owners = chosen.repeat_interleave(torch.tensor(lens, device=self.device))
        hidden = self.hidden(
            torch.tensor([t for some in tokens for t in some], device=self.device),
            positions,
            self.rows[owners, positions],
            PagedBatch.of(self.page_table[chosen], self.page_size, lens, ends),
        )
        return hidden[torch.tensor(lens, device=self.device).cumsum(0) - 1]


class DecodeGraph:
    """One decoding step of the first `batch_size` sequences, held in a CUDA graph.

    Capturing it writes keys at position 0 of every sequence, so it comes before the prefill. On a
    CPU, which has no graphs, a replay is the step itself: for rehearsals.
    """

    def __init__(self, model, batch_size):
        self.model, device = model, model.device
        self.tokens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.lens = torch.ones(batch_size, dtype=torch.int32, device=device)
        self.batch = PagedBatch(
            page_table=model.page_table[:batch_size],
            cache_seqlens=self.lens,
            cu_seqlens_q=torch.arange(batch_size + 1, dtype=torch.int32, device=device),
            max_seqlen_q=1,
            page_size=model.page_size,
        )
        self.temperature = torch.ones(batch_size, 1, device=device)
        self.graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        if self.graph is not None:
            self._capture(self.graph)

    def step(self):
        """The step without the graph: log-probabilities float32 [B, V]."""
        positions = self.lens.long() - 1
        rows = self.model.rows[: len(self.tokens)].gather(1, positions[:, None])[:, 0]
        hidden = self.model.hidden(self.tokens, positions, rows, self.batch)
        return self.model.log_probs(hidden, self.temperature)

    def _capture(self, graph):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles everything, outside of the capture
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self.out = self.step()

    def replay(self):
        """Decode `tokens`, int64 [B], as the last ones of sequences that are then `lens` long."""
        if self.graph is None:
            return self.step()
        self.graph.replay()
        return self.out
