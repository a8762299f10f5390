"""The flags of `onpolicy train`, in groups, some of which other commands share (see `tool_flags`).

A field's name is the flag's. Imports no torch.

The annotation of a field holds its range, its readers, its contradictions and whether it decides results
(`config.rules`). A record of `fallback_correction` inside a group contributes its fields as flags, with
the prefix in its annotation (`config.flags`).
"""

from onpolicy.algorithm.catalogue import LossAggregation
from onpolicy.config.groups.agent_flags import (
    AgentConfig,
    SessionsConfig,
    TemplateOptions,
    template_options,
)
from onpolicy.config.groups.algorithm_flags import BY_CRITIC, AlgorithmConfig, CriticConfig
from onpolicy.config.groups.correction_flags import FallbackConfig, GovernorFlags
from onpolicy.config.groups.distillation_flags import DistillationConfig
from onpolicy.config.groups.engine_flags import (
    ClusterConfig,
    CpuConfig,
    EngineConfig,
    EngineCountConfig,
    HostsConfig,
    SamplersConfig,
    ServerConfig,
    ServersConfig,
    WeightSync,
    WeightSyncConfig,
)
from onpolicy.config.groups.evaluation_flags import (
    NEVER_BEST,
    EvalConfig,
    EvalSet,
    EvalSetsConfig,
    sets_of,
)
from onpolicy.config.groups.input_flags import (
    BY_TEMPLATE,
    CheckpointConfig,
    DataConfig,
    Dtype,
    ModelConfig,
    RowsConfig,
)
from onpolicy.config.groups.output_flags import OutputConfig
from onpolicy.config.groups.parity_flags import (
    NEEDS_EQUAL_BITS,
    OperatorsConfig,
    ParityConfig,
)
from onpolicy.config.groups.reward_flags import RewardConfig
from onpolicy.config.groups.rollout_flags import RolloutConfig, SamplingConfig
from onpolicy.config.groups.training_flags import (
    NOT_MERGED,
    LoraConfig,
    MegatronConfig,
    TrainBackend,
    TrainerConfig,
)

__all__ = [
    "BY_CRITIC", "BY_TEMPLATE", "NEEDS_EQUAL_BITS", "NEVER_BEST", "NOT_MERGED", "AgentConfig",
    "AlgorithmConfig", "CheckpointConfig", "ClusterConfig", "CpuConfig", "CriticConfig", "DataConfig",
    "DistillationConfig", "Dtype", "EngineConfig", "EngineCountConfig", "EvalConfig", "EvalSet",
    "EvalSetsConfig", "FallbackConfig", "GovernorFlags", "HostsConfig", "LoraConfig",
    "LossAggregation", "MegatronConfig", "ModelConfig", "OperatorsConfig", "OutputConfig",
    "ParityConfig", "RewardConfig", "RolloutConfig", "RowsConfig", "SamplersConfig",
    "SamplingConfig", "ServerConfig", "ServersConfig", "SessionsConfig", "TemplateOptions",
    "TrainBackend", "TrainerConfig", "WeightSync", "WeightSyncConfig", "sets_of",
    "template_options",
]  # fmt: skip
