"""Runs whose order the clock decides, and their journals, which repeat them to the bit."""

import json
import random
import threading
from pathlib import Path

import pytest

from onpolicy.errors import ConfigError, EngineError, ParityError
from onpolicy.rollout.episode_jobs import FreeJob
from onpolicy.rollout.open_groups import FreeGroups, Staleness
from onpolicy.run.drawing import FreeRollouts
from onpolicy.run.run import Run
from tests.support.engines_in_memory import Host
from tests.support.groups import open_group
from tests.support.kept_runs import Keeps, require_weights_of_spans
from tests.support.run_in_memory import (
    Interrupted,
    even_tokens,
    interrupted_at,
    records_of,
    run_in_memory,
)
from tests.support.tiny_policy import make_weights

pytestmark = pytest.mark.usefixtures("one_process")

ROLLOUTS = 5
FREE = {
    "num_rollout": ROLLOUTS, "rollout_schedule": "free", "over_sampling_batch_size": 4,
    "rollout_max_response_len": 12,
}  # fmt: skip


class Clock:
    """Engines whose speed is chance's, and that are slow while the trainer learns: so a push finds them
    in the middle of something, however slow the machine is."""

    def __init__(self, seed, make_run=Run, engines=1):
        chance, clock = random.Random(seed), self
        self.host, self.engines, self.longest_pause = Host(), engines, 0.0
        self.host.pause = lambda: chance.random() * self.longest_pause

        class Timed(make_run):
            def roll_out(self, step):
                clock.longest_pause = 1e-3
                return super().roll_out(step)

            def train(self, groups, step):
                clock.longest_pause = 0.02
                return super().train(groups, step)

        self.make_run = Timed

    def run(self, directory, **more):
        values = {**FREE, "rollout_num_engines": self.engines, **more}
        return run_in_memory(
            directory, self.host, reward=even_tokens, make_run=self.make_run, eval_sets={}, **values
        )


def journal_of(directory):
    return directory / "run" / "rollouts.jsonl"


