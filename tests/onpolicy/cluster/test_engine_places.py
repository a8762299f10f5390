"""What engines are in their slots, and in others when a host has left the cluster."""

from dataclasses import replace

import pytest

from onpolicy.cluster.engine_host import Places
from onpolicy.cluster.placement import Host, place
from onpolicy.config.groups import ClusterConfig, EngineConfig
from onpolicy.errors import ConfigError, EngineError, HostLostError
from onpolicy.rollout.engine_args import EngineSpec
from tests.support.tiny_policy import ALIGNED

GONE = EngineError("nothing answers.")
SPEC = EngineSpec(
    hf_checkpoint="", contract=ALIGNED, host="127.0.0.1", api_key="", seed=0, num_threads=99,
    trust_remote_code=False, sglang_args=(),
)  # fmt: skip


def hosts(gpus):
    return [
        Host(f"id-{x}", x, f"10.0.0.{i}", 8, gpus, is_here=i == 0) for i, x in enumerate("abcd")
    ]


def places_of(count, engines, device="cpu", ranks=1, **more):
    """Places on the first hosts of a cluster, and the list of its hosts, which may leave it."""
    alive = hosts(gpus=1 if device == "cuda" else 0)[:count]
    servers = EngineConfig(rollout_num_engines=engines)
    placement = place(ClusterConfig(actor_num_nodes=ranks), servers, 1, device, alive)
    return Places(placement, hosts=lambda: alive, **more), alive


def where(spec):
    return spec.number, spec.node, spec.host, spec.num_threads


def test_an_engine_is_what_its_slot_makes_of_it():
    places, _ = places_of(2, 3)
    assert [*map(where, places.specs(SPEC))] == [
        (0, "id-b", "10.0.0.1", 4), (1, "", "10.0.0.0", 8), (2, "id-b", "10.0.0.1", 4),
    ]  # fmt: skip
    places, _ = places_of(1, 2, cpu_threads=3)
    assert [*map(where, places.specs(SPEC))] == [(i, "", "127.0.0.1", 3) for i in range(2)]
    on_gpus = Places(place(ClusterConfig(), EngineConfig(), 1, "cuda", hosts(2)))
    assert [spec.first_gpu for spec in on_gpus.specs(SPEC)] == [1]


def test_engines_of_a_lost_host_go_together_and_later_ones_are_made_there():
    places, alive = places_of(3, 4)
    first, _, third, _ = places.specs(SPEC)
    assert (first.node, third.node) == ("id-b", "") and places.specs(SPEC)[3].node == "id-b"
    del alive[1]
    moved = [places.elsewhere(spec, GONE) for spec in (first, places.specs(SPEC)[3])]
    assert [spec.number for spec in moved] == [0, 3]
    assert {spec.node for spec in moved} <= {"id-a", "id-c"}
    for spec in moved:  # on the controller's own host it is an actor's, too
        again = places.specs(SPEC)[spec.number]
        assert replace(again, node=again.node or "id-a") == spec


def test_engines_move_only_where_there_is_room_for_them():
    asked = []

    def none_anywhere(before, after):
        asked.append((before, after))
        raise ConfigError("memory=2 GiB: c has 1 GiB free.")

    places, _ = places_of(3, 1, require_room=none_anywhere)
    before = places.placement
    (spec,) = places.specs(SPEC)
    with pytest.raises(HostLostError, match="no other place: memory=2 GiB: c has 1 GiB free"):
        places.elsewhere(spec, GONE)
    ((was, planned),) = asked
    assert was == places.placement == before != planned


def test_a_host_that_takes_no_actor_counts_as_lost_whatever_the_cluster_says_of_it():
    places, _ = places_of(3, 1)
    (spec,) = places.specs(SPEC)
    for expected in ("id-c", "id-a"):
        spec = places.elsewhere(spec, GONE)
        assert spec.node == expected
    with pytest.raises(HostLostError, match="ranks of the trainer were there too"):
        places.elsewhere(spec, GONE)


@pytest.mark.parametrize(
    ("device", "ranks", "why"),
    [
        ("cuda", 1, "no other place: --rollout-num-engines=1: .* = 2 GPUs, and there are 1 GPUs"),
        ("cpu", 2, "no other place: ranks of the trainer were there too"),
    ],
)
def test_where_they_do_not_fit_the_loss_is_said_with_its_reason(device, ranks, why):
    places, alive = places_of(2, 2 if ranks > 1 else 1, device, ranks)
    lost = next(spec for spec in places.specs(SPEC) if spec.node)
    del alive[1]
    with pytest.raises(
        HostLostError,
        match=rf"(?s)10\.0\.0\.1: the host has left .*nothing answers\..*{why}.*--max-rank-restarts",
    ):
        places.elsewhere(lost, GONE)
