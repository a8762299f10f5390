"""Slots for ranks and engines, on hosts of all sizes."""

import pytest

from onpolicy.cluster.placement import Host, place, place_again, place_engines
from onpolicy.config.groups import ClusterConfig, EngineConfig
from onpolicy.errors import ConfigError


def hosts(*sizes, cores=8):
    """Hosts a, b, ... with these numbers of GPUs; the first is the controller's."""
    return [
        Host(f"id-{name}", name, f"10.0.0.{i}", cores, gpus, is_here=i == 0)
        for i, (name, gpus) in enumerate(zip("abcdef", sizes, strict=False))
    ]


def slots(placement):
    """{"trainer": ["a0", ...], "engines": ["b0,1", ...]}: hosts and their GPUs."""
    return {
        side: [
            f"{slot.host.label}{','.join(map(str, slot.devices))}"
            for slot in getattr(placement, side)
        ]
        for side in ("trainer", "engines")
    }


@pytest.mark.parametrize(
    ("sizes", "nodes", "ranks", "engines", "per_engine", "colocate", "trainer", "expected"),
    [
        ([2], 1, 1, 1, 1, False, ["a0"], ["a1"]),
        ([8], 1, 4, 2, 2, False, ["a0", "a1", "a2", "a3"], ["a4,5", "a6,7"]),
        ([4, 4], 1, 4, 2, 2, False, ["a0", "a1", "a2", "a3"], ["b0,1", "b2,3"]),
        ([3, 4], 1, 2, 3, 2, False, ["a0", "a1"], None),
        ([3, 4], 1, 2, 2, 2, False, ["a0", "a1"], ["b0,1", "b2,3"]),
        ([0, 4, 4], 2, 2, 2, 2, False, ["b0", "b1", "c0", "c1"], ["b2,3", "c2,3"]),
        ([1], 1, 1, 1, 1, True, ["a0"], ["a0"]),
        ([4, 4], 2, 4, 4, 2, True, [f"{h}{g}" for h in "ab" for g in range(4)],
         ["a0,1", "a2,3", "b0,1", "b2,3"]),
        ([1], 1, 1, 1, 1, False, ["a0"], None),
    ],
)  # fmt: skip
def test_ranks_take_the_first_gpus_and_engines_those_after_them_each_on_one_host(
    sizes, nodes, ranks, engines, per_engine, colocate, trainer, expected
):
    cluster = ClusterConfig(actor_num_nodes=nodes, actor_num_gpus_per_node=ranks)
    servers = EngineConfig(rollout_num_engines=engines, colocate=colocate)

    def placed():
        return slots(place(cluster, servers, per_engine, "cuda", hosts(*sizes)))

    if expected is None:
        total = nodes * ranks + engines * per_engine
        with pytest.raises(ConfigError, match=rf"servers x --sglang-tp-size \d = {total} GPUs"):
            placed()
    else:
        assert placed() == {"trainer": trainer, "engines": expected}


@pytest.mark.parametrize(
    ("num_hosts", "nodes", "ranks", "engines", "trainer", "expected"),
    [
        (1, 1, 1, 2, "a", "aa"), (3, 1, 1, 2, "a", "bc"), (3, 2, 1, 2, "ab", "ca"),
        (3, 1, 2, 4, "aa", "bcbc"),
    ],
)  # fmt: skip
def test_on_cpus_an_engine_goes_where_the_fewest_processes_are(
    num_hosts, nodes, ranks, engines, trainer, expected
):
    cluster = ClusterConfig(actor_num_nodes=nodes, actor_num_ranks_per_node=ranks)
    servers = EngineConfig(rollout_num_engines=engines)
    placement = place(cluster, servers, 1, "cpu", hosts(*[0] * num_hosts))
    assert slots(placement) == {"trainer": list(trainer), "engines": list(expected)}
    for side in (placement.trainer, placement.engines):
        for slot in side:
            assert slot.cpu_threads == 8 // sum(other.host == slot.host for other in side)


def test_a_host_without_cores_takes_nothing():
    """A head of a cluster that is to stay free: `ray start --head --num-cpus=0`."""
    head, *others = hosts(0, 0)
    head = Host(head.name, head.label, head.address, 0, 0)
    placement = place(ClusterConfig(), EngineConfig(), 1, "cpu", [head, *others])
    assert placement.hosts == tuple(others) and not placement.is_here


def test_servers_that_run_already_need_no_slot():
    servers = EngineConfig(rollout_server_url=("http://h:1",))
    assert place(ClusterConfig(), servers, 1, "cuda", hosts(1)).engines == ()


