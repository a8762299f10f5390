"""What does not fit the memory that is free, or an engine's cache, is refused with the sum: on this
host, on a GPU that a rank and a server share, and where a placement puts everything."""

import dataclasses

import pytest

from onpolicy.cluster import ray_session
from onpolicy.cluster.placement import Host, Placement, Slot
from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError, ContractError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.rollout.engine_args import require_cache
from onpolicy.run.launch import cluster_engines, memory
from onpolicy.run.launch.cluster_engines import Needs, fitting, require_hosts, require_room_of
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.memory import ProcessMemory, require_memory, require_run_fits
from onpolicy.system.free_memory import Gpu
from tests.support.sized_runs import make_config, make_spec, run_on_gpus

GIB = 1 << 30

A, B, C = HOSTS = [
    Host(name, name, f"10.0.0.{number}", 4, 0, is_here=name == "a")
    for number, name in enumerate("abc")
]


def held(ranks, servers):
    """3 GiB a rank, 2 a server; with GPUs, 1 GiB of each on its host."""
    both = [
        ProcessMemory("trainer rank", {"weights": 3 * GIB}, ranks, {"libraries": GIB}),
        ProcessMemory("SGLang server", {"weights": 2 * GIB}, servers, {"libraries": GIB}),
    ]
    return [processes for processes in both if processes.count]


NEEDS = Needs(held)


def placed(ranks, servers, gpus=()):
    """By the names of the hosts: 'ab' are a rank, or server, on a and one on b."""
    hosts = dict(zip("abc", HOSTS, strict=True))
    slots = (tuple(Slot(hosts[name], gpus, 1) for name in names) for names in (ranks, servers))
    return Placement(*slots)


def has(a, b, c):
    return {host: gib * GIB for host, gib in zip(HOSTS, (a, b, c), strict=True)}


def test_what_cannot_fit_is_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 3 << 30)
    rank = ProcessMemory("trainer rank", {"weights": 1 << 30, "AdamW": 1 << 29}, count=2)
    server = ProcessMemory("SGLang server", {"cache of 9 tokens": 1 << 28})
    require_memory([rank], "cpu")
    with pytest.raises(
        ConfigError,
        match=r"memory=3\.25 GiB together: this host has 3\.00 GiB free\. 2 x trainer rank: weights "
        r"1\.00 \+ AdamW 0\.50 = 3\.00 GiB; SGLang server: cache of 9 tokens 0\.25 = 0\.25 GiB\. ",
    ):
        require_memory([rank, server], "cpu")


def test_on_gpus_each_process_has_its_own(monkeypatch):
    there = tuple(Gpu("H100", (9, 0), free << 30, 80 << 30) for free in (2, 1))
    monkeypatch.setattr(memory, "gpus", lambda: there)
    require_memory([ProcessMemory("trainer rank", {"weights": 1 << 30}, count=8)], "cuda")
    with pytest.raises(
        ConfigError, match=r"1\.50 GiB the largest of them: the fullest GPU has 1\.00"
    ):
        require_memory([ProcessMemory("trainer rank", {"weights": 3 << 29})], "cuda")


def test_a_sequence_that_fits_no_cache_is_refused_and_waiting_is_said(checkpoint, caplog):
    config = make_config(checkpoint)
    small = dataclasses.replace(config, sglang_args=("--max-total-tokens", "57"))
    with pytest.raises(
        ConfigError, match=r"--sglang-max-total-tokens=57: .*have 50 tokens.* need 58"
    ):
        require_cache(make_spec(small)[1])
    caplog.set_level("INFO")
    two = dataclasses.replace(config, sglang_args=("--max-total-tokens=120",))
    require_cache(make_spec(two)[1])
    assert "120 tokens holds 2 sequences of 50 tokens" in caplog.text
    assert "of 256 requests in flight the others wait" in caplog.text


