"""Images on a real server: other images under the same tokens, chunks, caches, pushes, and refusals."""

import dataclasses
import json

import pytest
import requests
import torch
from transformers import AutoModelForImageTextToText

from onpolicy.config.groups import LoraConfig, ModelConfig
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.parity import compare_log_probs
from onpolicy.rollout.client import _payload
from onpolicy.run.commands.verification import passes, verify
from onpolicy.types import Request, SamplingParams
from tests.support import tiny_images
from tests.support.engines_fixture import CHUNKED_PREFILL_SIZE, make_engines, running
from tests.support.seeing_policies import prompt_with
from tests.support.tiny_images import make_image_checkpoint
from tests.support.train_runs import finish, metrics_of, start_train

pytestmark = pytest.mark.engine

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8, stop_token_ids=(), ignore_eos=True)


def picture(seed=0, size=(32, 32)):
    return tiny_images.picture(seed, size)


@pytest.mark.parametrize(
    ("family", "more"), [("gemma3", {}), ("qwen3_vl", {"lora": LoraConfig(lora_rank=2)})]
)
def test_no_token_differs_before_or_after_a_step(family, more, tmp_path):
    """Prompts of random tokens with random pictures; an adapter leaves the tower as it is."""
    path = make_image_checkpoint(tmp_path / "model", family)
    config = VerifyConfig(
        model=ModelConfig(hf_checkpoint=str(path), images=True), num_prompts=12, max_new_tokens=6,
        max_prompt_len=160, run_dir=str(tmp_path / "run"), **more,
    )  # fmt: skip
    report = verify(config)
    assert report["num_compared_tokens"] == 144
    assert report["contract"]["images"] == family
    assert passes(report, config)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seeing")
    path = make_image_checkpoint(directory / "model", "qwen3_vl")
    with running(make_engines(path, directory, "bfloat16", images=True)) as pair:
        yield pair


def request(engines, *images, text=range(5, 60), seed=1):
    tokens, placed = prompt_with(engines.config.model.hf_checkpoint, *images, text=text)
    return Request(prompt_ids=tokens, images=placed, sampling_seed=seed, params=PARAMS)


def mismatched(engines, asked, answers):
    found = engines.rescore(asked, answers, 1.0)
    pairs = zip(found, answers, strict=True)
    return sum(
        compare_log_probs(one.log_probs, torch.tensor(answer.rollout_log_probs.array))[
            0
        ].num_mismatched
        for one, answer in pairs
    )


def test_the_prefix_cache_takes_no_image_for_another(engines):
    """The same tokens with other pictures, in one batch and after one another (LMCache#690,
    LMCache#4086, ROCm/ATOM#1358: the first picture's cached keys answered for the others)."""
    asked = [request(engines, picture(seed)) for seed in (0, 1, 0, 2)]
    assert len({tuple(each.prompt_ids) for each in asked}) == 1
    together = engines.generate(asked)
    again = [engines.generate([each])[0] for each in asked]
    told = [answer.rollout_log_probs for answer in together]
    assert told == [answer.rollout_log_probs for answer in again]
    assert told[0] == told[2] and len({tuple(each.tolist()) for each in told}) == 3
    assert again[0].num_cached_tokens > 60  # the picture's own tokens too
    assert mismatched(engines, asked, again) == 0


def test_an_image_may_lie_across_chunks_and_end_a_cached_prefix(engines):
    """Prompts are sent one by one, so that a chunk of 48 tokens ends within the first picture of two."""
    big = picture(3, (40, 24))
    starts = [request(engines, big, picture(4), text=range(5, 5 + n)) for n in (30, 40, 46)]
    cut = [
        each for each in starts if each.images[0].start < CHUNKED_PREFILL_SIZE < each.images[0].end
    ]
    assert len(cut) == 2
    answers = [engines.generate([each])[0] for each in starts]
    longer = [
        dataclasses.replace(each, prompt_ids=[*each.prompt_ids, *answer.response_ids, 7, 8])
        for each, answer in zip(starts, answers, strict=True)
    ]
    assert mismatched(engines, [*starts, *longer], [*answers, *engines.generate(longer)]) == 0


def test_a_push_reaches_the_tower(engines):
    asked = [request(engines, picture(5))]
    before = engines.generate(asked)[0]
    tower = engines.trainer.policy.module.causal_lm.base_model.tower
    held = {name: p.detach().clone() for name, p in tower.named_parameters()}
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.mul_(1.25)
    try:
        assert mismatched(engines, asked, [before]) > 0  # the trainer has other weights by now
        engines.push_weights(1)
        after = engines.generate(asked)[0]
        assert after.rollout_log_probs != before.rollout_log_probs
        assert mismatched(engines, asked, [after]) == 0
    finally:
        with torch.no_grad():
            for name, parameter in tower.named_parameters():
                parameter.copy_(held[name])
        engines.push_weights(2)


def test_requests_whose_images_are_not_what_they_say_are_refused(engines):
    good, client = request(engines, picture(0)), engines.rollout.clients[0]
    (image,) = good.images
    others = {
        "its pixels are": dataclasses.replace(image, data=picture(9)),
        "does not stand for tokens": dataclasses.replace(
            image, start=9, end=9 + image.end - image.start
        ),
        "no image can be read": dataclasses.replace(image, data=b"GIF89a"),
    }
    for message, wrong in others.items():
        body = {"requests": [_payload(dataclasses.replace(good, images=(wrong,)))]}
        url = f"{client.url}/generate_each"
        answer = requests.post(url, json=body, headers=client.headers, timeout=60)
        assert answer.status_code == 400 and message in answer.text
    assert engines.generate([good])[0].response_ids  # and it still serves


@pytest.mark.runs
def test_a_run_trains_the_tower_saves_the_whole_model_and_resumes(tmp_path):
    """Rows name pictures beside them, as files; the last save loads as the whole model."""
    path = make_image_checkpoint(tmp_path / "model", "qwen3_vl")
    data = tmp_path / "data.jsonl"
    with data.open("w") as rows:
        for number in range(6):
            (tmp_path / f"{number}.png").write_bytes(picture(number, (24, 16)))
            chat = [{"role": "user", "content": f"<image>Say {number}"}]
            row = {"prompt": chat, "images": [f"{number}.png"], "label": str(number)}
            rows.write(json.dumps(row) + "\n")
    flags = (
        *("--images", "--apply-chat-template", "--save", str(tmp_path / "save")),
        *("--save-interval", "1", "--num-rollout"),
    )
    for rollouts in ("1", "2"):
        load = ("--load", str(tmp_path / "save")) if rollouts == "2" else ()
        finish(start_train(path, data, tmp_path, *flags, rollouts, *load))
    records = metrics_of(tmp_path)
    assert [r["parity/num_mismatched_tokens"] for r in records] == [0, 0]
    assert all(r["parity/num_compared_tokens"] > 20 for r in records)
    saves = [tmp_path / "save" / f"step_00000{n}" / "hf" for n in (1, 2)]
    whole, info = AutoModelForImageTextToText.from_pretrained(saves[1], output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before, first, last = (CheckpointReader(each) for each in (path, *saves))
    assert before.tower.keys() == first.tower.keys() == last.tower.keys()
    changed = [
        name
        for name in before.tower
        if not torch.equal(before.read(name, ()), first.read(name, ()))
        and not torch.equal(first.read(name, ()), last.read(name, ()))
    ]
    assert len(changed) > len(before.tower) / 2
    name = "model.tower.visual.merger.linear_fc2.weight"
    assert torch.equal(whole.model.visual.merger.linear_fc2.weight, last.read(name, ()))
