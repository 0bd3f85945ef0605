"""Defines a run's configuration and reads it from YAML. It opens no model directory and no data: `checks/plan.py` does.

Other rooms import the sections of the schema from here. `loading.py` reads YAML and overrides, and turns every error
into one line.
"""

from spot_async.config.base import NonNegativeFloat as NonNegativeFloat
from spot_async.config.base import OneOrMore as OneOrMore
from spot_async.config.base import PositiveFloat as PositiveFloat
from spot_async.config.base import PositiveInt as PositiveInt
from spot_async.config.base import Probability as Probability
from spot_async.config.base import Section as Section
from spot_async.config.base import as_list as as_list
from spot_async.config.base import leaves as leaves
from spot_async.config.environment import EnvironmentConfig as EnvironmentConfig
from spot_async.config.evaluation import BenchmarkConfig as BenchmarkConfig
from spot_async.config.evaluation import EvaluationConfig as EvaluationConfig
from spot_async.config.plugins import BackendSettings as BackendSettings
from spot_async.config.plugins import Place as Place
from spot_async.config.plugins import PluginSettings as PluginSettings
from spot_async.config.plugins import RouteConfig as RouteConfig
from spot_async.config.plugins import RoutedSettings as RoutedSettings
from spot_async.config.plugins import backend_section as backend_section
from spot_async.config.problems import Duplicates as Duplicates
from spot_async.config.problems import ProblemSetConfig as ProblemSetConfig
from spot_async.config.problems import PromptConfig as PromptConfig
from spot_async.config.problems import TeacherPromptConfig as TeacherPromptConfig
from spot_async.config.problems import TemplateConfig as TemplateConfig
from spot_async.config.schema import ROLES as ROLES
from spot_async.config.schema import Config as Config
from spot_async.config.schema import FollowsConfig as FollowsConfig
from spot_async.config.schema import ModelConfig as ModelConfig
from spot_async.config.schema import SamplingConfig as SamplingConfig
from spot_async.config.schema import ScoreStageConfig as ScoreStageConfig
from spot_async.config.schema import ServingConfig as ServingConfig
from spot_async.config.schema import StageConfig as StageConfig
from spot_async.config.schema import StagesConfig as StagesConfig
from spot_async.config.schema import TeacherConfig as TeacherConfig
from spot_async.config.schema import TelemetryConfig as TelemetryConfig
from spot_async.config.schema import WandbConfig as WandbConfig
from spot_async.config.schema import model_sections as model_sections
from spot_async.config.schema import resources_of as resources_of
from spot_async.config.schema import teacher_area as teacher_area
from spot_async.config.schema import teacher_name as teacher_name
from spot_async.config.schema import teacher_role as teacher_role
from spot_async.config.training import ClusterConfig as ClusterConfig
from spot_async.config.training import LoraConfig as LoraConfig
from spot_async.config.training import LossAggregation as LossAggregation
from spot_async.config.training import TrainingConfig as TrainingConfig
