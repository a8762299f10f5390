"""The service of examples/reward_model, before a real SGLang server of a tiny classifier on a CPU."""

import threading
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.reward_model.service import Classifier, make_service
from onpolicy.config import groups
from onpolicy.config.tool_flags import ServeConfig
from onpolicy.models.hf_config import load_config
from onpolicy.rewards.scorer import Scorer
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import serve_spec
from tests.support.classifiers import make_classifier
from tests.support.engines_fixture import served
from tests.support.samples import to_score

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": "7+8="}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_classifier(tmp_path_factory.mktemp("classifier"), "llama")


@contextmanager
def scoring(checkpoint, server):
    classifier = Classifier(str(checkpoint), server.url, server.spec.api_key)
    service = make_service(classifier, 0)
    threading.Thread(target=service.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{service.server_port}"
    config = groups.RewardConfig(rm_type="remote_rm", rm_url=url, rm_retries=0, rm_max_error_rate=1)
    with closing(Scorer(config)) as scorer:
        yield scorer
    service.shutdown()
    service.server_close()


def conversations():
    """Samples, one of whose prompts is a chat, and what the classifier's template makes of them."""
    plain, chat = to_score("is 82."), to_score("15")
    chat.prompt = replace(chat.prompt, metadata={"messages": MESSAGES})
    return [plain, chat], [f"u:{plain.prompt.text}.a:is 82..", "u:7+8=.a:15."]


def test_rewards_are_the_numbers_of_transformers_classifier(checkpoint, tmp_path):
    """And where SGLang has ended, samples have failed."""
    hf_config = load_config(str(checkpoint))
    config = ServeConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"),
        server=groups.ServerConfig(cpu_threads=1),
        true_on_policy_mode=False,
        sglang_args=("--is-embedding",),
    )
    spec = serve_spec(config, hf_config, contract_for(config, hf_config, aligned=False))
    samples, texts = conversations()
    with served(spec, tmp_path / "engine.log") as server, scoring(checkpoint, server) as scorer:
        assert scorer.score([samples])["rollout/reward_errors"] == 0
        server.stop()
        again, _ = conversations()
        assert scorer.score([again])["rollout/reward_errors"] == 2
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with torch.no_grad():
        expected = [model(torch.tensor([tokenizer.encode(x)])).logits.item() for x in texts]
    assert [s.reward for s in samples] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert samples[0].reward != samples[1].reward
    assert all(sample.has_failed for sample in again)
