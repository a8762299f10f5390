"""What a placement puts on each host, against the memory of that host."""

import dataclasses

import pytest

from onpolicy.cluster import session
from onpolicy.cluster.hosts import Host
from onpolicy.cluster.placement import Placement, Slot
from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError, ContractError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch import host_memory
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.host_memory import fitting, held_by, require_hosts, require_room_of
from onpolicy.run.launch.process_memory import ProcessMemory
from onpolicy.system.gpus import Gpu

GIB = 1 << 30

A, B, C = HOSTS = [
    Host(name, name, f"10.0.0.{number}", 4, 0, is_here=name == "a")
    for number, name in enumerate("abc")
]


def held(ranks, servers):
    """3 GiB a rank, 2 a server."""
    both = [
        ProcessMemory("trainer rank", {"weights": 3 * GIB}, ranks),
        ProcessMemory("SGLang server", {"weights": 2 * GIB}, servers),
    ]
    return [processes for processes in both if processes.count]


def placed(ranks, servers, gpus=()):
    """By the names of the hosts: 'ab' are a rank, or server, on a and one on b."""
    hosts = dict(zip("abc", HOSTS, strict=True))
    slots = (tuple(Slot(hosts[name], gpus, 1) for name in names) for names in (ranks, servers))
    return Placement(*slots)


def has(a, b, c):
    return {host: gib * GIB for host, gib in zip(HOSTS, (a, b, c), strict=True)}


@pytest.mark.parametrize(
    ("ranks", "servers", "most"),
    [
        ("a", "a", (5, 0, 0)),
        ("a", "bc", (3, 2, 2)),
        ("a", "abbcc", (5, 4, 4)),
        ("ab", "bc", (3, 5, 2)),
        ("aabb", "", (6, 6, 0)),
        ("", "ccc", (0, 0, 6)),
    ],
)
def test_each_host_is_asked_for_its_own_ranks_and_servers_and_for_no_byte_more(
    ranks, servers, most
):
    placement, enough = placed(ranks, servers), has(*most)
    lines = require_hosts(placement, held, enough)
    assert [line.partition(" GiB together")[0] for line in lines] == [
        f"{enough[host] / GIB:.2f}" for host in placement.hosts
    ]
    for host in placement.hosts:
        with pytest.raises(ConfigError, match=rf"GiB together: {host.label} \(10"):
            require_hosts(placement, held, {**enough, host: enough[host] - 1})


def test_the_sum_that_does_not_fit_is_that_of_its_host():
    with pytest.raises(
        ConfigError,
        match=r"memory=5\.00 GiB together: b \(10\.0\.0\.1\) has 4\.00 GiB free\. trainer rank: "
        r"weights 3\.00 = 3\.00 GiB; SGLang server: weights 2\.00 = 2\.00 GiB\. ",
    ):
        require_hosts(placed("ab", "bc"), held, has(9, 4, 9))


def test_a_run_that_no_host_holds_alone_fits_several(checkpoint):
    """The sum of all its processes, against one host, would refuse it."""
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"),
        rollout=groups.RolloutConfig(num_rollout=1),
        engine=groups.EngineConfig(rollout_num_engines=2),
        cluster=groups.ClusterConfig(ray_address="h:1"),
    )
    hf_config = load_config(str(checkpoint))
    contract = contract_for(config, hf_config, aligned=False)
    holds = held_by(config, hf_config, contract, 50)
    one_each = max(sum(p.bytes for p in holds(*counts)) for counts in ((1, 0), (0, 1)))
    free = dict.fromkeys(HOSTS, one_each)
    require_hosts(placed("a", "bc"), holds, free)
    with pytest.raises(ConfigError, match=r"together: a \("):
        require_hosts(placed("a", "aa"), holds, free)
    remote = dataclasses.replace(
        config, engine=groups.EngineConfig(rollout_server_url=("http://h:1",))
    )
    (rank,) = held_by(remote, hf_config, contract, 50)(1, 0)
    assert rank.name == "trainer rank"


def test_only_hosts_that_are_taken_are_asked_for_memory(monkeypatch):
    asked = []

    def free_there(hosts):
        asked.append(list(hosts))
        return dict.fromkeys(hosts, 4 * GIB)

    monkeypatch.setattr(host_memory, "free_memory_on", free_there)
    placement, lines = fitting(lambda hosts: placed("b", "c"), held, HOSTS)
    assert asked == [[B, C]] and placement == placed("b", "c")
    assert lines == [
        *placement.describe(),
        "3.00 GiB together, and b (10.0.0.1) has 4.00 GiB free",
        "2.00 GiB together, and c (10.0.0.2) has 4.00 GiB free",
    ]
    with pytest.raises(ConfigError, match=r"5\.00 GiB together: b \("):
        fitting(lambda hosts: placed("b", "b"), held, HOSTS)
    unasked = placed("b", "b")
    assert fitting(lambda hosts: unasked, None, HOSTS)[1] == unasked.describe()
    assert len(asked) == 2


