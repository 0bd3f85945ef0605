"""Defines a run's configuration and reads it from YAML. It opens no model directory and no data: `checks/plan.py` does.

Other rooms import the sections of the schema from here. `loading.py` reads YAML and overrides, and turns every error
into one line.
"""

from spot_async.config.base import (
    NonNegativeFloat,
    OneOrMore,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    as_list,
    leaves,
)
from spot_async.config.evaluation import BenchmarkConfig, EvaluationConfig
from spot_async.config.plugins import BackendSettings, Place, PluginSettings, backend_section
from spot_async.config.problems import (
    DataConfig,
    Duplicates,
    ProblemSetConfig,
    PromptConfig,
    TeacherPromptConfig,
    TemplateConfig,
)
from spot_async.config.schema import (
    CONFIG_VERSION,
    Config,
    ModelConfig,
    QueueConfig,
    RunConfig,
    SamplingConfig,
    ScoreStageConfig,
    ServingConfig,
    StageConfig,
    StagesConfig,
    TeacherConfig,
    TelemetryConfig,
    WandbConfig,
    resources_of,
)
from spot_async.config.training import (
    ClusterConfig,
    KeptCheckpoints,
    LoraConfig,
    LossAggregation,
    TrainingConfig,
    nearest_divisor,
)

__all__ = [
    "CONFIG_VERSION",
    "BackendSettings",
    "BenchmarkConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "Duplicates",
    "EvaluationConfig",
    "KeptCheckpoints",
    "LoraConfig",
    "LossAggregation",
    "ModelConfig",
    "NonNegativeFloat",
    "OneOrMore",
    "Place",
    "PluginSettings",
    "PositiveFloat",
    "PositiveInt",
    "Probability",
    "ProblemSetConfig",
    "PromptConfig",
    "QueueConfig",
    "RunConfig",
    "SamplingConfig",
    "ScoreStageConfig",
    "Section",
    "ServingConfig",
    "StageConfig",
    "StagesConfig",
    "TeacherConfig",
    "TeacherPromptConfig",
    "TelemetryConfig",
    "TemplateConfig",
    "TrainingConfig",
    "WandbConfig",
    "as_list",
    "backend_section",
    "leaves",
    "nearest_divisor",
    "resources_of",
]
