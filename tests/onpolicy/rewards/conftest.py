import pytest

from onpolicy.config.groups import RewardConfig
from onpolicy.rewards.scorer import Scorer


@pytest.fixture
def scorer(monkeypatch, request):
    """Makes scorers whose worker processes can import `reward_functions`; `function` is one in it."""
    monkeypatch.syspath_prepend(str(request.path.parent))
    made = []

    def make(**config):
        if "function" in config:
            config["custom_rm_path"] = f"reward_functions.{config.pop('function')}"
        made.append(Scorer(RewardConfig(**config)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()
