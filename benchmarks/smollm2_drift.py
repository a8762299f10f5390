"""Measures what each correction leaves of the drift on SmolLM2-135M, whose weights are trained.

    python -m benchmarks.smollm2_drift --json benchmarks/results/smollm2_drift.json [--engines int4 ...]
    python -m benchmarks.smollm2_drift --from benchmarks/results/smollm2_drift.json   # writes the page

Where all answers to a prompt have the advantage b, the mean gradient on-policy is zero; what is left of
it off-policy is the drift b (mu - pi) of docs/collapse.md. A real SGLang server samples answers to 16
products that this model never gets right, each answer has the advantage -1, and the trainer (FSDP2,
bfloat16, the code of a run) makes the gradients of five batches with one answer to every prompt; no step
is taken. Batches are independent, so the mean product of two of their gradients is the squared length
of the mean gradient, without the part that chance has in it.

- drift: the share of the uncorrected drift that is left, along its own direction: the mean product of
  an arm's gradient with the uncorrected gradient of another batch, over that of two uncorrected ones.
  0 is none, 1 all of it. The interval is 95 %, by a jackknife over batches.
- elsewhere: the length of the arm's own mean gradient, as a share of the uncorrected one's length: a
  correction that only turns the drift would have 0 and 1.
- noise: the length of what is not mean in a batch's gradient, as a share of the uncorrected one's.
- taken: the length of the mean of what the arm takes from the uncorrected gradient, in the same unit.

Arms are those of examples/collapse/arms, score centering over the engine's 64 likeliest tokens. Engines:
*int4*, stock operators and linear weights rounded to 4 bits (int4_group128), which the trainer's are
not; *aligned*, both sides rounded and the same bits, whose gradients are multiplied with the
uncorrected ones of *int4*; *bf16*, stock operators alone; *int4, 1024 told*, as *int4* with score
centering over 1,024 tokens, which a second run added to the record.

Predictions, written after a pilot (int4, another seed, two batches of 32: the uncorrected mean gradient
had a squared length of 47 with a noise of 16, and tis_token left 0.13 of it) and before the run:

1. aligned: no token differs, and the squared length of its mean gradient is less than a hundredth of
   that of int4's `nothing`.
2. int4: `centered` and `centered_tis` leave at most 0.1 of the drift, `tis_token` 0.05 to 0.25.
3. int4: `tis_sequence` leaves less than 0.1 and has less than half of the noise, since nearly all of its
   weights are close to zero: it learns from few answers.
4. int4: `kpop` and `mis_token` leave more than `tis_token`, and `topr` differs from it by at most 0.1,
   since all advantages are negative here.
5. int4: `geo_rs_0.01` rejects more than nine answers of ten, so that what it leaves says little.
6. int4: `bypass` drifts the other way, -0.1 or below: it drops the tokens that the trainer makes much
   less probable, and the weights of all tokens together would leave nothing.
7. bf16: the uncorrected mean gradient is no longer than chance makes it, while what `centered_tis` takes
   away is a drift beyond chance, less than a tenth as long as int4's.

Written after that run, in which `centered` left 0.27 of it, and before the second:

8. int4, 1024 told: `centered` leaves at most 0.1, so that it is the tokens that were not told.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from onpolicy.compat.process import prepare_process

prepare_process()  # before torch is imported

import torch
from torch.distributed.tensor import DTensor

from benchmarks.smollm2_study import EXAMPLE, ROOT, problems
from onpolicy.cli.command import put_out
from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, validate
from onpolicy.models.hf_config import load_config
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.outputs.directory import versions
from onpolicy.rollout.sample_requests import make_requests, trajectories_of
from onpolicy.rollout.seeds import seeds_of
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training.learner import Learner
from onpolicy.training.policy_trainer import PolicyTrainer
from onpolicy.types import Prompt, Sample, SamplingParams

sys.path.insert(0, str(ROOT / "examples" / "common"))
from driver import surroundings
from page_tables import STUDENT, between, table

ARMS = ROOT / "examples" / "collapse" / "arms"
PAGE = ROOT / "examples" / "collapse" / "results" / "README.md"
INT4 = ("--rollout-weight-format", "int4_group128")
STOCK = ("--no-true-on-policy-mode", "--operators", "auto")
ENGINES: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "int4": (
        (*STOCK, *INT4),
        64,
        ("nothing", "tis_token", "tis_sequence", "mis_token", "kpop", "topr", "geo_rs_0.01", "bypass",
         "centered", "centered_tis"),
    ),
    "aligned": (("--true-on-policy-mode", *INT4), 0, ("aligned_rounded",)),
    "bf16": (STOCK, 64, ("nothing", "centered_tis")),
    "int4, 1024 told": ((*STOCK, *INT4), 1024, ("nothing", "centered")),
}  # fmt: skip
"""{name: (flags of both engines, likeliest tokens that it tells, arms that train on its samples)}"""

PROMPTS, BATCHES = 16, 5
"""Prompts, and batches with an answer to each."""

ANSWER = 24
SEED = 0

METRICS = (
    "correction/rejected_fraction", "mismatch/ess", "train/k3_kl",
    "parity/num_mismatched_tokens", "parity/num_compared_tokens",
)  # fmt: skip

Gradient = list[torch.Tensor]
"""Of each parameter, float32, flat."""


def config_of(arm: str, engine: str, work: Path) -> TrainConfig:
    """Return the run whose first step an arm would take on an engine's samples."""
    flags, told, _ = ENGINES[engine]
    config = parse(
        TrainConfig,
        [
            "--custom-config-path", f"{ARMS / arm}.yaml",
            "--hf-checkpoint", f"{work / 'inputs' / 'model'}",
            "--prompt-data", f"{work / 'inputs' / 'data.jsonl'}",
            "--rm-type", "math", "--advantage-estimator", "reinforce", "--clip-grad", "0",
            "--rollout-batch-size", f"{PROMPTS}", "--rollout-max-response-len", f"{ANSWER}",
            "--n-samples-per-prompt", f"{BATCHES}", "--max-tokens-per-gpu", "4096",
            "--rollout-health-timeout", "600", "--run-dir", f"{work / engine}",
            *(("--opd-top-k", f"{told}") if arm.startswith("centered") else ()),
            *flags,
        ],
        "onpolicy train",
    )  # fmt: skip
    validate(config)
    return config


