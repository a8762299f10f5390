"""A teacher behind a URL: the student's own server says what the student says, bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from onpolicy.config.groups import DistillationConfig
from onpolicy.errors import ConfigError, TrainingError
from onpolicy.rollout.sglang import SglangGroup
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.teacher_servers import TeacherServers, require_teacher_servers
from onpolicy.run.train_samples import make_train_samples
from onpolicy.system.network import free_port
from onpolicy.training import make_trainer
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Sample, SampleGroup
from tests.support.engines_fixture import make_engines, make_requests, running
from tests.support.tiny import make_tokenizer

pytestmark = pytest.mark.engine

KL, DIFFERENCE = "distillation/reverse_kl", "distillation/log_prob_abs_diff"


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory):
    """Whose server has a tokenizer, as that of `onpolicy serve` has."""

    def make_rollout(config, hf_config, contract, logs, longest_sequence):
        spec = rollout_spec(config, hf_config, contract, longest_sequence)
        return SglangGroup(config.engine, [replace(spec, serves_text=True)], logs)

    directory = tmp_path_factory.mktemp("teacher")
    with running(make_engines(checkpoint, directory, make_rollout=make_rollout)) as pair:
        yield pair


@pytest.fixture(scope="module")
def config(engines):
    """Of a run whose teacher is the student's own server."""
    spec = engines.rollout.servers[0].spec
    teacher = DistillationConfig(
        teacher_url=(engines.rollout.servers[0].url + "/",),
        teacher_api_key=spec.api_key,
        opd_reward_coef=0.0,
    )
    algorithm = replace(engines.config.algorithm, advantage_estimator="reinforce")
    return replace(engines.config, distillation=teacher, algorithm=algorithm)


@pytest.fixture(scope="module")
def samples(engines):
    """Of the student; the first of two turns, with tokens that were given in between."""
    requests = make_requests(4, seed=41, max_new_tokens=9)
    answers = engines.generate(requests)
    groups = []
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        trajectory = Trajectory.begin(request.prompt_ids).plus(answer, 1.0)
        if i == 0:
            given = trajectory.given([5, 6])
            second = replace(request, prompt_ids=given.token_ids)
            (more,) = engines.generate([second])
            trajectory = given.plus(more, 1.0)
        prompt = Prompt(index=i, prompt_ids=request.prompt_ids, label="", text="")
        sample = Sample(prompt=prompt, sample_index=0, trajectory=trajectory, reward=float(i))
        groups.append(SampleGroup(prompt=prompt, samples=[sample]))
    return make_train_samples(groups)


def test_the_students_own_server_says_what_the_student_says(engines, config, samples):
    asked = TeacherServers(config).score(samples)
    assert all(s.teacher_log_probs == s.rollout_log_probs for s in asked)
    metrics = make_trainer(config, engines.contract, 1).train(asked, 0, [1e-3]).metrics
    assert (metrics[KL], metrics[DIFFERENCE], metrics["train/grad_norm"]) == (0.0, 0.0, 0.0)
    assert metrics["parity/num_mismatched_tokens"] == 0 < metrics["parity/num_compared_tokens"]


def test_one_of_whose_weights_is_an_ulp_off_says_something_else(engines, config, samples):
    as_loss = of_top_k(config)
    weight = next(engines.trainer.policy.module.parameters()).data
    kept = weight.clone()
    try:
        weight.copy_(torch.nextafter(weight, torch.tensor(torch.inf)))
        engines.push_weights(1)
        asked = TeacherServers(config).score(samples)
        also_asked = TeacherServers(as_loss).score(samples)
    finally:
        weight.copy_(kept)
        engines.push_weights(0)
    assert not any(s.teacher_log_probs == s.rollout_log_probs for s in asked)
    metrics = make_trainer(config, engines.contract, 1).train(asked, 0, [1e-3]).metrics
    assert metrics[DIFFERENCE] > 0 < metrics["train/grad_norm"]
    metrics = make_trainer(as_loss, engines.contract, 1).train(also_asked, 0, [1e-3]).metrics
    assert metrics["distillation/kl_loss"] != 0 < metrics["train/grad_norm"]


def of_top_k(config):
    flags = replace(config.distillation, opd_loss="top-k", opd_top_k=7)
    return replace(config, distillation=flags)


def test_its_likeliest_tokens_are_a_loss_that_is_0_too(engines, config, samples):
    config = of_top_k(config)
    require_teacher_servers(config, make_tokenizer())
    asked = TeacherServers(config).score(samples)
    tokens, log_probs = asked[0].teacher_top
    assert {len(row) for row in (*tokens, *log_probs)} == {7}
    assert len(tokens) == len(asked[0].teacher_log_probs)
    metrics = make_trainer(config, engines.contract, 1).train(asked, 0, [1e-3]).metrics
    names = (KL, DIFFERENCE, "distillation/kl_loss", "train/grad_norm")
    assert [metrics[name] for name in names] == [0.0] * 4
    many = replace(config, distillation=replace(config.distillation, opd_top_k=10**6))
    with pytest.raises(ConfigError, match="--opd-top-k=1000000: the policy and"):
        require_teacher_servers(many, make_tokenizer())


def test_samples_go_to_the_teacher_that_their_row_names(config, samples):
    """The other is not there, which is seen where it is asked."""
    url = config.distillation.teacher_url[0]
    urls = (f"own={url}", f"gone=http://127.0.0.1:{free_port('127.0.0.1')}")
    flags = replace(config.distillation, teacher_url=urls, teacher_key="by")
    routed = replace(config, distillation=flags, reward=replace(config.reward, rm_retries=0))
    for one, name in zip(samples, ("own", "gone"), strict=False):
        one.prompt.metadata["by"] = name
    (asked,) = TeacherServers(routed).score(samples[:1])
    assert asked.teacher_log_probs == asked.rollout_log_probs
    message = (
        r"--teacher-url=http://\S+: prompt 1, sample 0: the teacher had no answer from .*--load"
    )
    with pytest.raises(TrainingError, match=message):
        TeacherServers(routed).score(samples[:2])


def test_it_is_asked_before_anything_starts(config):
    require_teacher_servers(config, make_tokenizer())
    tokenizer = make_tokenizer()
    vocabulary = tokenizer.get_vocab()
    text = tokenizer.backend_tokenizer.to_str()
    one, other = [t for t in sorted(vocabulary, key=vocabulary.get) if len(t) == 1][:2]
    swapped = json.loads(text)
    entries = swapped["model"]["vocab"]
    entries[one], entries[other] = entries[other], entries[one]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(swapped)))
    with pytest.raises(ConfigError, match=f"token {vocabulary[one]} is .* there and .* here"):
        require_teacher_servers(config, tokenizer)
    refused = replace(config.distillation, teacher_api_key="another")
    with pytest.raises(ConfigError, match=r"had no answer from .*HTTP 401.*--teacher-api-key"):
        require_teacher_servers(replace(config, distillation=refused), make_tokenizer())
