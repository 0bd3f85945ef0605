"""On-policy distillation of small reasoning models with sparse probing and outcome calibration.

    outcome = spot_async.run("configs/quickstart.yaml")

What is named here is the public API, with `spot_async.types`, `spot_async.protocols` and `spot_async.errors` behind
it. Names are loaded when they are first used: importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spot_async.base.tasks import both as both
    from spot_async.base.tasks import gather as gather
    from spot_async.config import BackendSettings as BackendSettings
    from spot_async.config import Config as Config
    from spot_async.config import PluginSettings as PluginSettings
    from spot_async.config import PromptConfig as PromptConfig
    from spot_async.config import SamplingConfig as SamplingConfig
    from spot_async.config import StagesConfig as StagesConfig
    from spot_async.config.loading import load_config as load_config
    from spot_async.data.prompts import PromptRenderer as PromptRenderer
    from spot_async.errors import ConfigError as ConfigError
    from spot_async.errors import DataError as DataError
    from spot_async.errors import ProcessDiedError as ProcessDiedError
    from spot_async.errors import RequestError as RequestError
    from spot_async.errors import SpotError as SpotError
    from spot_async.errors import StorageError as StorageError
    from spot_async.errors import TrainerError as TrainerError
    from spot_async.models.common_vocabulary import common_candidates as common_candidates
    from spot_async.models.files import read_model as read_model
    from spot_async.models.responses import first_tokens as first_tokens
    from spot_async.models.responses import foreign as foreign
    from spot_async.models.responses import joined as joined
    from spot_async.models.vocabulary import Vocabulary as Vocabulary
    from spot_async.policies.grpo import group_advantages as group_advantages
    from spot_async.policies.samples import student_sample as student_sample
    from spot_async.running.library import resume as resume
    from spot_async.running.library import resume_async as resume_async
    from spot_async.running.library import run as run
    from spot_async.running.library import run_async as run_async
    from spot_async.running.library import stages_for as stages_for
    from spot_async.running.summary import TrainOutcome as TrainOutcome
    from spot_async.stages.services import Services as Services
    from spot_async.stages.services import StagesSettings as StagesSettings
    from spot_async.terms import compared as compared
    from spot_async.terms import forward_kl as forward_kl
    from spot_async.terms import jsd as jsd
    from spot_async.terms import on_policy as on_policy
    from spot_async.terms import pull as pull
    from spot_async.terms import reverse_kl as reverse_kl
    from spot_async.terms import reverse_skew as reverse_skew
    from spot_async.terms import row_bytes as row_bytes
    from spot_async.terms import skew as skew
    from spot_async.terms import soft_targets as soft_targets
    from spot_async.terms import written as written
    from spot_async.types import Capabilities as Capabilities
    from spot_async.types import ChatTurn as ChatTurn
    from spot_async.types import Divergence as Divergence
    from spot_async.types import Generation as Generation
    from spot_async.types import Judgement as Judgement
    from spot_async.types import PolicyContext as PolicyContext
    from spot_async.types import PolicyNeeds as PolicyNeeds
    from spot_async.types import Problem as Problem
    from spot_async.types import Prompt as Prompt
    from spot_async.types import Pull as Pull
    from spot_async.types import Sample as Sample
    from spot_async.types import ScoredPositions as ScoredPositions
    from spot_async.types import ScoreRequest as ScoreRequest
    from spot_async.types import SoftTargets as SoftTargets
    from spot_async.types import Supervision as Supervision
    from spot_async.types import TokenScores as TokenScores
    from spot_async.types import Verdict as Verdict
    from spot_async.types import WeightVersion as WeightVersion

_NAMES_OF_MODULE = {
    "base.tasks": ("both", "gather"),
    "config": ("BackendSettings", "Config", "PluginSettings", "PromptConfig", "SamplingConfig", "StagesConfig"),
    "config.loading": ("load_config",),
    "errors": (
        "ConfigError",
        "DataError",
        "ProcessDiedError",
        "RequestError",
        "SpotError",
        "StorageError",
        "TrainerError",
    ),
    "terms": (
        "compared",
        "forward_kl",
        "jsd",
        "on_policy",
        "pull",
        "reverse_kl",
        "reverse_skew",
        "row_bytes",
        "skew",
        "soft_targets",
        "written",
    ),
    "policies.grpo": ("group_advantages",),
    "policies.samples": ("student_sample",),
    "running.library": ("resume", "resume_async", "run", "run_async", "stages_for"),
    "models.common_vocabulary": ("common_candidates",),
    "models.files": ("read_model",),
    "models.responses": ("first_tokens", "foreign", "joined"),
    "data.prompts": ("PromptRenderer",),
    "running.summary": ("TrainOutcome",),
    "stages.services": ("Services", "StagesSettings"),
    "types": (
        "Capabilities",
        "ChatTurn",
        "Divergence",
        "Generation",
        "Judgement",
        "PolicyContext",
        "PolicyNeeds",
        "Problem",
        "Prompt",
        "Pull",
        "Sample",
        "ScoredPositions",
        "ScoreRequest",
        "SoftTargets",
        "Supervision",
        "TokenScores",
        "Verdict",
        "WeightVersion",
    ),
    "models.vocabulary": ("Vocabulary",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}
__all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
