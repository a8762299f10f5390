"""A rollout engine in a few lines, token by token, on the model of a trainer in this process.

It tells what a real one tells, honestly: the log-probabilities of its tokens, and what they were drawn
from. How it draws is its caller's, so that a test can have it draw as it must not.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onpolicy.models.policy import PackedTokens
from onpolicy.ops import Operators
from onpolicy.ops.draws import draw
from onpolicy.ops.kept_tokens import left, packed, within
from onpolicy.ops.row_digests import row_digests
from onpolicy.rollout.seeds import seeds_of
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Sample
from tests.support.samples import make_completion


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the next token of B sequences is drawn by."""

    operators: Operators

    logits: Tensor
    """[B, V], of the whole vocabulary"""

    temperature: Tensor
    """float32 [B, 1]"""

    kept: Tensor | None
    """bool [B, V]: what a cut leaves"""

    seeds: Tensor
    """int64 [B]"""

    positions: Tensor
    """int64 [B]: of the last token of each"""

    number: int
    """Tokens that each has sampled before."""

    @property
    def log_probs(self):
        """float32 [B, V]: of what is left to draw from"""
        logits = self.logits if self.kept is None else within(self.logits, self.kept)
        return self.operators.log_softmax(logits, self.temperature)

    @property
    def rows(self):
        """float32 [B, V]: of the whole vocabulary"""
        return self.operators.log_softmax(self.logits, self.temperature)

    def numbers(self, *, seeds=None, positions=None):
        """float64 [B], by others than the step's own if they are given."""
        seeds = self.seeds if seeds is None else seeds
        return self.operators.uniform(seeds, self.positions if positions is None else positions)

    def drawn(self, numbers=None):
        """int64 [B]: as a sampler must, if the numbers are the step's own."""
        numbers = self.numbers() if numbers is None else numbers
        return draw(self.operators, self.log_probs, numbers, self.kept)


def digested(step):
    """int64 [B]: the digests of its rows, as an engine that is asked for them gives."""
    return row_digests(step.rows)


def by_the_seeds(step):
    return step.drawn()


def sampled(
    trainer,
    how=by_the_seeds,
    *,
    prompts=([5, 9], [7], [11, 3, 20], [40, 2]),
    tokens=6,
    temperature=0.7,
    cut=None,
    tells_sets=True,
    digests=digested,
):
    """A sample of each prompt; the rewards of neighbours differ. Each is an attempt of its own."""
    begun = [Trajectory.begin(prompt) for prompt in prompts]
    seeds = torch.arange(len(prompts)) * 7919 + 12345
    for number in range(tokens):
        step = _step(trainer, begun, seeds, number, temperature, cut)
        log_probs, drawn = step.log_probs, how(step)
        told = log_probs.gather(1, drawn[:, None])[:, 0].tolist()
        sets = [[]] * len(begun)
        if step.kept is not None and tells_sets:
            sets = [[each] for each in packed(step.kept)]
        begun = [
            trajectory.plus(
                make_completion([token], [x], kept_tokens=kept, row_digests=[digest]), temperature
            )
            for trajectory, token, x, kept, digest in zip(
                begun, drawn.tolist(), told, sets, digests(step).tolist(), strict=True
            )
        ]
    return [
        Sample(
            prompt=Prompt(index=i, prompt_ids=prompts[i], label="", text=""),
            sample_index=0,
            trajectory=trajectory,
            reward=float(i % 2),
            seeds=seeds_of(trajectory, int(seeds[i])),
            group=i,
            episode=i,
        )
        for i, trajectory in enumerate(begun)
    ]


