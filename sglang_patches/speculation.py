"""Speculation that changes no sample: a drafted token is taken if its seed draws it there.

Diverges in stock SGLang (`--speculative-algorithm NGRAM`): drafts are accepted by coins against their
probability, or if they are the likeliest where it has no kernel for that, and log-probabilities are
another function's. Here the corpus of SGLang's worker proposes a chain of tokens. It is computed as an
extend, each row over its own prefix; the sampler draws after every row as it does token by token; and
`num_taken` says how many of the drawn tokens are the sample. The keys and values of the others lie
beyond its end and are written again. What the sampler says of each row beside (its entropy) is told of
the rows that are the sample, where SGLang has room for one word on each pass.

Drafts depend on what else was served, and what is taken on neither. One tensor-parallel rank, since
every rank has a corpus of its own. On a CPU, Triton writes no slots and `sgl_kernel` has no wheel: a few
lines of PyTorch take their place. SGLang reserves slots of two drafts for each request, and has room for
one beyond the context, in page tables for none; what does not fit would be lost.
Source: sglang/srt/speculative/ngram_worker.py, sglang/srt/mem_cache/allocation_sizing.py. Can go when
SGLang can be given an acceptance rule.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onpolicy.contract import NumericsContract
from onpolicy.errors import ContractError
from onpolicy.ops.cuts import ALL
from onpolicy.ops.drafts import num_taken
from sglang_patches import registry

WORKER_TARGET = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
TOKENIZE_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
COLLECT_TARGET = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._maybe_collect_customized_info"
)
ROOM_TARGET = "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len"
SLOTS_TARGET = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
TABLES_TARGET = "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.__init__"
TREES = {
    "sglang.kernels.ops.speculative.reconstruct_tree": "reconstruct_indices_from_tree_mask_func",
    "sgl_kernel.speculative": "reconstruct_indices_from_tree_mask",
}
"""What SGLang's worker imports for trees on a CPU: from 0.5.23 on, and before."""


def install(contract: NumericsContract) -> None:
    registry.hook(WORKER_TARGET, _worker, "around")
    registry.hook(TOKENIZE_TARGET, _refuse_cuts, "after")
    registry.hook(COLLECT_TARGET, _spread, "after")
    registry.hook(ROOM_TARGET, _room_for_two, "after")
    if contract.device == "cpu":
        registry.hook(SLOTS_TARGET, assign_slots, "replace")
    else:
        registry.hook(TABLES_TARGET, _room_in_tables, "after")


def _worker(original: Any, algorithm: Any, server_args: Any) -> type:
    if not algorithm.is_ngram():
        raise ContractError(
            f"--speculative-algorithm {algorithm.name}: under the contract NGRAM has to draft, since "
            "draft models are no part of the model that is trained. Choose that, or leave it out."
        )
    return _worker_class(original, algorithm, server_args)


def _refuse_cuts(tokenized: Any, manager: Any, *_: Any, **__: Any) -> None:
    """An answer says of one row for each request what was left to draw from."""
    if manager.server_args.speculative_algorithm is None:
        return
    params = tokenized.sampling_params
    asked = {
        "top_k": 1 < params.top_k < ALL and params.top_k,
        "top_p": params.top_p < 1 and params.top_p,
        "min_p": params.min_p,
        "regex": params.regex,
        "json_schema": params.json_schema,
        "structural_tag": params.structural_tag,
    }
    if values := ", ".join(f"{name}={value!r}" for name, value in asked.items() if value):
        raise ValueError(
            f"{values}: not on a server with --speculative-algorithm, since its answer could not say "
            "what each token was drawn from. Leave it out, or serve without that flag."
        )


def _spread(_: None, __: Any, ___: int, request: Any, *____: Any) -> None:
    """What is told of the tokens of a pass, one after the other; of a prompt's it is told of one."""
    for told in (request.customized_info or {}).values():
        if told and isinstance(told[-1], list):
            told[-1:] = told[-1]