def test_servers_elsewhere_are_not_counted(checkpoint, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    for urls, fits in ((("http://h:1",), True), ((), False)):
        config = make_config(checkpoint, rollout_server_url=urls)
        hf_config, spec = make_spec(config)
        if fits:
            require_run_fits(
                config, hf_config, spec, ModelSize.of(hf_config), config.cluster.num_ranks
            )
            continue
        with pytest.raises(ConfigError, match=r"memory=.* SGLang server: weights"):
            require_run_fits(
                config, hf_config, spec, ModelSize.of(hf_config), config.cluster.num_ranks
            )


def test_hosts_of_a_cluster_are_not_counted_against_this_one(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    caplog.set_level("INFO")
    config = dataclasses.replace(
        make_config(checkpoint, rollout_num_engines=2),
        cluster=groups.ClusterConfig(ray_address="h:1", actor_num_nodes=2),
    )
    hf_config, spec = make_spec(config)
    require_run_fits(config, hf_config, spec, ModelSize.of(hf_config), config.cluster.num_ranks)
    assert "memory of 2 x trainer rank: " in caplog.text
    assert "memory of 2 x SGLang server: " in caplog.text and "this host" not in caplog.text
    small = dataclasses.replace(config, sglang_args=("--max-total-tokens", "57"))
    with pytest.raises(ConfigError, match="--sglang-max-total-tokens=57: "):
        require_run_fits(small, hf_config, make_spec(small)[1], ModelSize.of(hf_config), 1)


def test_a_dry_run_says_what_cannot_fit_and_goes_on(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    config = dataclasses.replace(make_config(checkpoint), dry_run=True)
    hf_config, spec = make_spec(config)
    require_run_fits(config, hf_config, spec, ModelSize.of(hf_config), config.cluster.num_ranks)
    assert "here and now the run would be refused: memory=" in caplog.text


@pytest.mark.parametrize(
    ("ranks", "servers", "most"),
    [
        ("a", "a", (5, 0, 0)), ("a", "bc", (3, 2, 2)), ("a", "abbcc", (5, 4, 4)),
        ("ab", "bc", (3, 5, 2)), ("aabb", "", (6, 6, 0)), ("", "ccc", (0, 0, 6)),
    ],
)  # fmt: skip
def test_each_host_is_asked_for_its_own_ranks_and_servers_and_for_no_byte_more(
    ranks, servers, most
):
    placement, enough = placed(ranks, servers), has(*most)
    lines = require_hosts(placement, NEEDS, enough)
    assert [line.partition(" GiB together")[0] for line in lines] == [
        f"{enough[host] / GIB:.2f}" for host in placement.hosts
    ]
    for host in placement.hosts:
        with pytest.raises(ConfigError, match=rf"GiB together: {host.label} \(10"):
            require_hosts(placement, NEEDS, {**enough, host: enough[host] - 1})


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
    needs = Needs.of(config, hf_config, contract, 50)
    one_each = max(sum(p.bytes for p in needs.held(*counts)) for counts in ((1, 0), (0, 1)))
    free = dict.fromkeys(HOSTS, one_each)
    require_hosts(placed("a", "bc"), needs, free)
    with pytest.raises(ConfigError, match=r"together: a \("):
        require_hosts(placed("a", "aa"), needs, free)
    remote = dataclasses.replace(
        config, engine=groups.EngineConfig(rollout_server_url=("http://h:1",))
    )
    (rank,) = Needs.of(remote, hf_config, contract, 50).held(1, 0)
    assert rank.name == "trainer rank"


def test_only_hosts_that_are_taken_are_asked_for_memory(monkeypatch):
    asked = []

    def free_there(hosts):
        asked.append(list(hosts))
        return dict.fromkeys(hosts, 4 * GIB)

    monkeypatch.setattr(cluster_engines, "free_memory_on", free_there)
    placement, lines = fitting(lambda hosts: placed("b", "c"), NEEDS, HOSTS)
    assert asked == [[B, C]] and placement == placed("b", "c")
    assert lines == [
        *placement.describe(),
        "3.00 GiB together, and b (10.0.0.1) has 4.00 GiB free",
        "2.00 GiB together, and c (10.0.0.2) has 4.00 GiB free",
    ]
    with pytest.raises(ConfigError, match=r"5\.00 GiB together: b \("):
        fitting(lambda hosts: placed("b", "b"), NEEDS, HOSTS)
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

    monkeypatch.setattr(cluster_engines, "gpus_on", gpus_there)
    free = dict.fromkeys(HOSTS, 9 * GIB)
    monkeypatch.setattr(cluster_engines, "free_memory_on", lambda hosts: free)
    return asked


def test_the_gpus_that_a_placement_takes_are_asked_where_they_are(monkeypatch):
    """Those of this host, which is not taken, tell their kind; nobody asks what they have free."""
    asked = told(monkeypatch, {"a": h100s(0), "b": h100s(0, 9, 3), "c": h100s(0, 4, 8)})
    placement = placed("b", "c", gpus=(1, 2))
    lines = fitting(lambda hosts: placement, NEEDS, HOSTS)[1]
    assert lines == [
        *placement.describe(),
        "3.00 GiB the largest of them, and GPU 2 of b (10.0.0.1) has 3.00 GiB free",
        "2.00 GiB the largest of them, and GPU 1 of c (10.0.0.2) has 4.00 GiB free",
        "1.00 GiB beside GPUs, and b (10.0.0.1) has 9.00 GiB free",
        "1.00 GiB beside GPUs, and c (10.0.0.2) has 9.00 GiB free",
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
        fitting(lambda hosts: placed("b", "", gpus=(1, 2)), NEEDS, HOSTS)


def test_a_shared_gpu_is_judged_by_what_it_has_where_it_is(monkeypatch, checkpoint):
    """This host's may have another; those that one side has for itself need not hold both."""
    run = run_on_gpus(checkpoint)
    needs, both = Needs(run.with_push, run), max(moment.each for moment in run.moments())
    alone = max(process.each for process in run.sides(1, 1))
    assert alone < both
    placement = Placement(
        (Slot(B, (1,), 1), Slot(B, (2,), 1)),
        (Slot(B, (2,), 1), Slot(C, (1,), 1)),
    )
    for on_gpu_2, fits in ((both, True), (both - 1, False)):
        there = (*h100s(9), *(Gpu("H100", (9, 0), n, 80 * GIB) for n in (alone, on_gpu_2)))
        told(monkeypatch, {"a": h100s(9), "b": there, "c": there})
        if fits:
            fitting(lambda hosts: placement, needs, HOSTS)
            continue
        with pytest.raises(ConfigError, match=r"the largest of them: GPU 2 of b \(10.* while "):
            fitting(lambda hosts: placement, needs, HOSTS)


def test_what_lies_beside_gpus_must_fit_their_host(monkeypatch):
    told(monkeypatch, {"a": h100s(9), "b": h100s(9, 9)})
    monkeypatch.setattr(cluster_engines, "free_memory_on", lambda hosts: {B: 1 * GIB})
    with pytest.raises(ConfigError, match=r"memory=2\.00 GiB beside GPUs: b \(10"):
        fitting(lambda hosts: placed("bb", "", gpus=(0,)), NEEDS, HOSTS)


def test_gpus_are_asked_for_the_engines_that_move_there(monkeypatch):
    before, after = placed("a", "ab", gpus=(0,)), placed("a", "ac", gpus=(0,))
    for free, fits in ((2, True), (1, False)):
        told(monkeypatch, {"c": h100s(free)})
        if fits:
            require_room_of(NEEDS)(before, after)
            continue
        with pytest.raises(ConfigError, match=r"GPU 0 of c .* has 1\.00 GiB free"):
            require_room_of(NEEDS)(before, after)


def test_this_host_is_not_asked_through_the_cluster(monkeypatch):
    monkeypatch.setattr(ray_session, "free_memory", lambda: 5 * GIB)
    assert ray_session.free_memory_on([A]) == {A: 5 * GIB}


def test_a_host_is_asked_for_the_engines_that_move_there_and_for_no_other(monkeypatch):
    before, after = placed("a", "abb"), placed("a", "acc")
    for free, fits in ((4, True), (3, False)):
        monkeypatch.setattr(
            cluster_engines,
            "free_memory_on",
            lambda hosts, free=free: dict.fromkeys(hosts, free * GIB),
        )
        if fits:
            require_room_of(NEEDS)(before, after)
            continue
        with pytest.raises(
            ConfigError, match=r"memory=4\.00 GiB together: c .* has 3\.00 GiB free"
        ):
            require_room_of(NEEDS)(before, after)
    require_room_of(None)(before, after)
    require_room_of(NEEDS)(after, after)


def test_gpus_of_a_cluster_are_not_compared_with_those_of_this_host(monkeypatch):
    monkeypatch.setattr(memory, "gpus", lambda: pytest.fail("this host was asked"))
    needed = [ProcessMemory("trainer rank", {"weights": 1 << 50})]
    require_memory(needed, "cuda", ray_address="h:1")
