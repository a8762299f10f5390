"""Mismatch of stock and aligned engines on trained weights: SmolLM2-135M in chats of many turns.

    python -m benchmarks.stock_mismatch --hf-checkpoint runs/trained_weights/smollm2/model \
      --json benchmarks/results/stock_mismatch.json --image benchmarks/results/stock_mismatch.png

Two chats at each of three temperatures grow in a real SGLang server, to 4,096 tokens at temperature 1.0
and to 2,048 at others: a user asks for the meaning of one quarter of this repository's LICENSE after
another, and each answer, of at most 96 tokens, is sampled after all that was said before. The trainer
(FSDP2, bfloat16) then scores whole chats, and every sampled token has two log-probabilities: d is the
trainer's less the engine's, and k3 is exp(d) - d - 1. Stock engines come first, then aligned ones with
the operators of `auto`, in the same chats until their answers differ. `--dtype float16` measures float16
instead, and adds that to the record of `--json`. `--from FILE` measures nothing: it draws a record of
both again and prints its table for docs/trained_weights.md. Longer chats at all temperatures did not end
in half an hour on two busy cores: SGLang's stock attention without a GPU computes every turn's whole
past again.

Predictions, written before the first run:

- aligned: no token differs at any temperature or context;
- stock, temperature 1.0: almost every token differs, k3 is 1e-3 to 4e-3, mean |d| 0.03 to 0.05;
- improbable tokens (p < 0.01) have a mean |d| at least three times that of probable ones (p > 0.9);
- mean |d| grows with the context, but less than two times from the first to the last quarter;
- mean |d| falls with the temperature, because sampled tokens become more probable, although the
  logits' errors are divided by it: k3 at 0.3 is below that at 1.0;
- beyond 1.28 times are less than 2 % of tokens at temperature 1.0, beyond 2 times less than 0.2 %.

Predictions for float16, written before its first run. Its numbers have 3 more bits than bfloat16's, and
arXiv:2510.26788 reports that it removes most of the mismatch:

- aligned: no token differs, and no number of SmolLM2 (at most 22,272) overflows;
- stock: nearly every token differs; at temperature 1.0 mean |d| is 4 to 10 times below bfloat16's 0.045
  (8 times would be 0.006), and k3 20 to 80 times below its 0.0022;
- no token is beyond 1.28 times.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

import torch

from onpolicy.cli.command import put_out
from onpolicy.config import groups
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.models.hf_config import load_config
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.outputs.directory import versions
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.run.commands.depth_table import FACTORS, differences
from onpolicy.run.commands.verification import make_train_config
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import on_cluster
from onpolicy.run.launch.contracts import contract_for
from onpolicy.types import Request, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "common"))
from page_tables import table

LICENSE = ROOT / "LICENSE"
PIECE = 2800
"""The number of the licence's characters in a question."""

CONTEXT, SHORTER = 4096, 2048
TEMPERATURES = {1.0: CONTEXT, 0.7: SHORTER, 0.3: SHORTER}
"""The tokens of a whole chat at each temperature. They are compared up to the shorter."""

CHATS, ANSWER = 2, 96
"""Chats at a temperature, and tokens of an answer."""

CONTEXTS = (1024, 2048, 3072, CONTEXT)
POSITIONS = (1, 4, 16, ANSWER)
PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 1.0)
"""The upper ends of the ranges that tokens are sorted into; positions count from 1."""


class Token(NamedTuple):
    """A sampled token and its two log-probabilities."""

    temperature: float
    context: int
    """The number of tokens before it."""
    position: int
    """Its number within its answer, from 1."""
    rollout: float
    train: float


