"""Seeds of requests that bring none."""

from types import SimpleNamespace

from sglang_patches.request_seeds import SeedGiver


def ask(giver, server_seed=0, seed=None, top_k=1 << 30):
    params = SimpleNamespace(sampling_seed=seed, top_k=top_k)
    manager = SimpleNamespace(server_args=SimpleNamespace(random_seed=server_seed))
    giver(SimpleNamespace(sampling_params=params), manager)
    return params.sampling_seed


def test_every_request_without_a_seed_gets_another_one_that_the_engine_can_take():
    giver = SeedGiver()
    seeds = [ask(giver) for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_server_that_is_asked_again_in_the_same_order_gives_the_same_ones():
    first, second, other = SeedGiver(), SeedGiver(), SeedGiver()
    ours = [ask(first) for _ in range(5)]
    assert ours == [ask(second) for _ in range(5)]
    assert not set(ours) & {ask(other, server_seed=1) for _ in range(5)}


def test_neither_a_seed_that_was_given_nor_a_health_check_takes_one():
    first, second = SeedGiver(), SeedGiver()
    assert ask(first, seed=7) == 7
    assert ask(first, top_k=1) is None
    assert ask(first) == ask(second)
