"""Small random Qwen3 models: paged generation against the trainer's forward pass, to the last bit."""

import pytest
import torch

from onpolicy.models.facts import ModelFacts
from onpolicy.models.size import operator_shapes
from onpolicy.ops.checks.self_check import self_check
from tests.gpu.backends import make_contract
from tests.gpu.generation import MODELS, generate, make_config, pack, random_prompts, score
from tests.support.gpu.paged_attention import paged_attention_of
from tests.support.gpu.paged_model import DecodeGraph, PagedModel, random_policy


@pytest.fixture(params=MODELS)
def config(request, setting):
    return make_config(request.param, setting.small_model)


@pytest.fixture
def policy(config, operators, setting):
    return random_policy(config, operators, torch.bfloat16, setting.device)


@pytest.fixture
def rollout_of(policy, backend, setting):
    """Return a function that samples with the policy as it is now, in a cache of its own."""
    attention = paged_attention_of(backend)

    def roll_out(temperature, seed):
        page_size = setting.page_sizes[seed % len(setting.page_sizes)]
        longest = setting.longest_prompt + setting.generated
        model = PagedModel(policy, attention, setting.sequences, longest, page_size, seed)
        prompts = random_prompts(setting, seed)
        return generate(model, prompts, setting.generated, temperature, seed)

    return roll_out


def compare(policy, rollout, setting, temperature, tally, case):
    with torch.no_grad():
        scored = score(policy, rollout, temperature, setting.device, seed=7)
    for i, (got, want) in enumerate(zip(scored, rollout.log_probs, strict=True)):
        tally.equal(got, want, f"{case}, sequence {i}")


def test_the_check_at_start_up_passes_at_the_sizes_of_each_model(
    operators, backend, model, setting, tally
):
    """Check also that the digests repeat, so two engines on such a GPU would accept each other."""
    config = make_config("qwen3-moe" if model.experts else "qwen3", model)
    contract = make_contract(
        backend, setting, operator_shapes(ModelFacts(config), row_parallel_blocks=8)
    )
    first, second = (self_check(operators, contract) for _ in range(2))
    assert first == second and len(first) > 10
    tally.cases = tally.values = len(first)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_trainers_log_probabilities(
    policy, rollout_of, setting, tally, temperature
):
    rollout = rollout_of(temperature, seed=0)
    compare(policy, rollout, setting, temperature, tally, f"temperature {temperature}")


def test_and_again_after_every_training_step(policy, rollout_of, setting, tally):
    """Take real optimizer steps on the samples; compare the loss's own forward pass too."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for step in range(setting.training_steps):
        rollout = rollout_of(1.0, seed=step)
        order = list(range(len(rollout.sequences)))
        log_probs, *_ = policy(pack(rollout, order, 1.0, setting.device))
        tally.equal(log_probs.detach(), torch.cat(rollout.log_probs), f"step {step}, loss")
        compare(policy, rollout, setting, 1.0, tally, f"step {step}")
        advantages = torch.linspace(-1, 1, len(log_probs), device=setting.device)
        before = [parameter.detach().clone() for parameter in policy.parameters()]
        (-(advantages * log_probs).mean()).backward()
        for parameter in policy.parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all()
        optimizer.step()
        optimizer.zero_grad()
        changed = [not torch.equal(*pair) for pair in zip(before, policy.parameters(), strict=True)]
        assert sum(changed) > len(changed) // 2
    rollout = rollout_of(1.0, seed=setting.training_steps)
    compare(policy, rollout, setting, 1.0, tally, "after the last step")


def test_the_loss_and_its_gradients_repeat(policy, rollout_of, setting, tally):
    rollout = rollout_of(1.0, seed=3)
    batch = pack(rollout, list(range(len(rollout.sequences))), 1.0, setting.device)

    def gradients():
        policy.zero_grad()
        policy(batch)[0].sum().backward()
        return [parameter.grad.clone() for parameter in policy.parameters()]

    first = gradients()
    for run in (2, 3):
        for (name, _), got, want in zip(policy.named_parameters(), gradients(), first, strict=True):
            tally.equal(got, want, f"run {run}, {name}")


@pytest.mark.parametrize("place", [0, 1])
def test_a_cuda_graph_of_a_decoding_step_has_the_bits_of_the_step(
    policy, backend, setting, tally, place
):
    """Capture once, and replay for sequences that grow over the borders of pages, blocks and chunks."""
    start, steps = setting.graph_starts[place], setting.graph_steps
    count, device = setting.sequences, setting.device
    models = [
        PagedModel(policy, paged_attention_of(backend), count, start + steps, 16) for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(setting.small_model.vocab, (count, start), generator=generator)
    graph = DecodeGraph(models[0], count)
    for model in models:
        model.extend(range(count), prompts.tolist(), [0] * count)
    tokens, t = prompts[:, -1].to(device), torch.ones(count, 1, device=device)
    for step in range(steps):
        graph.tokens.copy_(tokens)
        graph.lens.fill_(start + step + 1)
        got = graph.replay()
        hidden = models[1].extend(range(count), tokens[:, None].tolist(), [start + step] * count)
        want = models[1].log_probs(hidden, t)
        tally.equal(got, want, f"step {step}")
        tokens = want.argmax(-1)