def _room_for_two(extra: int) -> int:
    """Tokens beyond the context that a request's row of slots has room for."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    reserved: int = get_alloc_reserve_per_decode()
    return max(extra, reserved)


def _room_in_tables(_: None, backend: Any, *__: Any, **___: Any) -> None:
    """Page tables of CUDA graphs are as wide as a request's row of slots, not as the context.

    A draft may reach beyond the context, and the kernel of SGLang 0.5.21 then writes its pages into the
    table of the next request, which attends to other tokens than its own (issue 34239 of SGLang's).
    """
    backend.max_context_len = backend.req_to_token.shape[1]
    backend.max_num_pages = -(-backend.max_context_len // backend.page_size)


def _worker_class(original: Any, algorithm: Any, server_args: Any) -> type:
    if registry.contract().device == "cpu":
        sys.modules.update(_no_trees())
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    class ChainWorker(original(algorithm, server_args)):  # type: ignore[misc]
        """SGLang's worker with its corpus, and one chain for each request in the place of a tree."""

        def _init_preallocated_tensors(self) -> None:
            """Those of trees."""

        def forward_batch_generation(
            self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
        ) -> Any:
            is_decode = batch.forward_mode.is_decode()
            if is_decode:
                self._draft(batch)
            result = self.target_worker.forward_batch_generation(batch, is_verify=is_decode)
            if is_decode:
                drawn = self._draw(batch, result.logits_output)
                counts = num_taken(batch.spec_info.draft_token.view_as(drawn)[:, 1:], drawn)
                _tell_taken(result.logits_output, counts)
                new_lens = batch.seq_lens + counts
                self._update_ngram_corpus(batch)
                self._forget_departed(batch)
                batch.forward_mode = ForwardMode.DECODE
                result.next_token_ids = drawn.flatten()
            else:
                drawn = result.next_token_ids.new_zeros(len(batch.reqs), self.draft_token_num)
                drawn[:, 0] = result.next_token_ids
                counts, new_lens = torch.ones_like(batch.seq_lens), batch.seq_lens.clone()
            if on_publish is not None:
                on_publish(new_lens)
            result.accept_lens, result.new_seq_lens = counts.int(), new_lens
            result.speculative_num_draft_tokens = self.draft_token_num
            result.next_draft_input = NgramVerifyInput(
                draft_token_num=self.draft_token_num,
                new_seq_lens=new_lens,
                accept_tokens=drawn.flatten(),
                accept_lens=result.accept_lens,
            )
            return result

        def _draft(self, batch: Any) -> None:
            """Have the batch compute, after every sequence, its last token and what may follow."""
            tokens, mask = self._prepare_draft_tokens(batch)
            count, device = self.draft_token_num, batch.seq_lens.device
            chains = torch.from_numpy(longest_chains(tokens, mask, count)).to(device)
            places = batch.seq_lens[:, None] + torch.arange(count, device=device)
            slots = batch.req_to_token_pool.req_to_token[batch.req_pool_indices[:, None], places]
            # Beyond the context nothing is taken, and positions may be rows of a table.
            last = self.model_runner.model_config.context_len - 1
            batch.forward_mode = ForwardMode.TARGET_VERIFY
            batch.input_ids, batch.out_cache_loc = chains.flatten(), slots.flatten().long()
            batch.spec_info = NgramVerifyInput(
                draft_token=batch.input_ids,
                positions=places.clamp(max=last).flatten(),
                draft_token_num=count,
                new_seq_lens=batch.seq_lens,
            )

        def _draw(self, batch: Any, logits_output: Any) -> Tensor:
            """What each row's seed draws after it, int64 [B, K]; log-probabilities go to the output."""
            count = self.draft_token_num
            drawn: Tensor = self.model_runner.sampler(
                logits_output,
                of_rows(batch.sampling_info, count),
                batch.return_logprob,
                _repeated(batch.top_logprobs_nums, count),
                _repeated(batch.token_ids_logprobs, count),
                batch.spec_info.positions,
            )
            if batch.return_logprob:
                by_request = logits_output.next_token_logprobs.view(-1, count)
                logits_output.next_token_logprobs = by_request
            return drawn.view(-1, count).long()

        def _forget_departed(self, batch: Any) -> None:
            present = {request.rid for request in batch.reqs}
            if departed := self._prev_decode_rids - present:
                self.ngram_corpus.erase_match_state(list(departed))
            self._prev_decode_rids: set[str] = present

    return ChainWorker


def _tell_taken(logits_output: Any, counts: Tensor) -> None:
    """Leave each request what was said of its first `counts` [B] rows, among all rows [B * K]."""
    if told := logits_output.customized_info:
        logits_output.customized_info = {k: taken(x, counts.tolist()) for k, x in told.items()}


def taken(of_rows: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """The first `counts` of each request's values, which has equally many: [B * K] -> B lists."""
    each = len(of_rows) // max(len(counts), 1)
    return [[*of_rows[i * each : i * each + n]] for i, n in enumerate(counts)]


def longest_chains(
    tokens: np.ndarray[Any, Any], mask: np.ndarray[Any, Any], count: int
) -> np.ndarray[Any, Any]:
    """The longest path from the root of each tree, filled up with its last token.

    tokens: int64 [B * count]; mask: [B * count * count], whether a node is on another's path, which
    comes after it -> int64 [B, count].
    """
    trees = mask.reshape(-1, count, count).astype(bool)
    chains = []
    for nodes, paths in zip(tokens.reshape(-1, count), trees, strict=True):
        chain = nodes[paths[paths.sum(-1).argmax()]]
        chains.append(np.pad(chain, (0, count - len(chain)), mode="edge"))
    return np.stack(chains)


def of_rows(info: Any, count: int) -> Any:
    """What SGLang says of the sampling of every request, for each of its `count` rows."""
    rows = copy.copy(info)
    for name in ("temperatures", "sampling_seed", "top_ks", "top_ps", "min_ps"):
        setattr(rows, name, getattr(info, name).repeat_interleave(count, 0))
    return rows


def _repeated(of_requests: list[Any] | None, count: int) -> list[Any] | None:
    return None if of_requests is None else [x for x in of_requests for _ in range(count)]


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write the slots of each request's next tokens, which follow each other in `out_cache_loc`, into
    its row of `req_to_token`, from start to end."""
    lens = end_offset - start_offset
    parts = out_cache_loc.to(req_to_token.dtype).split(lens.tolist())
    for row, start, part in zip(
        req_pool_indices.tolist(), start_offset.tolist(), parts, strict=True
    ):
        req_to_token[row].narrow(0, start, len(part)).copy_(part)


def _no_trees() -> dict[str, ModuleType]:
    """Modules in the place of those of TREES, which import `sgl_kernel`; a chain needs none of it."""
    modules = {name: ModuleType(name) for name in TREES}
    for name, module in modules.items():
        setattr(module, TREES[name], None)
    return modules
