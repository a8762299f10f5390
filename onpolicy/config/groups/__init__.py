"""The flags of `onpolicy train`, in groups. A field's name is the flag's; imports no torch.

A number's range stands beside it. A record of `fallback_correction` inside a group gives the group its
fields as flags, under the prefix that stands beside it (`config.flags`).
"""

from onpolicy.config.groups.algorithm import AlgorithmConfig, LossAggregation
from onpolicy.config.groups.correction import FallbackConfig, GovernorFlags
from onpolicy.config.groups.inputs import DataConfig, ModelConfig
from onpolicy.config.groups.outputs import EvalConfig, OutputConfig
from onpolicy.config.groups.parity import ParityConfig
from onpolicy.config.groups.reward import RewardConfig
from onpolicy.config.groups.rollout import EngineConfig, RolloutConfig, WeightSyncConfig
from onpolicy.config.groups.training import MegatronConfig, TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "FallbackConfig",
    "GovernorFlags",
    "LossAggregation",
    "MegatronConfig",
    "ModelConfig",
    "OutputConfig",
    "ParityConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "WeightSyncConfig",
]
