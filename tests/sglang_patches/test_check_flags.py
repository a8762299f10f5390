"""What SGLang itself says of flags, from its own parser and its own resolution."""

import argparse

import pytest

from onpolicy.config import TrainConfig, groups
from onpolicy.config.sglang_flags import _OURS, _UNALIGNED
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.rollout.engine_args import EngineSpec, FlagCheck
from onpolicy.run.launch.contracts import contract_for
from tests.support.forked_processes import forked_processes

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def spec(checkpoint):
    hf_config = load_config(str(checkpoint))
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(checkpoint), dtype="float32"),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )
    contract = contract_for(config, hf_config, aligned=True)

    def make(*sglang_args):
        return EngineSpec(
            hf_checkpoint=str(checkpoint),
            contract=contract,
            host="127.0.0.1",
            api_key="key",
            seed=0,
            num_threads=1,
            max_concurrency=8,
            cache_tokens=1000,
            trust_remote_code=False,
            sglang_args=sglang_args,
        )

    return make


REFUSED = [
    (["--load-format", "nosuch"], "--sglang-load-format: invalid choice: 'nosuch'"),
    (["--log-requests", "extra"], "--sglang-log-requests extra: unrecognized arguments: extra"),
    (["--served-model-name", "a:b"], "--sglang-served-model-name a:b: .*cannot contain a colon"),
]


def test_good_flags_pass_and_bad_ones_are_refused_in_sglangs_words(spec):
    """All at once: the first asks a process that imports SGLang, the others some that need not."""
    good = FlagCheck(spec("--chunked-prefill-size", "48", "--disable-radix-cache"))
    with forked_processes():
        bad = [(FlagCheck(spec(*argv)), message) for argv, message in REFUSED]
    with good:
        good.require_passed()
    for check, message in bad:
        with check, pytest.raises(ConfigError, match=message):
            check.require_passed()


def test_a_check_that_is_left_early_leaves_no_process(spec):
    with FlagCheck(spec("--chunked-prefill-size", "48")) as check:
        process = check._process
    assert process.returncode is not None


def test_without_flags_of_the_users_nobody_is_asked(spec):
    with FlagCheck(spec()) as check:
        check.require_passed()
        assert check._process is None


def test_a_flag_that_is_refused_has_no_other_name():
    """SGLang gives some flags two spellings; both must be in our tables."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for table in (_OURS, _UNALIGNED):
        for action in parser._actions:
            names = {flag.removeprefix("--") for flag in action.option_strings}
            names -= {f"no-{name}" for name in names}  # which turns off what is refused
            assert not names & table.keys() or names <= table.keys(), names