@pytest.mark.parametrize(
    ("cluster", "device", "message"),
    [
        ({"actor_num_nodes": 3}, "cpu", "--actor-num-nodes=3: 3 trainer ranks, 1 on each host, and "
         r"there are 4 GPUs and 8 cores on a \(10.0.0.0\), 4 GPUs and 8 cores on b"),
        ({"actor_num_gpus_per_node": 5}, "cuda", "--actor-num-nodes=1 x --actor-num-gpus-per-node=5: 5"),
        ({"actor_num_gpus_per_node": 1}, "cpu", "--actor-num-gpus-per-node=1: there are no GPUs here"),
        ({"actor_num_ranks_per_node": 1}, "cuda", "--actor-num-ranks-per-node=1: with GPUs each rank"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_sum(cluster, device, message):
    with pytest.raises(ConfigError, match=message):
        place(ClusterConfig(**cluster), EngineConfig(), 1, device, hosts(4, 4))


def test_where_sharing_gpus_would_do_it_is_offered():
    with pytest.raises(ConfigError, match=r"share GPUs \(--colocate\)\.$"):
        place(ClusterConfig(), EngineConfig(), 1, "cuda", hosts(1))


def test_a_placement_is_described_host_by_host():
    cluster, servers = (
        ClusterConfig(actor_num_gpus_per_node=2),
        EngineConfig(rollout_num_engines=2),
    )
    assert place(cluster, servers, 2, "cuda", hosts(4, 4)).describe() == [
        "a (10.0.0.0): trainer rank 0 (GPU 0); trainer rank 1 (GPU 1); engine 0 (GPU 2, 3)",
        "b (10.0.0.1): engine 1 (GPU 0, 1)",
    ]
    on_cores = place(ClusterConfig(), EngineConfig(), 1, "cpu", hosts(0, 0))
    assert on_cores.describe()[1] == "b (10.0.0.1): engine 0 (8 threads)"


@pytest.mark.parametrize(
    ("sizes", "engines", "per_engine", "colocate", "left", "before", "after"),
    [
        ([1, 4, 4], 2, 2, False, "ac", ["b0,1", "b2,3"], ["c0,1", "c2,3"]),
        ([4, 2, 2], 3, 2, False, "ac", ["a1,2", "b0,1", "c0,1"], None),
        ([4, 1, 1], 5, 1, False, "ab", ["a1", "a2", "a3", "b0", "c0"], None),
        ([2, 2, 4], 2, 2, False, "acd", ["b0,1", "c0,1"], ["c2,3", "c0,1"]),
        ([2, 2, 2], 2, 2, False, "acd", ["b0,1", "c0,1"], ["d0,1", "c0,1"]),
        ([4, 2], 1, 2, False, "ab", ["a1,2"], ["a1,2"]),
        ([1, 1, 1], 2, 1, True, "a", ["a0", "b0"], None),
        ([2, 1, 1], 3, 1, True, "ac", ["a0", "a1", "b0"], ["a0", "a1", "c0"]),
        ([4, 4], 2, 2, False, "b", ["a1,2", "b0,1"], None),
    ],
)  # fmt: skip
def test_engines_of_a_lost_host_take_gpus_that_are_free_and_the_others_stay(
    sizes, engines, per_engine, colocate, left, before, after
):
    everywhere = hosts(*sizes, 2)
    remaining = [host for host in everywhere if host.label in left]
    servers = EngineConfig(rollout_num_engines=engines, colocate=colocate)
    placement = place(ClusterConfig(), servers, per_engine, "cuda", everywhere[: len(sizes)])
    assert slots(placement)["engines"] == before

    def placed_again():
        again = place_again(placement, per_engine, remaining, colocate)
        assert again.trainer == placement.trainer
        kept = [slot for slot in placement.engines if slot.host in remaining]
        assert [slot for slot in again.engines if slot in kept] == kept
        return slots(again)["engines"]

    if after is None:
        with pytest.raises(ConfigError, match=r"GPUs, and there are .* on |ranks of the trainer"):
            placed_again()
    else:
        assert placed_again() == after


@pytest.mark.parametrize(
    ("engines", "left", "before", "after"),
    [
        (1, "a", "b", "a"), (2, "ac", "bc", "ac"), (4, "ac", "bcab", "ccaa"),
        (2, "abcd", "bc", "bc"), (1, "acd", "b", "c"),
    ],
)  # fmt: skip
def test_engines_of_a_lost_host_share_the_cores_that_are_left(engines, left, before, after):
    everywhere = hosts(0, 0, 0, 0)
    servers = EngineConfig(rollout_num_engines=engines)
    placement = place(ClusterConfig(), servers, 1, "cpu", everywhere[:3])
    assert slots(placement)["engines"] == list(before)
    again = place_again(placement, 1, [host for host in everywhere if host.label in left])
    assert slots(again) == {"trainer": ["a"], "engines": list(after)}
    new = [slot for slot in again.engines if slot not in placement.engines]
    for slot in new:
        assert slot.cpu_threads == 8 // after.count(slot.host.label)


def test_engines_without_a_trainer_take_the_first_gpus():
    assert slots(place_engines(2, 2, "cuda", hosts(3, 2)))["engines"] == ["a0,1", "b0,1"]
    assert slots(place_engines(3, 1, "cpu", hosts(0, 0)))["engines"] == ["a", "b", "a"]
    with pytest.raises(
        ConfigError, match=r"=2: 2 servers x --sglang-tp-size 2 = 4 GPUs.*servers\.$"
    ):
        place_engines(2, 2, "cuda", hosts(3))
    with pytest.raises(ConfigError, match="there are 0 GPUs and 0 cores on a"):
        place_engines(1, 1, "cpu", [Host("a", "a", "h", 0, 0)])
