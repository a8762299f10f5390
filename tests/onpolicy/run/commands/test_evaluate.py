"""What `onpolicy eval` asks of servers that hold adapters by names, before and after."""

from types import SimpleNamespace

import pytest

from onpolicy.config import TrainConfig
from onpolicy.config.groups import LoraConfig, ModelConfig
from onpolicy.errors import ConfigError, EngineError
from onpolicy.models.hf_config import load_config
from onpolicy.run.commands.evaluate import NamedEngines
from onpolicy.run.launch.contracts import contract_for
from tests.support.weight_digests import digest_of

WEIGHTS = "0123456789abcdef"


@pytest.fixture(scope="module")
def make(checkpoint, tmp_path_factory):
    """(what makes engines of two servers, which report what is given; the digest of their base)."""
    lora = LoraConfig(lora_rank=8, lora_name="math")
    config = TrainConfig(model=ModelConfig(hf_checkpoint=str(checkpoint)), lora=lora)
    hf_config = load_config(str(checkpoint))
    contract = contract_for(config, hf_config, aligned=True)

    def make(*reports):
        clients = [
            SimpleNamespace(url=f"http://{i}", report=iter(each).__next__)
            for i, each in enumerate(reports)
        ]
        rollout = SimpleNamespace(clients=clients)
        given = config, hf_config, contract, tmp_path_factory.mktemp("run")
        return NamedEngines(*given, make_rollout=lambda *_: rollout)

    return make, digest_of(dict(make()._tensors()))


def report(base, version="3", weights=WEIGHTS):
    return {"pushed": {"version": version, "base": base}, "weights": weights}


def test_a_policy_has_the_rollouts_and_the_digest_that_its_servers_say(make):
    make, base = make
    engines = make(*[[report(base)] * 2] * 2)
    assert engines.take_up(0) == engines.weight_version == 3
    assert engines.weight_digest == WEIGHTS
    engines.require_kept()


@pytest.mark.parametrize("later", [{"version": "4"}, {"weights": WEIGHTS[::-1]}])
def test_a_push_that_comes_meanwhile_ends_the_evaluation(make, later):
    make, base = make
    engines = make(*[[report(base), report(base, **later)]] * 2)
    engines.take_up(0)
    with pytest.raises(EngineError, match="--lora-name=math: its run has pushed since"):
        engines.require_kept()


def test_another_base_of_the_same_shapes_is_refused(make):
    make, base = make
    with pytest.raises(ConfigError, match="is not the base of --lora-name=math on these servers"):
        make(*[[report(base[::-1])]] * 2).take_up(0)


@pytest.mark.parametrize(
    ("second", "error", "rule"),
    [
        (
            {"pushed": None, "weights": WEIGHTS},
            ConfigError,
            "http://1: --lora-name=math: nothing was",
        ),
        ({"version": "2"}, EngineError, "do not hold one and the same policy"),
        ({"weights": WEIGHTS[::-1]}, EngineError, "do not hold one and the same policy"),
    ],
)
def test_servers_that_do_not_all_hold_the_policy_are_refused(make, second, error, rule):
    make, base = make
    theirs = second if "pushed" in second else report(base, **second)
    with pytest.raises(error, match=rule):
        make([report(base)], [theirs]).take_up(0)


@pytest.mark.parametrize(
    "said", [{"weights": "changed since it was pushed: a"}, {"pushed": "ranks differ: [...]"}]
)
def test_what_a_server_says_instead_of_a_digest_is_refused(make, said):
    make, base = make
    with pytest.raises(EngineError, match="or not as it was pushed"):
        make(*[[{**report(base), **said}]] * 2).take_up(0)