def h100s(*free, capability=(9, 0)):
    name = "H100" if capability == (9, 0) else "A100"
    return tuple(Gpu(name, capability, n * GIB, size=80 * GIB) for n in free)


def told(monkeypatch, gpus):
    """Let hosts answer with these GPUs, by their names; what is asked grows."""
    asked = []

    def gpus_there(hosts):
        asked.append([host.name for host in hosts])
        return {host: gpus[host.name] for host in hosts}

    monkeypatch.setattr(host_memory, "gpus_on", gpus_there)
    return asked


def test_the_gpus_that_a_placement_takes_are_asked_where_they_are(monkeypatch):
    """Those of this host, which is not taken, tell their kind; nobody asks what they have free."""
    asked = told(monkeypatch, {"a": h100s(0), "b": h100s(0, 9, 3), "c": h100s(0, 4, 8)})
    placement = placed("b", "c", gpus=(1, 2))
    lines = fitting(lambda hosts: placement, held, HOSTS)[1]
    assert lines == [
        *placement.describe(),
        "3.00 GiB the largest of them, and GPU 2 of b (10.0.0.1) has 3.00 GiB free",
        "2.00 GiB the largest of them, and GPU 1 of c (10.0.0.2) has 4.00 GiB free",
    ]
    assert asked == [["a", "b", "c"]]
    assert fitting(lambda hosts: placement, None, HOSTS)[1] == placement.describe()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("there", "error", "message"),
    [
        (h100s(0, 3, 2), ConfigError,
         r"memory=3\.00 GiB the largest of them: GPU 2 of b \(10\.0\.0\.1\) has 2\.00 GiB free"),
        (h100s(9, 9), ConfigError, r"b \(10\.0\.0\.1\): 2 GPUs are seen there, .* num_gpus=0"),
        ((), ConfigError, r"b \(10\.0\.0\.1\): 0 GPUs are seen there"),
        (h100s(9, 9) + h100s(9, capability=(8, 0)), ContractError,
         r"b .*: its GPU 2 is A100 \(compute capability 8\.0\), and this host, .* H100 .* 9\.0\)"),
    ],
)  # fmt: skip
def test_a_host_with_other_gpus_than_the_run_needs_is_refused_by_name(
    monkeypatch, there, error, message
):
    told(monkeypatch, {"a": h100s(9), "b": there})
    with pytest.raises(error, match=message):
        fitting(lambda hosts: placed("b", "", gpus=(1, 2)), held, HOSTS)


def test_a_shared_gpu_is_judged_by_the_size_that_it_has_where_it_is(monkeypatch):
    """This host's may have another; those that a server has for itself need not hold both sides."""
    told(monkeypatch, {"a": h100s(99), "b": h100s(99, 99, 99), "c": h100s(99, 99)})
    judged = []
    both = Placement(
        (Slot(B, (1,), 1), Slot(B, (2,), 1)),
        (Slot(B, (2,), 1), Slot(C, (1,), 1)),
    )
    fitting(lambda hosts: both, held, HOSTS, lambda *gpu: judged.append(gpu))
    assert judged == [("GPU 2 of b (10.0.0.1)", 80 * GIB)]


def test_gpus_are_asked_for_the_engines_that_move_there(monkeypatch):
    before, after = placed("a", "ab", gpus=(0,)), placed("a", "ac", gpus=(0,))
    for free, fits in ((2, True), (1, False)):
        told(monkeypatch, {"c": h100s(free)})
        if fits:
            require_room_of(held)(before, after)
            continue
        with pytest.raises(ConfigError, match=r"GPU 0 of c .* has 1\.00 GiB free"):
            require_room_of(held)(before, after)


def test_this_host_is_not_asked_through_the_cluster(monkeypatch):
    monkeypatch.setattr(session, "free_memory", lambda: 5 * GIB)
    assert session.free_memory_on([A]) == {A: 5 * GIB}


def test_a_host_is_asked_for_the_engines_that_move_there_and_for_no_other(monkeypatch):
    before, after = placed("a", "abb"), placed("a", "acc")
    for free, fits in ((4, True), (3, False)):
        monkeypatch.setattr(
            host_memory, "free_memory_on", lambda hosts, free=free: dict.fromkeys(hosts, free * GIB)
        )
        if fits:
            require_room_of(held)(before, after)
            continue
        with pytest.raises(
            ConfigError, match=r"memory=4\.00 GiB together: c .* has 3\.00 GiB free"
        ):
            require_room_of(held)(before, after)
    require_room_of(None)(before, after)
    require_room_of(held)(after, after)