def _step(trainer, begun, seeds, number, temperature, cut):
    contexts = [trajectory.token_ids for trajectory in begun]
    batch = PackedTokens.after_prompts(
        [[*context, 0] for context in contexts], [len(c) for c in contexts], temperature
    )
    (scores,) = trainer.policy.score([replace(batch, wants_hidden=True)])
    operators, scale = trainer.operators, torch.full((len(begun), 1), temperature)
    with torch.no_grad():
        logits = trainer.policy.head().logits(scores.hidden)
        kept = left(operators, logits, scale, None, cut)
    return Step(
        operators=operators,
        logits=logits,
        temperature=scale,
        kept=kept,
        seeds=seeds,
        positions=torch.tensor([len(c) - 1 for c in contexts]),
        number=number,
    )


def greedy(step):
    return step.log_probs.argmax(-1)


def at_the_next_position(step):
    return step.drawn(step.numbers(positions=step.positions + 1))


def at_the_place_in_the_response(step):
    return step.drawn(step.numbers(positions=torch.full_like(step.positions, step.number)))


def by_the_next_seed(step):
    return step.drawn(step.numbers(seeds=step.seeds + 1))


def by_one_seed_for_all(step):
    """SGLang's, of requests whose seed is lost (SGLang gives all of them 42)."""
    return step.drawn(step.numbers(seeds=torch.full_like(step.seeds, 42)))


def by_the_neighbours_number(step):
    """Rows of a batch in another order for the numbers than for the logits."""
    return step.drawn(step.numbers().roll(1))


def by_biased_numbers(step):
    return step.drawn(step.numbers() ** 1.5)


def greedy_at_first(step):
    """The first token after a prefill alone, as speculative decoding has had it elsewhere."""
    return greedy(step) if step.number == 0 else step.drawn()


def greedy_once(step):
    """One token of one sample: the first whose seed draws another than the likeliest."""
    drawn, likeliest = step.drawn(), greedy(step)
    for row in (drawn != likeliest).nonzero()[:1, 0] if step.number == 3 else ():
        drawn[row] = likeliest[row]
    return drawn


def at_no_temperature(step):
    return replace(step, temperature=torch.ones_like(step.temperature)).drawn()


def at_twice_the_temperature(step):
    """A sampler that bounds temperatures from below, for one."""
    return replace(step, temperature=2 * step.temperature).drawn()


def from_the_whole_vocabulary(step):
    """What a cut leaves is told, and not drawn from."""
    return replace(step, kept=None).drawn()


def from_rounded_probabilities(step):
    """In eight bits, where log-probabilities are float32."""
    rounded = step.log_probs.to(torch.float8_e4m3fn).float()
    return draw(step.operators, rounded, step.numbers(), step.kept)


def by_noise_on_logits(step):
    """The Gumbel-max way: the right distribution, by a sampler that nobody can follow."""
    columns = torch.arange(step.logits.shape[1])
    seeds = step.seeds[:, None].expand_as(step.logits) + columns
    positions = step.positions[:, None].expand_as(step.logits)
    uniform = step.operators.uniform(seeds.flatten(), positions.flatten()).view(step.logits.shape)
    return (step.log_probs.double() - (-uniform.clamp(min=1e-300).log()).log()).argmax(-1)


def drafts_of_some_weight(step):
    """A draft is taken if it is likely enough, whatever the seed draws."""
    drawn, draft = step.drawn(), step.log_probs.argsort(-1, descending=True)[:, 1]
    likely = step.log_probs.gather(1, draft[:, None])[:, 0].exp() > 0.05
    return torch.where(likely, draft, drawn)


def the_most_distant(step):
    """A row of logits read from its other end."""
    return step.logits.shape[1] - 1 - step.drawn()


ENGINES_OF_THEIR_OWN_MIND = (
    greedy, at_the_next_position, at_the_place_in_the_response, by_the_next_seed,
    by_one_seed_for_all, by_the_neighbours_number, by_biased_numbers, greedy_at_first, greedy_once,
    at_no_temperature, at_twice_the_temperature, from_rounded_probabilities, by_noise_on_logits,
    drafts_of_some_weight, the_most_distant,
)  # fmt: skip
"""All tell the policy's own log-probabilities of what they drew."""
