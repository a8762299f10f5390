"""What a server is started with, and what is refused before it is."""

import dataclasses
from importlib.util import find_spec

import pytest

from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec


@pytest.mark.skipif(find_spec("sgl_kernel") is not None, reason="sgl_kernel is installed")
def test_a_server_whose_sglang_lacks_a_package_is_refused_unless_it_runs_elsewhere(checkpoint):
    config = TrainConfig(model=groups.ModelConfig(hf_checkpoint=str(checkpoint)))
    hf_config = load_config(str(checkpoint))
    contract = contract_for(config, hf_config, aligned=True)
    contract = dataclasses.replace(contract, backend="triton", device="cuda")
    with pytest.raises(ConfigError, match="operators=triton: sgl_kernel is missing"):
        rollout_spec(config, hf_config, contract)
    engine = groups.EngineConfig(rollout_server_url=("http://127.0.0.1:30000",))
    rollout_spec(dataclasses.replace(config, engine=engine), hf_config, contract)