def lines_of(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def steps_of(file):
    return [line for line in lines_of(file) if "groups" in line]


def responses_of(file):
    """(step, (version, tokens) of each span) of all responses."""
    return [
        (line["step"], sample["spans"])
        for line in steps_of(file)
        for group in line["groups"]
        for sample in group["samples"]
    ]


def metrics_of(directory):
    """Without the probe's, of which each engine has its own."""
    records = records_of(directory)
    return [{k: v for k, v in record.items() if not k.startswith("probe/")} for record in records]


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    """A free run of a clock: its directory and its summary."""
    runs = {}

    def of(seed, **more):
        key = (seed, *more.items())
        if key not in runs:
            directory = tmp_path_factory.mktemp("free")
            runs[key] = directory, Clock(seed, engines=1 + seed % 3).run(directory, **more)
        return runs[key]

    return of


@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_is_repeated_from_its_journal_on_another_clock(free, tmp_path, seed, max_staleness):
    directory, ran = free(seed, max_staleness=max_staleness)
    journal = journal_of(directory)
    again = Clock(seed + 99, engines=3 - seed % 3).run(
        tmp_path, max_staleness=max_staleness, replay=str(journal)
    )
    assert again.run_hash == ran.run_hash
    assert steps_of(journal_of(tmp_path)) == steps_of(journal)
    assert metrics_of(tmp_path) == metrics_of(directory)


def test_the_clock_decides_the_order_and_where_pushes_interrupt(free):
    runs = [free(seed, max_staleness=3) for seed in range(4)]
    assert len({ran.run_hash for _, ran in runs}) > 1
    responses = [found for directory, _ in runs for found in responses_of(journal_of(directory))]
    assert any(len(spans) > 1 for _, spans in responses)
    assert all(step - spans[0][0] <= 3 for step, spans in responses)
    assert any(step > spans[0][0] for step, spans in responses)
    numbers = [[g["number"] for s in steps_of(journal_of(d)) for g in s["groups"]] for d, _ in runs]
    assert all(sorted(found) == list(range(3 * ROLLOUTS)) for found in numbers)
    assert any(found != sorted(found) for found in numbers)


def test_every_token_is_of_the_weights_that_its_span_says(tmp_path):
    Clock(3, Keeps).run(tmp_path, max_staleness=3)
    require_weights_of_spans(Keeps.last)


def run_and_resume(directory, **more):
    """A run that is ended in rollout 3, after two checkpoints or three, and goes on."""
    save = str(directory / "save")
    values = {"save": save, "load": save, "save_interval": 1, "max_staleness": 3, **more}
    with pytest.raises(Interrupted):
        Clock(5, interrupted_at(3)).run(directory, **values)
    return Clock(6).run(directory, **values)


def test_a_free_run_that_is_resumed_skips_nothing_and_is_repeated_as_a_whole(tmp_path):
    ran = run_and_resume(tmp_path / "one")
    journal = journal_of(tmp_path / "one")
    assert [line["step"] for line in steps_of(journal)] == list(range(ROLLOUTS))
    numbers = [group["number"] for line in steps_of(journal) for group in line["groups"]]
    assert sorted(numbers) == list(range(3 * ROLLOUTS))
    again = Clock(7).run(tmp_path / "two", max_staleness=3, replay=str(journal))
    assert again.run_hash == ran.run_hash


def test_a_replay_that_is_resumed_is_the_same_run(free, tmp_path):
    directory, ran = free(1, max_staleness=3)
    again = run_and_resume(tmp_path, replay=str(journal_of(directory)))
    assert again.run_hash == ran.run_hash


def test_a_replay_goes_on_from_a_checkpoint_of_the_free_run(tmp_path):
    save = str(tmp_path / "save")
    ran = Clock(8).run(tmp_path, max_staleness=3, save=save, save_interval=1)
    again = Clock(9).run(
        tmp_path, max_staleness=3, replay=str(journal_of(tmp_path)), load=f"{save}/step_000002",
        run_dir=str(tmp_path / "again"),
    )  # fmt: skip
    assert again.run_hash == ran.run_hash


def test_a_free_run_goes_on_from_a_checkpoint_of_a_replay(free, tmp_path):
    directory, _ = free(2, max_staleness=3)
    journal, save = str(journal_of(directory)), str(tmp_path / "save")
    short = {"save": save, "save_interval": 1, "load": save, "max_staleness": 3}
    Clock(3).run(tmp_path, replay=journal, num_rollout=3, **short)
    Clock(4).run(tmp_path, **short)
    numbers = [g["number"] for line in steps_of(journal_of(tmp_path)) for g in line["groups"]]
    assert sorted(numbers) == list(range(3 * ROLLOUTS))


def test_a_shorter_replay_is_the_beginning_of_the_run(free, tmp_path):
    directory, _ = free(2, max_staleness=3)
    Clock(3).run(tmp_path, max_staleness=3, replay=str(journal_of(directory)), num_rollout=3)
    assert steps_of(journal_of(tmp_path)) == steps_of(journal_of(directory))[:3]


def test_engines_that_die_on_the_way_cost_no_token(tmp_path):
    clock = Clock(11, engines=2)
    clock.host._dies_at = [range(40, 44), {60}]
    ran = clock.run(tmp_path, max_staleness=2, rollout_max_restarts=9)
    assert clock.host.num_restarts
    again = Clock(12).run(tmp_path / "again", max_staleness=2, replay=str(journal_of(tmp_path)))
    assert again.run_hash == ran.run_hash


def test_what_is_being_drawn_ends_with_the_run(tmp_path):
    clock = Clock(14, interrupted_at(1))
    with pytest.raises(Interrupted):
        clock.run(tmp_path)
    assert not any(engine.is_running for engine in clock.host.engines)
    assert clock.host.num_restarts == 0


def between_jobs():
    """Rollouts whose only episode is under way, and the job that draws it, which was interrupted."""
    groups = FreeGroups(open_group, 1, Staleness(most=3, batch=1), 10)
    rollouts = FreeRollouts(None, groups, None)
    rollouts._job.interrupt()
    (episode,) = groups.begin(1)
    return rollouts, rollouts._job, episode


def test_what_begins_is_drawn_by_the_present_job_though_an_earlier_one_was_told():
    rollouts, told, episode = between_jobs()
    present = rollouts._job = FreeJob(1, rollouts._on_end)
    episode.samples = []
    assert present.is_done
    told.ended(episode)
    assert told.is_done and not present.is_done


def test_an_error_of_which_an_earlier_job_was_told_is_the_present_ones():
    rollouts, told, episode = between_jobs()
    present = rollouts._job = FreeJob(1, rollouts._on_end)
    episode.error = EngineError("of an episode")
    told.ended(episode)
    assert present.error is episode.error


def test_an_error_between_two_jobs_ends_the_next_rollout():
    rollouts, told, episode = between_jobs()
    episode.error = EngineError("of an episode")
    told.ended(episode)
    with pytest.raises(EngineError, match="of an episode"):
        rollouts.take(1)


def test_what_begins_in_an_episodes_place_begins_before_its_job_is_interrupted():
    """Else the next job would have it go on first, and then this one, which engines ask no more."""
    groups = FreeGroups(open_group, 1, Staleness(most=3, batch=1), 10)
    rollouts = FreeRollouts(None, groups, None)
    ended, job = groups.begin(0)[0], rollouts._job
    ended.samples = []
    begin, begun, settling = job.begin, [], threading.Thread(target=rollouts.settle)

    def begin_slowly(episodes):
        settling.start()
        settling.join(0.2)
        begun.append((episodes, job.is_interrupted))
        begin(episodes)

    job.begin = begin_slowly
    job.ended(ended)
    settling.join()
    (((_next,), was_interrupted),) = begun
    assert not was_interrupted and job.is_interrupted


def rewritten(journal, file, change):
    """The journal with one response changed: the first that `change` finds something to do at."""
    lines, is_done = lines_of(journal), False
    for line in lines:
        for group in line.get("groups", ()):
            for sample in group["samples"]:
                if not is_done:
                    is_done = change(line["step"], sample["spans"])
    assert is_done
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def later_version(step, spans):
    """One span of weights one push later, where there are such."""
    if len(spans) == 1 and spans[0][0] < step:
        spans[0][0] += 1
        return True
    return False


def another_cut(step, spans):
    """One token more under the earlier weights, one less under the later."""
    if len(spans) > 1 and spans[1][1] > 1:
        spans[0][1] += 1
        spans[1][1] -= 1
        return True
    return False


def from_the_future(step, spans):
    spans[-1][0] = step + 1
    return True


def backwards(step, spans):
    if len(spans) > 1:
        spans.reverse()
        return True
    return False


IS_FOUND = (ParityError, "and the journal says")
IS_REFUSED = (ConfigError, "versions that grow up to")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (later_version, *IS_FOUND), (another_cut, *IS_FOUND), (from_the_future, *IS_REFUSED),
        (backwards, *IS_REFUSED),
    ],
)  # fmt: skip
def test_a_changed_span_is_found_and_one_that_no_run_has_is_refused(
    tmp_path, change, error, message
):
    Clock(3).run(tmp_path, max_staleness=3)
    changed = rewritten(journal_of(tmp_path), tmp_path / "changed.jsonl", change)
    with pytest.raises(error, match=message):
        Clock(3).run(tmp_path / "again", max_staleness=3, replay=changed)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 1}, "is the journal of another run: --seed=1, was 0"),
        ({"max_staleness": 2}, "--max-staleness=2, was 3"),
        ({"num_rollout": ROLLOUTS + 1}, "and not rollout 5, which this run would come to"),
        ({"lr_decay_style": "linear"}, "--lr-decay-style="),
    ],
)
def test_a_journal_of_another_run_is_refused_by_its_first_difference(
    free, tmp_path, values, message
):
    journal = journal_of(free(0, max_staleness=3)[0])
    clock = Clock(0)
    with pytest.raises(ConfigError, match=message):
        clock.run(tmp_path, **{"max_staleness": 3, "replay": str(journal), **values})
    assert not clock.host.engines


def test_a_journal_from_another_model_is_refused_before_the_first_step(free, tmp_path, monkeypatch):
    journal = journal_of(free(0, max_staleness=3)[0])
    monkeypatch.setattr(
        "tests.support.trainer_in_memory.make_weights", lambda: make_weights(seed=1)
    )
    with pytest.raises(ConfigError, match="another model, or another checkpoint"):
        Clock(0, interrupted_at(0)).run(tmp_path, max_staleness=3, replay=str(journal))


@pytest.mark.parametrize("content", [None, "", '{"step": 0}\n', "what?\n"])
def test_what_is_no_journal_is_refused(tmp_path, content):
    file = tmp_path / "journal.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"--replay=.*Give the rollouts\.jsonl"):
        Clock(0).run(tmp_path, replay=str(file))
