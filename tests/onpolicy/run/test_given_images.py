"""Images that a function of the user's own gives to an episode, through requests and resuming."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from onpolicy.agents.agent_workers import AgentFunction, WorkerRollouter
from onpolicy.config import TrainConfig
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.rollouter import Episode, Rollouter
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.run.sampler import Sampler
from onpolicy.system.records import Shape
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt, Request, SamplingParams
from tests.support.episodes import Part, drive
from tests.support.samples import make_completion
from tests.support.seeing import BLUE, RED, checkpoint, read, template, url_of
from tests.support.tiny_images import encoded_image

_, TOKENIZER, PLACER = checkpoint("qwen3_vl")
STOP = TOKENIZER.eos_token_id
PAD = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")


def seen(*images):
    parts = [{"type": "image_url", "image_url": {"url": url_of(image)}} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": "Now?"}, *parts]}]


def tokens_of(placer=PLACER):
    inputs = SimpleNamespace(tokenizer=TOKENIZER, stop_token_ids=(STOP,), placer=placer)
    return partial(Sampler._tokens_of, SimpleNamespace(inputs=inputs, config=TrainConfig()))


def after(*token_ids):
    answer = make_completion([*token_ids], [-1.0] * len(token_ids))
    return Trajectory.begin([7, 8]).plus(answer, 1.0)


def test_messages_with_images_are_what_the_template_has_after_an_answer():
    token_ids, images = tokens_of()(seen(RED, BLUE), after(5, STOP))
    shown = PLACER.shown(TOKENIZER.decode(token_ids))
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert shown == (f"\n<|im_start|>user\nNow?{place}{place}<|im_end|>\n<|im_start|>assistant\n")
    whole = after(5, STOP).given(token_ids, images)
    assert [image.data for image in whole.images] == [RED, BLUE]
    assert all({*whole.token_ids[x.start : x.end]} == {PAD} for x in whole.images)
    assert sum(x.end - x.start for x in whole.images) == whole.token_ids.tolist().count(PAD)


@pytest.mark.parametrize("more", ["a <|image_pad|>", [5, PAD]])
def test_tokens_of_images_without_images_are_refused(more):
    with pytest.raises(ValueError, match=r"1 tokens '<.image_pad.>', and the 0 images"):
        tokens_of()(more, after(5))
    assert tokens_of(placer=None)(more, after(5))[1] == ()


def test_without_images_messages_with_some_are_refused():
    with pytest.raises(ValueError, match="type='image_url': this model reads text alone"):
        tokens_of(placer=None)(seen(RED), after(5))
    with pytest.raises(ValueError, match="no files of the host"):
        tokens_of()([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], after(5))


class Looks(Rollouter):
    """Shows an image after the first answer."""

    def __init__(self, image=BLUE):
        self.image = image

    async def roll_out(self, prompt, turns):
        await turns.sample(max_tokens=2)
        turns.append(seen(self.image))
        fork = turns.fork()
        await fork.sample(max_tokens=2)
        await turns.sample(max_tokens=2)
        return Episode(trajectories=[turns, fork])


def open_episode(rollouter, image=RED):
    chat = read("qwen3_vl", seen(image))
    prompt_ids = template("qwen3_vl").begin(chat)
    images = PLACER.placed(prompt_ids, [chat[0]["content"][1]["image"]])
    prompt = Prompt(index=0, prompt_ids=prompt_ids, label="", text="", images=images)
    params = SamplingParams(temperature=0.5, max_new_tokens=9, stop_token_ids=(STOP,))
    request = Request(prompt_ids=prompt_ids, sampling_seed=3, params=params, images=images)
    rules = EpisodeRules(tokens_of=tokens_of(), decode=TOKENIZER.decode)
    return OpenEpisode(rollouter, prompt, request, rules)


def answering(asked):
    def answer(request):
        asked.append(request)
        return make_completion([65, 66][: request.params.max_new_tokens], [-1.0, -1.0])

    return answer


def rolled_out(rollouter, most=None):
    episode, asked = open_episode(rollouter), []
    while not episode.is_complete:
        drive(Part([episode], most, 0), answering(asked))
    return episode, asked


def test_a_request_has_the_images_of_all_tokens_before_it_and_none_of_later_ones():
    episode, asked = rolled_out(Looks())
    assert sorted(len(request.images) for request in asked) == [1, 2, 2]
    for request in asked:
        assert all(image.end <= len(request.prompt_ids) for image in request.images)
        assert [image.data for image in request.images] == [RED, BLUE][: len(request.images)]
    assert all(len(x.images) == 2 for x in episode.trajectories)


def test_a_trajectory_with_images_is_read_as_it_was_written():
    trajectory = rolled_out(Looks())[0].trajectories[0]
    shape = Shape(Trajectory)
    assert shape.read(shape.write(trajectory)) == trajectory
    other = replace(trajectory.images[0], data=BLUE)
    assert shape.read(shape.write(replace(trajectory, images=(other,)))) != trajectory


def test_an_episode_is_resumed_with_its_images_and_refused_with_others():
    whole, _ = rolled_out(Looks())
    again = open_episode(Looks())
    again.resume(whole.record())
    drive(Part([again], None, 0), answering([]))
    assert again.trajectories == whole.trajectories
    other = open_episode(
        Looks(encoded_image("green", (40, 16)))
    )  # as large, so the tokens are equal
    other.resume(whole.record())
    with pytest.raises(ValueError, match="gives other tokens than before"):
        drive(Part([other], None, 0), answering([]))
    with pytest.raises(ValueError, match="none begins with the prompt"):
        open_episode(Looks(), encoded_image("green")).resume(whole.record())


async def looks_in_a_worker(turns, prompt):
    await turns.sample(max_tokens=2)
    turns.append(seen(BLUE))
    return Episode(
        info={"images": [[image.start, image.digest] for image in turns.trajectory.images]}
    )


def test_a_function_in_a_worker_shows_images_and_knows_their_places():
    workers = WorkerRollouter(AgentFunction(path=f"{__file__}:looks_in_a_worker"), 1, 60.0)
    try:
        (sample,) = rolled_out(workers)[0].samples
    finally:
        workers.close()
    assert sample.info["images"] == [[x.start, x.digest] for x in sample.trajectory.images]
    assert [image.data for image in sample.trajectory.images] == [RED, BLUE]