@dataclass
class Chat:
    """A chat that grows by questions and answers."""

    number: int
    temperature: float
    token_ids: list[int]
    prompt_len: int
    sampled: list[tuple[int, int, float]] = field(default_factory=list)
    """The place of each sampled token, its number within its answer, and its log-probability."""

    def request(self, end: int) -> Request:
        return Request(
            prompt_ids=list(self.token_ids),
            sampling_seed=sampling_seed(0, "chat", self.number),
            params=SamplingParams(
                temperature=self.temperature, max_new_tokens=ANSWER, stop_token_ids=(end,)
            ),
        )

    def answer(self, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        begins = len(self.token_ids)
        self.sampled += [(begins + i, i + 1, value) for i, value in enumerate(log_probs)]
        self.token_ids += token_ids


def question(number: int, turn: int) -> str:
    """Return what the user asks in a turn; chats begin at different places of the licence."""
    text = " ".join(LICENSE.read_text().split())
    pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
    return f"What does this mean?\n\n{pieces[(2 * number + turn) % len(pieces)]}"


def open_chats(tokenizer: Any) -> list[Chat]:
    """Return the chats of all temperatures with their first questions."""
    chats = []
    for i, temperature in enumerate(t for t in TEMPERATURES for _ in range(CHATS)):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question(i % CHATS, 0)}],
            add_generation_prompt=True,
            tokenize=False,
        )
        ids = tokenizer.encode(text)
        chats.append(Chat(i, temperature, ids, len(ids)))
    return chats


def grow(chats: Sequence[Chat], engines: EnginePair, tokenizer: Any) -> None:
    """Sample answers and append questions until every chat is as long as CONTEXT allows."""
    end, turn, growing = tokenizer.eos_token_id, 0, list(chats)
    while growing:
        requests = [chat.request(end) for chat in growing]
        for chat, completion in zip(growing, engines.generate(requests), strict=True):
            chat.answer(completion.response_ids, completion.rollout_log_probs)
        turn, longer = turn + 1, []
        for chat in growing:
            closed = "" if chat.token_ids[-1] == end else "<|im_end|>"
            asked = question(chat.number % CHATS, turn)
            ids = tokenizer.encode(
                f"{closed}\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
            )
            if len(chat.token_ids) + len(ids) + ANSWER <= TEMPERATURES[chat.temperature]:
                chat.token_ids += ids
                longer.append(chat)
        print(f"turn {turn}: {max(len(chat.token_ids) for chat in chats)} tokens", flush=True)
        growing = longer


def score(chats: Iterable[Chat], engines: EnginePair) -> list[Token]:
    """Return the sampled tokens of all chats with the trainer's log-probabilities beside them."""
    tokens = []
    for chat in chats:
        (found,) = engines.trainer.rescore([chat.token_ids], [chat.prompt_len], chat.temperature)
        for place, position, value in chat.sampled:
            train = float(found.log_probs[place - chat.prompt_len])
            tokens.append(Token(chat.temperature, place, position, value, train))
    return tokens


def measure(checkpoint: str, kind: str, run_dir: str, dtype: groups.Dtype) -> dict[str, Any]:
    """Return the statistics of one kind of engines, with seconds and the load before."""
    load, started = os.getloadavg()[0], time.monotonic()
    is_aligned = kind == "aligned"
    config = VerifyConfig(
        model=groups.ModelConfig(hf_checkpoint=checkpoint, dtype=dtype),
        num_prompts=CHATS * len(TEMPERATURES),
        max_prompt_len=CONTEXT - ANSWER,
        max_new_tokens=ANSWER,
        step=False,
        true_on_policy_mode=is_aligned,
        run_dir=f"{run_dir}/{dtype}/{kind}",
    )
    hf_config, tokenizer = load_config(checkpoint), load_tokenizer(checkpoint)
    train_config = make_train_config(config, CONTEXT - ANSWER)
    patient = replace(train_config.engine, rollout_health_timeout=600.0)  # on a busy machine
    train_config = replace(train_config, engine=patient)
    contract = contract_for(train_config, hf_config, aligned=is_aligned)
    chats = open_chats(tokenizer)
    with on_cluster(train_config, contract) as cluster:
        engines = cluster.make_engines(
            train_config, hf_config, contract, Path(config.run_dir), longest_sequence=CONTEXT
        )
        try:
            engines.start()
            engines.push_weights(0)
            grow(chats, engines, tokenizer)
            tokens = score(chats, engines)
        finally:
            engines.stop()
    return {**tables(tokens), "seconds": round(time.monotonic() - started), "load": load}