@contextmanager
def started(config: TrainConfig, directory: Path) -> Iterator[EnginePair]:
    """Yield both engines of a run with the checkpoint's weights pushed."""
    hf_config = load_config(config.model.hf_checkpoint)
    contract = contract_for(config, hf_config, aligned=config.plan.starts_aligned)
    engines = EnginePair(config, hf_config, contract, directory, longest_sequence=1024)
    try:
        engines.start()
        engines.push_weights(0)
        yield engines
    finally:
        engines.stop()


def unsolvable(checkpoint: str) -> list[Prompt]:
    """Return the chats that ask for a product, as tokens."""
    tokenizer = load_tokenizer(checkpoint)
    chats = [row["prompt"] for row in problems("unsolvable")[1 : 2 * PROMPTS : 2]]
    texts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    return [
        Prompt(index=i, prompt_ids=tokenizer.encode(text), label="", text=text)
        for i, text in enumerate(texts)
    ]


def sample(engines: EnginePair, told: int) -> list[list[Sample]]:
    """Return batches of an answer to each prompt, all with the advantage -1, and the engine's likeliest
    tokens, `told` of them."""
    checkpoint = engines.config.model.hf_checkpoint
    prompts = unsolvable(checkpoint)
    params = SamplingParams(
        temperature=1.0,
        max_new_tokens=ANSWER,
        stop_token_ids=(load_tokenizer(checkpoint).eos_token_id,),
        num_likeliest=told,
    )
    requests = make_requests(prompts, BATCHES, params, SEED, "drift")
    trajectories = trajectories_of(requests, engines.generate(requests))
    batches: list[list[Sample]] = [[] for _ in range(BATCHES)]
    for i, (request, trajectory) in enumerate(zip(requests, trajectories, strict=True)):
        prompt, batch = prompts[i // BATCHES], batches[i % BATCHES]
        batch.append(
            Sample(
                prompt=prompt,
                sample_index=0,
                trajectory=trajectory,
                reward=-1.0,
                seeds=seeds_of(trajectory, request.sampling_seed),
                group=prompt.index,
                episode=prompt.index,
            )
        )
    return batches


class Gradients:
    """The gradients of a trainer's steps, which are kept instead of taken."""

    def __init__(self, trainer: PolicyTrainer):
        self.trainer, self.kept = trainer, list[Gradient]()
        trainer.policy.take_step = self._keep  # type: ignore[method-assign]

    def _keep(self, rate: float) -> None:
        gradients = [p.grad for p in self.trainer.policy.module.parameters()]
        shards = [each.to_local() for each in gradients if isinstance(each, DTensor)]
        assert len(shards) == len(gradients)
        self.kept.append([shard.float().flatten().clone() for shard in shards])
        self.trainer.policy.drop_gradients()

    def of(
        self, config: TrainConfig, batches: Sequence[Sequence[Sample]]
    ) -> tuple[list[Gradient], dict[str, float]]:
        """Return the gradient of each batch under an arm's corrections, and the means of metrics."""
        trainer, self.kept = self.trainer, []
        trainer.learner = Learner(config, trainer.models, trainer.learner.estimator, trainer.device)
        found = []
        for batch in batches:
            seen = [s if config.num_likeliest else without_likeliest(s) for s in batch]
            found.append(trainer.train(seen, 0, [1.0]).metrics)
        names = [name for name in METRICS if all(name in each for each in found)]
        return self.kept, {name: fmean(each[name] for each in found) for name in names}


def without_likeliest(sample: Sample) -> Sample:
    return replace(sample, trajectory=replace(sample.trajectory, likeliest=[]))


def products(ones: Sequence[Gradient], others: Sequence[Gradient]) -> torch.Tensor:
    """Return the inner product of each of `ones` with each of `others`: float64 [n, m]."""
    total = torch.zeros(len(ones), len(others), dtype=torch.float64)
    for one, other in zip(zip(*ones, strict=True), zip(*others, strict=True), strict=True):
        total += (torch.stack(one) @ torch.stack(other).T).double()
    return total


def of_two_batches(found: torch.Tensor, left_out: int | None = None) -> float:
    """Return the mean product of two different batches, [n, n], without one batch if asked."""
    kept = [i for i in range(len(found)) if i != left_out]
    part = found[kept][:, kept]
    return float((part.sum() - part.diagonal().sum()) / (len(kept) * (len(kept) - 1)))


def half_interval(without: Sequence[float]) -> float:
    """Return half of a number's 95 % interval by a jackknife: from its values without each batch."""
    count = len(without)
    return float(STUDENT[count] * (count - 1) * stdev(without) / count**0.5)


def judged(own: Sequence[Gradient], nothing: Sequence[Gradient]) -> dict[str, float]:
    """Return an arm's numbers, from its gradients and the uncorrected ones."""
    ours, crossed, whole = (
        products(*each) for each in ((own, own), (own, nothing), (nothing, nothing))
    )
    taken = ours + whole - crossed - crossed.T
    number = range(len(own))
    shares = [of_two_batches(crossed, i) / of_two_batches(whole, i) for i in number]
    squares = [of_two_batches(each) for each in (ours, whole, taken)]
    halves = [half_interval([of_two_batches(x, i) for i in number]) for x in (ours, taken)]
    noises = [float(each.diagonal().mean()) - of_two_batches(each) for each in (ours, whole)]
    return {
        "drift": of_two_batches(crossed) / squares[1],
        "interval": half_interval(shares),
        "elsewhere": (max(squares[0], 0.0) / squares[1]) ** 0.5,
        "noise": (noises[0] / noises[1]) ** 0.5,
        "squared_length": squares[0],
        "squared_length_interval": halves[0],
        "squared_noise": noises[0],
        "squared_taken": squares[2],
        "squared_taken_interval": halves[1],
    }


def measure(engine: str, work: Path, nothing: list[Gradient]) -> dict[str, Any]:
    """Return the numbers of each arm on an engine's samples.

    nothing: the uncorrected gradients, which an engine with an arm of that name replaces by its own.
    """
    _, told, arms = ENGINES[engine]
    found = dict[str, Any]()
    first = config_of(arms[0], engine, work)
    with started(first, work / engine) as engines:
        batches = sample(engines, told)
        assert isinstance(engines.trainer, PolicyTrainer)
        gradients = Gradients(engines.trainer)
        for arm in arms:
            began = time.monotonic()
            own, metrics = gradients.of(config_of(arm, engine, work), batches)
            if arm == "nothing":
                nothing[:] = own
            seconds = round(time.monotonic() - began)
            found[arm] = {**judged(own, nothing), **metrics, "seconds": seconds}
            print(engine, arm, found[arm], flush=True)
    return found


def rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of the page's table."""
    return [
        [
            engine,
            arm,
            f"{of['drift']:.2f} +- {of['interval']:.2f}",
            f"{of['elsewhere']:.2f}",
            f"{of['noise']:.2f}",
            f"{of['correction/rejected_fraction']:.0%}"
            if "correction/rejected_fraction" in of
            else "",
        ]
        for engine, found in record["engines"].items()
        for arm, of in found["arms"].items()
    ]


def with_table(page: str, record: Mapping[str, Any]) -> str:
    """Return the page with the table of this record."""
    columns = ("engine", "arm", "drift that is left", "elsewhere", "noise", "rejected")
    written: str = between(page, "drift", table(columns, rows(record)))
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", default="")
    parser.add_argument("--work-dir", type=Path, default=ROOT / "runs" / "smollm2_drift")
    parser.add_argument("--engines", nargs="*", default=[*ENGINES], choices=ENGINES)
    parser.add_argument("--from", default="", dest="record", help="a record to write into the page")
    args = parser.parse_args()
    if args.record:
        record = json.loads(Path(args.record).read_text())
        PAGE.write_text(with_table(PAGE.read_text(), record))
        return
    if "aligned" in args.engines and "int4" not in args.engines:
        parser.error("--engines aligned: its gradients are compared with those of int4. Add that.")
    EXAMPLE["main"](args.work_dir / "inputs")
    nothing: list[Gradient] = []
    before = Path(args.json).read_text() if Path(args.json).is_file() else "{}"
    record = {"versions": versions(), "engines": {}, **json.loads(before)}
    for engine in args.engines:
        about = surroundings(time.time())
        record["engines"][engine] = {**about, "arms": measure(engine, args.work_dir, nothing)}
        put_out(record, args.json)


if __name__ == "__main__":
    main()
