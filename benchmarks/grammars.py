"""Cost of grammars at a vocabulary of 151,936 tokens: their masks, and a server and a trainer within.

    python -m benchmarks.grammars [--json FILE]

Each grammar is walked for 200 tokens, drawn from the allowed ones: milliseconds for a mask and for
packing it, and bytes of the sets. Then a server and a trainer of a model with a hidden size of 64, which
computes next to nothing beside them, sample and train the same number of tokens without a grammar and
within each, in turns. The vocabulary is made up: bytes, and strings of letters, digits and punctuation.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from onpolicy.cli.command import put_out
from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.models.token_grammars import Matcher
from onpolicy.ops.kept_tokens import packed
from onpolicy.outputs.directory import versions
from onpolicy.rollout.sample_requests import trajectories_of
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.contracts import contract_for
from onpolicy.train import distributed
from onpolicy.trajectory import Grammar
from onpolicy.types import Prompt, Request, Sample, SamplingParams

VOCAB, SAMPLES, RESPONSE, WALK = 151936, 8, 48, 200
LETTERS = "etaoinshrdlucmfwypvbgkjqxzETAOINSHRDLU"
OTHERS = '0123456789"{}[]:,.-_()/\\+=<>Ġ'

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
GRAMMARS = {
    name: Grammar(kind=kind, text=text, stop_token_ids=(1,))
    for name, kind, text in (
        ("JSON of two fields", "json_schema", json.dumps(SCHEMA)),
        ("words of six letters", "regex", "([a-f]{3,5}-){40}[0-9]{2}"),
        ("any text, then a tag", "regex", "(.|\n)*<answer>[0-9]+</answer>"),
    )
}


def make_checkpoint(path: Path) -> None:
    """Make a Qwen3 of random weights with a byte-level vocabulary of random strings."""
    rng, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    while len(vocabulary) < VOCAB:
        length, is_word = min(12, 2 + int(rng.expovariate(0.35))), rng.random() < 0.8
        letters = LETTERS if is_word else LETTERS + OTHERS
        token = rng.choice(("Ġ", "")) * is_word + "".join(rng.choices(letters, k=length))
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def milliseconds(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    found = work()
    return found, (time.perf_counter() - started) * 1e3


def begin(checkpoint: str, grammar: Grammar) -> Matcher:
    """Return the position of an answer that has not begun."""
    return Matcher(checkpoint, False, grammar.kind, grammar.text, grammar.stop_token_ids)


def walked(checkpoint: str, grammar: Grammar) -> dict[str, float]:
    """Measure a walk within a grammar."""
    rng, times, packing, sizes = random.Random(1), [], [], []
    matcher, compiled = milliseconds(lambda: begin(checkpoint, grammar))
    for _ in range(WALK):
        if matcher.has_ended():
            matcher = begin(checkpoint, grammar)
        allowed, took = milliseconds(matcher.allowed)
        (kept,), packs = milliseconds(lambda: packed(allowed[None]))  # noqa: B023
        times.append(took)
        packing.append(packs)
        sizes.append(len(kept))
        ids = allowed.nonzero()[:, 0].tolist()
        matcher.take(rng.choice(ids))
    return {
        "compile_ms": compiled,
        "mask_ms": median(times),
        "largest_mask_ms": max(times),
        "pack_ms": median(packing),
        "bytes_of_a_set": fmean(sizes),
    }


def pair_of(checkpoint: Path, logs: Path) -> EnginePair:
    """Return an aligned server and trainer, in bfloat16."""
    distributed.init_process_group()
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint)),
        rollout=groups.RolloutConfig(num_rollout=1, rollout_batch_size=1, n_samples_per_prompt=2),
        algorithm=groups.AlgorithmConfig(advantage_estimator="reinforce"),
        trainer=groups.TrainerConfig(max_tokens_per_gpu=500),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )
    hf_config = load_config(str(checkpoint))
    return EnginePair(config, hf_config, contract_for(config, hf_config, aligned=True), logs)


def sampled_and_trained(pair: EnginePair, grammar: Grammar | None) -> tuple[float, float]:
    """Return the seconds of a server, and of a trainer, after comparing every token."""
    params = SamplingParams(
        temperature=1.0, max_new_tokens=RESPONSE, stop_token_ids=(1,),
        ignore_eos=grammar is None, grammar=grammar,
    )  # fmt: skip
    requests = [
        Request(prompt_ids=[9, 8, 7 + i], sampling_seed=i, params=params) for i in range(SAMPLES)
    ]
    answers, sampling = milliseconds(lambda: pair.generate(requests))
    prompt = Prompt(index=0, prompt_ids=[9], label="", text="")
    samples = [
        Sample(
            prompt=prompt,
            sample_index=i,
            trajectory=each,
            reward=(-1.0) ** i,
            group=0,
            episode=i,
        )
        for i, each in enumerate(trajectories_of(requests, answers))
    ]
    outcome, training = milliseconds(lambda: pair.trainer.train(samples, 0, [0.0]))
    assert outcome.metrics["parity/num_mismatched_tokens"] == 0
    count = outcome.metrics["parity/num_compared_tokens"]
    return sampling / count, training / count


def resident_mib() -> int:
    """Return the memory of this process and of the server's processes."""
    me = psutil.Process()
    return sum(p.memory_info().rss for p in (me, *me.children(recursive=True))) >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "model"
        make_checkpoint(checkpoint)
        path, words = str(checkpoint), GRAMMARS["words of six letters"]
        _, tokenizer = milliseconds(lambda: begin(path, words))
        masks = {name: walked(path, each) for name, each in GRAMMARS.items()}
        pair = pair_of(checkpoint, Path(directory))
        try:
            pair.start()
            pair.push_weights(0)
            kinds = {"none": None, **GRAMMARS}
            sampled_and_trained(pair, None)
            before = resident_mib()
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
            for _ in range(args.repetitions + 1):
                for name, each in kinds.items():
                    found[name].append(sampled_and_trained(pair, each))
            after = resident_mib()
        finally:
            pair.stop()
    spent = {name: [median(x) for x in zip(*each[1:], strict=True)] for name, each in found.items()}
    result = {
        "what": "grammars",
        "vocabulary": VOCAB,
        "tokenizer_ms": tokenizer,
        "masks": masks,
        "sampling_ms_a_token": {name: x for name, (x, _) in spent.items()},
        "training_ms_a_token": {name: x for name, (_, x) in spent.items()},
        "resident_mib": {"before": before, "after": after},
        "versions": versions(),
    }
    put_out(result, args.json)


if __name__ == "__main__":
    main()