def tables(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return the statistics at each temperature, and at 1.0 by three properties of a token."""

    def by(ends: Sequence[float], key: Callable[[Token], float]) -> dict[str, Any]:
        found = {}
        for begin, end in zip((-math.inf, *ends), ends, strict=False):
            inside = [t for t in tokens if t.temperature == 1.0 and begin < key(t) <= end]
            if inside:
                found[str(end)] = statistics(inside)
        return found

    return {
        "temperature": {
            str(each): statistics(
                [t for t in tokens if t.temperature == each and t.context <= SHORTER]
            )
            for each in TEMPERATURES
        },
        "context": by(CONTEXTS, lambda t: t.context),
        "position": by(POSITIONS, lambda t: t.position),
        "probability": by(PROBABILITIES, lambda t: math.exp(t.rollout)),
    }


def statistics(tokens: Sequence[Token]) -> dict[str, float]:
    """Return how far the two log-probabilities of some tokens are apart, in nats."""
    sides = ([t.train for t in tokens], [t.rollout for t in tokens])
    apart = differences(*(torch.tensor(side, dtype=torch.float64) for side in sides))
    return {
        "tokens": len(tokens),
        "mismatched": sum(t.train != t.rollout for t in tokens),
        "k3": apart["k3_kl_mean"],
        "mean": apart["mean_abs_diff"],
        "largest": apart["max_abs_diff"],
        "probability": max(abs(math.exp(t.train) - math.exp(t.rollout)) for t in tokens),
        **{f"beyond_{float(far)}": apart[f"share_beyond_{far}"] for far in FACTORS},
    }


def page_tables(record: Mapping[str, Any]) -> str:
    """Return the page's table of stock engines, in bfloat16 and in float16: by temperature, then by the
    token's probability."""
    titles = {
        "temperature": "temperature {1} (up to {0:,} tokens)",
        "probability": "{0} < probability <= {1}",
    }
    rows = []
    for name, title in titles.items():
        before: float = SHORTER if name == "temperature" else 0
        for text, of in record["stock"][name].items():
            end = int(text) if text.isdigit() else float(text)
            narrow = record["float16"]["stock"][name][text]
            cells = [
                f"{of['tokens']:,}",
                *(f"{of[key]:.2g}" for key in ("k3", "mean", "largest")),
                *(f"{narrow[key]:.2g}" for key in ("k3", "mean")),
            ]
            rows.append([title.format(before, end), *cells])
            before = before if name == "temperature" else end
    columns = ("number", "k3", "mean", "largest", "float16: k3", "float16: mean")
    return table(("tokens", *columns), rows)


def draw(record: Mapping[str, Any], image: Path) -> None:
    """Draw a PNG with mean |d| of stock engines by context, position and probability."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "context": "tokens before it, up to",
        "position": "number in its answer, up to",
        "probability": "probability, up to",
    }
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        for kind, style in (("stock", "o-"), ("aligned", "s--")):
            found = record[kind][name]
            axis.plot(
                range(len(found)), [each["mean"] for each in found.values()], style, label=kind
            )
        axis.set_xticks(range(len(found)), [f"{float(end):,g}" for end in found])
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean |difference|, nats")
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--hf-checkpoint", default="")
    parser.add_argument("--run-dir", default="runs/stock_mismatch")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--json", default="")
    parser.add_argument("--image", default="")
    parser.add_argument("--from", default="", dest="record", help="a record to draw")
    args = parser.parse_args()
    if args.record:
        record = json.loads(Path(args.record).read_text())
        print(page_tables(record))
    else:
        record = measured = {"versions": versions()}
        if args.dtype == "float16":
            record = {**json.loads(Path(args.json).read_text()), "float16": measured}
        for kind in ("stock", "aligned"):
            measured[kind] = measure(args.hf_checkpoint, kind, args.run_dir, args.dtype)
            put_out(record, args.json)
    if args.image:
        draw(record, Path(args.image))


if __name__ == "__main__":
    main()
