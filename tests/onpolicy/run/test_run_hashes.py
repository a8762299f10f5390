"""The table of run hashes: a schedule has one, on any engines and hosts, through any fault."""

from itertools import product

import pytest

from onpolicy.config.groups import EngineConfig
from onpolicy.errors import TrainerLostError
from onpolicy.run.probe import PROMPTS
from onpolicy.run.run import Run
from tests.support.cluster_in_memory import Cluster, PlacedEngine
from tests.support.run_in_memory import run_in_memory

pytestmark = [pytest.mark.usefixtures("one_process"), pytest.mark.runs]

ROLLOUTS, AT = 4, 2
"""A fault comes in the step AT, after the first checkpoint."""

SCHEDULES = [*product((0, 1, 2), (False, True))]
"""(lag, dynamic sampling); with the largest lag there is a curriculum too"""

CLUSTERS = [
    (engines, hosts)
    for engines, hosts in product((1, 2, 3), (1, 2, 3))
    if len(Cluster(hosts).placement(EngineConfig(rollout_num_engines=engines)).hosts) == hosts
]
"""Engines beside a rank of the trainer, on as many hosts as they take by the run's own placement."""

FAULTS = ("none", "engine killed", "host lost", "resumed", "rank lost")


CROSSED = {(1, False), (2, False)}
"""Schedules that meet every fault on every cluster."""


def cells(schedule):
    """(engines, hosts, fault): all clusters without a fault, and all faults on the largest one; of
    CROSSED the whole product."""
    for (engines, hosts), fault in product(CLUSTERS, FAULTS):
        is_met = fault == "none" or (engines, hosts) == CLUSTERS[-1] or schedule in CROSSED
        if is_met and (hosts > 1 or fault != "host lost"):
            yield engines, hosts, fault


class Interrupted(Exception):
    pass


def begins_even(sample):
    """A reward that all samples of many groups share."""
    return float(sample.response_ids[0] % 2 == 0)


def run(directory, schedule, cluster, make_run=Run, **more):
    lag, dynamic = schedule
    values = {
        "num_rollout": ROLLOUTS, "rollout_batch_size": 2, "n_samples_per_prompt": 3,
        "rollout_max_response_len": 10, "rollout_lag": lag, "curriculum": "failures" if lag == 2 else "",
        "dynamic_sampling": dynamic, **more,
    }  # fmt: skip
    return run_in_memory(
        directory, cluster, reward=begins_even, make_run=make_run, eval_sets={}, **values
    ).run_hash


def through(fault, directory, schedule, engines, hosts):
    """The hash of a run that has met the fault, and has been seen to."""
    cluster, restarts = Cluster(hosts), []

    def strike(run):
        """What happens; returns how many engines are to be started again for it."""
        if fault == "engine killed":
            run.engines.rollout.servers[0].memory = None
            return 1
        if fault == "host lost":
            lost = cluster.lose_last_host()
            assert lost
            return lost
        if fault == "resumed":
            raise Interrupted
        if hosts > 1:  # a rank's host goes with its engines
            cluster.lose_last_host()
        raise TrainerLostError("a rank is gone.")

    class Faulty(Run):
        def train(self, groups, step):
            if step == AT and fault != "none" and not restarts:
                restarts.append(0)
                restarts.append(strike(self))
            return super().train(groups, step)

    values = {"rollout_num_engines": engines}
    if fault in ("resumed", "rank lost"):
        values |= {"save": str(directory / "save"), "save_interval": AT}
    if fault == "rank lost":
        values["max_rank_restarts"] = 1
    if fault == "resumed":
        with pytest.raises(Interrupted):
            run(directory, schedule, cluster, Faulty, **values)
        values["load"] = values["save"]
    found = run(directory, schedule, cluster, Faulty, **values)
    assert bool(restarts) == (fault != "none")
    # What a run's own end takes along is started again or not, as the clock has it.
    assert fault == "rank lost" or cluster.num_restarts == sum(restarts)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The hash of a schedule with one engine on one host, undisturbed."""
    found = {}

    def of(schedule):
        if schedule not in found:
            found[schedule] = run(tmp_path_factory.mktemp("plain"), schedule, Cluster(1))
        return found[schedule]

    return of


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_schedule_has_one_hash_on_all_clusters_and_through_all_faults(plain, tmp_path, schedule):
    table = {}
    for engines, hosts, fault in cells(schedule):
        directory = tmp_path / f"{engines}-{hosts}-{fault}"
        table[engines, hosts, fault] = through(fault, directory, schedule, engines, hosts)
    assert {clusters[:2] for clusters in table} == set(CLUSTERS) and len(CLUSTERS) == 8
    assert {fault for *_, fault in table} == set(FAULTS)
    assert table == dict.fromkeys(table, plain(schedule))


def test_every_schedule_has_a_hash_of_its_own(plain):
    hashes = {plain(schedule) for schedule in SCHEDULES}
    assert len(hashes) == len(SCHEDULES) == 6


class Lies(PlacedEngine):
    """Samples one response from the weights of the push before, and says that they are the new ones."""

    before, asked, has_lied = None, 0, False

    def post(self, path, body, num_bytes=0):
        if path == "/update_weights_from_disk":
            self.before = {name: table.clone() for name, table in self.memory.weights.items()}
            self.asked = 0
        return super().post(path, body, num_bytes)

    async def generate(self, session, request, takes_parts=False):
        self.asked += 1
        is_probe = self.asked <= PROMPTS
        if self.has_lied or is_probe or self.memory.version == 0:
            return await super().generate(session, request, takes_parts)
        memory = self.memory
        now = memory.weights, memory.prefixes
        self.has_lied, memory.weights, memory.prefixes = True, self.before, {}
        try:
            return await super().generate(session, request, takes_parts)
        finally:
            memory.weights, memory.prefixes = now


def test_one_response_of_other_weights_makes_another_hash(plain, tmp_path):
    cluster, schedule = Cluster(2), (1, False)
    cluster.make_engine = Lies
    found = run(tmp_path, schedule, cluster)
    assert any(engine.has_lied for engine in cluster.engines)
    assert found != plain(schedule)
