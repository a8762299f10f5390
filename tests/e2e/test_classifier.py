"""A sequence classifier, served by the real SGLang: transformers' numbers, and whatever is beside a
conversation, the same bits."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, groups
from onpolicy.config.tools import ServeConfig
from onpolicy.errors import ConfigError
from onpolicy.models.policy import PackedTokens
from onpolicy.ops import make_operators
from onpolicy.rewards.scorer import Scorer
from onpolicy.run.commands.serve import checked_spec
from onpolicy.run.launch.reward_checks import require_classifier
from onpolicy.run.served_rewards import make_scorer
from onpolicy.train import distributed
from onpolicy.train.fsdp.sharded_model import FsdpModel
from tests.support.classifiers import make_classifier
from tests.support.engines_fixture import served
from tests.support.processes import engine_processes
from tests.support.run_in_memory import run_in_memory
from tests.support.samples import to_score
from tests.support.tiny import make_tokenizer

pytestmark = pytest.mark.engine

CHARACTERS = "0123456789+-=abcxyz"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return make_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def server(classifier, tmp_path_factory):
    model = groups.ModelConfig(hf_checkpoint=str(classifier), dtype="float32")
    config = ServeConfig(model=model, server=groups.ServerConfig(cpu_threads=1))
    log = tmp_path_factory.mktemp("served") / "engine.log"
    with served(checked_spec(config), log) as server:
        yield server


@pytest.fixture
def scorer(classifier, server):
    def make(**flags):
        return Scorer(
            groups.RewardConfig(
                rm_type="model",
                reward_checkpoint=str(classifier),
                reward_server_url=(server.url,),
                reward_api_key=server.spec.api_key,
                **flags,
            )
        )

    return make


def conversations(count=12, seed=3):
    """Samples whose prompts share beginnings, and the text that the classifier's template makes."""
    rng = random.Random(seed)
    shared = "".join(rng.choices(CHARACTERS, k=60))
    samples, texts = [], []
    for i in range(count):
        asked = shared[: rng.randrange(1, 60)] + "".join(rng.choices(CHARACTERS, k=i))
        sample = to_score("".join(rng.choices(CHARACTERS, k=rng.randrange(1, 80))))
        messages = [{"role": "user", "content": asked}]
        sample.prompt = replace(sample.prompt, text=asked, messages=messages)
        samples.append(sample)
        texts.append(f"u:{asked}.a:{sample.response}.")
    return samples, texts


def test_rewards_are_what_transformers_says_of_the_conversation(scorer, classifier):
    samples, texts = conversations()
    metrics = scorer().score([samples])
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    tokens = [torch.tensor([make_tokenizer().encode(text)]) for text in texts]
    with torch.no_grad():
        expected = [model(each).logits.item() for each in tokens]
    assert [s.reward for s in samples] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len({s.reward for s in samples}) == len(samples)
    assert metrics["rollout/reward_errors"] == 0


def test_they_are_the_same_bits_in_any_batch_and_those_of_a_critic_of_the_trainer(
    scorer, server, classifier
):
    samples, texts = conversations()
    scorer().score([samples])
    together = [s.reward for s in samples]
    for sample in reversed(samples):
        scorer().score([[sample]])
    assert [s.reward for s in samples] == together
    tokens = [make_tokenizer().encode(text) for text in texts]
    assert values(server, classifier, tokens) == together
    assert values(server, classifier, tokens, change=torch.nextafter) != together


def values(server, classifier, tokens, change=None):
    """What the trainer's critic says after each sequence; `change`: of a weight, towards infinity."""
    distributed.init_process_group()
    contract = server.spec.contract
    argv = ["--hf-checkpoint", str(classifier), "--prompt-data", "p", "--rm-type", "exact"]
    config = parse(TrainConfig, [*argv, "--dtype", "float32"], "onpolicy train")
    load_model = partial(FsdpModel, config, contract)
    model = load_model(str(classifier), make_operators(contract, 1), trained=False, has_values=True)
    if change is not None:
        head = model.module.value_head.weight.data
        head.copy_(change(head, torch.full_like(head, torch.inf)))
    packed = PackedTokens.after_prompts([[*x, 0] for x in tokens], [len(x) for x in tokens], 1.0)
    return model.score([packed])[0].values.tolist()


def test_what_the_classifier_cannot_take_is_counted(scorer, classifier):
    """A conversation beyond its context, and one that its template refuses."""
    samples, _ = conversations(4)
    samples[1].response = "x" * 300
    samples[2].prompt = replace(samples[2].prompt, messages=[{"role": "system", "content": "x"}])
    metrics = scorer(rm_max_error_rate=0.5).score([samples])
    assert metrics["rollout/reward_errors"] == 2
    assert [s.has_failed for s in samples] == [False, True, True, False]


def test_text_is_scored_as_it_stands(scorer):
    samples, _ = conversations(2)
    other, _ = conversations(2)
    for sample in other:
        asked = f"u:{sample.prompt.text}.a:"
        sample.prompt = replace(sample.prompt, text=asked, messages=None)
        sample.response += "."
    scorer().score([samples])
    scorer(reward_input="text").score([other])
    assert [s.reward for s in samples] == [s.reward for s in other]


def test_servers_are_asked_before_a_run_starts(scorer, server, classifier, tmp_path):
    def config_of(checkpoint, key=server.spec.api_key):
        argv = ["--hf-checkpoint", str(classifier), "--prompt-data", "p", "--rm-type", "model"]
        flags = ["--reward-checkpoint", str(checkpoint), "--reward-server-url", server.url]
        return parse(TrainConfig, [*argv, *flags, "--reward-api-key", key], "onpolicy train")

    require_classifier(config_of(classifier))
    scorer().try_out(conversations(1)[0][0].prompt)
    with pytest.raises(ConfigError, match="is no server of `onpolicy serve`"):
        require_classifier(config_of(classifier, "another"))
    wider = make_classifier(tmp_path / "wider", intermediate_size=240)
    with pytest.raises(ConfigError, match=r"serves another model than --reward-checkpoint"):
        require_classifier(config_of(wider))


def test_a_run_starts_its_classifiers_itself_and_again_when_they_die(
    classifier, server, tmp_path, caplog
):
    """Its hash is that of a run whose servers are another's, and of one that loses none."""
    flags = {"rm_type": "model", "reward_checkpoint": str(classifier), "cpu_threads": 1}
    ours = {"reward_server_url": (server.url,), "reward_api_key": server.spec.api_key}
    scorers = []
    distributed.init_process_group()

    def killing(config):
        """A scorer whose one server is killed before the second rollout is scored."""
        scorers.append(make_scorer(config))
        calls, score = [], scorers[0].score

        def after_a_kill(groups):
            calls.append(groups)
            if len(calls) == 2:
                lost = engine_processes(scorers[0].servers.servers[0])["http"]
                lost.kill()
                lost.wait()
            return score(groups)

        scorers[0].score = after_a_kill
        return scorers[0]

    def hash_of(name, make=make_scorer, **more):
        return run_in_memory(tmp_path / name, make_scorer=make, **flags, **more).run_hash

    hashes = [hash_of("theirs", **ours), hash_of("killed", killing)]
    assert hashes == [hashes[0]] * 2
    assert run_in_memory(tmp_path / "other").run_hash != hashes[0]
    assert "again" in caplog.text
    assert not scorers[0].servers.servers[0].is_running
    assert (tmp_path / "killed/run/logs/reward_0.log").is_file()
