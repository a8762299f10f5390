"""What a classifier that gives rewards must be, before anything is started."""

from __future__ import annotations

from onpolicy.config import TrainConfig
from onpolicy.config.groups.remote_reward import is_asked
from onpolicy.config.rules import Facts
from onpolicy.config.secrets import reveal
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError, ContractError, EngineError
from onpolicy.models.classifiers import as_decoder, require_rewards
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config
from onpolicy.models.operator_shapes import operator_shapes
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.rollout.client import EngineClient
from onpolicy.run.launch.classifiers import FLAG, classifier_spec, has_own_classifier


def require_classifier(config: TrainConfig) -> None:
    """Raise ConfigError unless --reward-checkpoint is a classifier whose numbers can be had, and what is
    served is a model of its sizes, on aligned operators."""
    reward = config.reward
    if not is_asked(Facts.of(config), "model"):
        return
    path = reward.reward_checkpoint
    hf_config = load_config(path, flag=FLAG)
    require_rewards(path, hf_config, False, FLAG)
    if reward.reward_input == "chat" and load_tokenizer(path, flag=FLAG).chat_template is None:
        raise ConfigError(
            f"{FLAG}={path}: its tokenizer has no chat template, which writes the conversation. Add "
            "chat_template.jinja to the checkpoint, or give --reward-input text."
        )
    if has_own_classifier(config):
        classifier_spec(config)
    key = reveal("--reward-api-key", reward.reward_api_key)
    for url in reward.reward_server_url:
        served = _contract(url, key, config.engine.rollout_health_timeout)
        facts = ModelFacts(as_decoder(hf_config))
        expected = operator_shapes(facts, served.row_parallel_blocks)
        if not served.is_aligned or served.shapes != expected:
            raise ConfigError(
                f"--reward-server-url={url}: serves another model than {FLAG}={path}. Start `onpolicy "
                "serve --hf-checkpoint` with that checkpoint, and give the URL that it prints."
            )


def _contract(url: str, key: str, seconds: float) -> NumericsContract:
    """What a server says that it computes by. Raises ConfigError if it says nothing."""
    try:
        report = EngineClient(url, key, seconds, seconds).report()
    except (ContractError, EngineError) as error:
        raise ConfigError(
            f"--reward-server-url={url}: is no server of `onpolicy serve` that takes --reward-api-key "
            f"({error}). Start one with --hf-checkpoint and the classifier, and give the URL that it "
            "prints."
        ) from error
    return NumericsContract.from_json(report["contract"])
