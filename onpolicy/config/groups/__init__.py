"""The flags of `onpolicy train`, in groups, some of which other commands share (see `tools`).

A field's name is the flag's. Imports no torch.

The annotation of a field holds its range, its readers, its contradictions and whether it decides results
(`config.rules`). A record of `fallback_correction` inside a group contributes its fields as flags, with
the prefix in its annotation (`config.flags`).
"""

from onpolicy.algorithm.registry import LossAggregation
from onpolicy.config.groups.agents import (
    AgentConfig,
    SessionsConfig,
    TemplateOptions,
    template_options,
)
from onpolicy.config.groups.algorithm import AlgorithmConfig
from onpolicy.config.groups.cluster import ClusterConfig, HostsConfig
from onpolicy.config.groups.correction import FallbackConfig, GovernorFlags
from onpolicy.config.groups.critic import BY_CRITIC, CriticConfig
from onpolicy.config.groups.distillation import DistillationConfig
from onpolicy.config.groups.engines import (
    CpuConfig,
    EngineConfig,
    EngineCountConfig,
    SamplersConfig,
    ServerConfig,
    ServersConfig,
    WeightSync,
    WeightSyncConfig,
)  # fmt: skip
from onpolicy.config.groups.evaluation import (
    NEVER_BEST,
    EvalConfig,
    EvalSet,
    EvalSetsConfig,
    sets_of,
)
from onpolicy.config.groups.inputs import (
    BY_TEMPLATE,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    RowsConfig,
)
from onpolicy.config.groups.lora import (
    NOT_MERGED,
    LoraConfig,
)
from onpolicy.config.groups.outputs import OutputConfig
from onpolicy.config.groups.parity import OperatorsConfig, ParityConfig
from onpolicy.config.groups.reward import RewardConfig
from onpolicy.config.groups.rollout import RolloutConfig, SamplingConfig
from onpolicy.config.groups.training import MegatronConfig, TrainBackend, TrainerConfig

__all__ = [
    "BY_CRITIC",
    "BY_TEMPLATE",
    "NEVER_BEST",
    "NOT_MERGED",
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CpuConfig",
    "CriticConfig",
    "DataConfig",
    "DistillationConfig",
    "EngineConfig",
    "EngineCountConfig",
    "EvalConfig",
    "EvalSet",
    "EvalSetsConfig",
    "FallbackConfig",
    "GovernorFlags",
    "HostsConfig",
    "LoraConfig",
    "LossAggregation",
    "MegatronConfig",
    "ModelConfig",
    "OperatorsConfig",
    "OutputConfig",
    "ParityConfig",
    "RewardConfig",
    "RolloutConfig",
    "RowsConfig",
    "SamplersConfig",
    "SamplingConfig",
    "ServerConfig",
    "ServersConfig",
    "SessionsConfig",
    "TemplateOptions",
    "TrainBackend",
    "TrainerConfig",
    "WeightSync",
    "WeightSyncConfig",
    "sets_of",
    "template_options",
]
