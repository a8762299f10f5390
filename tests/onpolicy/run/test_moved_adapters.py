"""Adapters where the governor moves a run or it is resumed: merged, or beside the base that it had."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from onpolicy.errors import CheckpointError
from onpolicy.models.lora.merged import Merged, merge_push
from onpolicy.models.weight_files import matched_model
from onpolicy.run.commands.verification import fill_with_drawn
from onpolicy.run.launch.contracts import contract_for
from tests.onpolicy.training.test_merging import parts_of, whole
from tests.support.engines_in_memory import make_requests
from tests.support.policies_in_memory import run_policy
from tests.support.stock_pairs import stock_pairs
from tests.support.tiny_combinations import make_base
from tests.support.unstarted_run import changed

REQUESTS = make_requests(3)
CASES = {
    "LoRA": ("qwen3", {"lora_rank": 4}),
    "the output projection too": (
        "qwen3",
        {"lora_rank": 4, "lora_target_modules": "q_proj,down_proj,lm_head"},
    ),
    "a tied output projection": ("qwen3-tied", {"lora_rank": 4}),
    "experts": ("glm4-moe", {"lora_rank": 4, "dtype": "bfloat16"}),
}


@pytest.fixture
def moving(tmp_path):
    """Starts a pair of a governed run; with it the stock contract and the aligned one."""
    with stock_pairs(tmp_path) as started:

        def governed(architecture="qwen3", **values):
            values = {"true_on_policy_mode": False, "mismatch_governor": True, **values}
            pair = started(architecture, **values)
            return pair, pair.contract, contract_for(pair.config, pair.hf_config, aligned=True)

        yield governed


def push(pair, version):
    """Adapters that every version has others of; returns what the engine holds then."""
    fill_with_drawn(pair.trainer, version)
    pair.push_weights(version)
    (client,) = pair.rollout.clients
    assert client.report()["weights"] == pair.weight_digest
    return client.memory


def merged(pair):
    config, parts = pair.config, parts_of(pair.trainer)
    model = matched_model(config.model.hf_checkpoint, pair.hf_config)
    scale = config.lora.scale
    return whole(merge_push(parts["trained"], parts["frozen"], model, scale, Merged()))


def beside(pair):
    parts = parts_of(pair.trainer)
    return whole(parts["trained"]) | whole(parts["frozen"])


def are_equal(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def agrees(pair):
    """Whether every token has one log-probability on both sides."""
    completions = pair.generate(REQUESTS)
    scores = pair.score(REQUESTS, completions, 0.75)
    sampled = [torch.tensor(completion.rollout_log_probs) for completion in completions]
    return all(map(torch.equal, scores, sampled))


@pytest.mark.parametrize("case", CASES)
def test_each_move_brings_them_in_the_form_that_its_engines_compute_with(moving, case):
    architecture, flags = CASES[case]
    pair, stock, aligned = moving(architecture, **flags)
    trained = whole(parts_of(pair.trainer)["trained"])
    for version, contract in enumerate((stock, aligned, stock, aligned)):
        pair.use(contract, pair.config.fallback, True)
        for number in (2 * version, 2 * version + 1):
            engine = push(pair, number)
            expected = beside(pair) if contract is aligned else merged(pair)
            assert are_equal(engine.weights, expected)
            assert bool(pair.trainer.push_metrics) == (contract is stock)
            if "experts" not in case:  # which an engine in memory does not put together
                assert agrees(pair) == (contract is aligned)
        again = [name for name in set(engine.loaded) if engine.loaded.count(name) == 2]
        assert sorted(again) == sorted(trained if contract is aligned else expected)
    base, found = whole(parts_of(pair.trainer)["frozen"]), merged(pair)
    assert not are_equal({name: found[name] for name in base}, base)


@pytest.mark.parametrize("lag", [0, 1])
def test_an_engine_that_dies_after_a_move_gets_what_was_pushed_in_that_form(moving, lag):
    pair, stock, aligned = moving(lora_rank=4, rollout_lag=lag)
    for version, contract in enumerate((stock, aligned, stock, aligned)):
        pair.use(contract, pair.config.fallback, True)
        pushed = {name: tensor.clone() for name, tensor in push(pair, version).weights.items()}
        if lag:
            fill_with_drawn(pair.trainer, 99)  # which the engine is not to see
        (server,) = pair.rollout.servers
        server.stop()
        assert len(pair.generate(REQUESTS)) == len(REQUESTS)
        assert are_equal(server.memory.weights, pushed)
        assert len(server.memory.loaded) == len(pushed)


@pytest.fixture
def resumed(tmp_path):
    """Makes the second of two rollouts from a checkpoint of the first."""
    base = changed(make_base(tmp_path), lora_rank=4)
    save = str(tmp_path / "save")
    first = changed(base, num_rollout=1, save=save, save_interval=1)
    run_policy(first)

    def go_on(**values):
        directory = str(tmp_path / "again")
        return run_policy(changed(base, load=save, run_dir=directory, **values))[0]

    return base, go_on


def change_base(config):
    """One number of the embedding."""
    file = f"{config.model.hf_checkpoint}/model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][7, 3] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.usefixtures("one_process")
def test_the_hash_is_that_of_the_undisturbed_run(resumed):
    base, go_on = resumed
    assert go_on().run_hash == run_policy(base)[0].run_hash


@pytest.mark.usefixtures("one_process")
def test_another_base_under_the_same_path_is_refused(resumed):
    base, go_on = resumed
    change_base(base)
    with pytest.raises(CheckpointError, match=r"--load=.*: the trainer has other weights .* Put"):
        go_on()


@pytest.mark.usefixtures("one_process")
def test_without_the_digest_nothing_is_noticed(resumed, tmp_path, monkeypatch):
    base, go_on = resumed
    change_base(base)
    monkeypatch.setattr("onpolicy.run.saving.resume.versions", lambda: {"another": "version"})
    assert go_on().run_hash
    state = json.loads((tmp_path / "save/step_000001/state.json").read_text())
    assert len(state["weights"]) == 16
