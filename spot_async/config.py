"""The schema of a run's configuration: every key, its type, default, unit and meaning.

Reading YAML, overrides and turning errors into one line is `config_loading.py`; what can only be
checked against model directories and data is `preflight.py`. Keys whose value names a plug-in
(`kind: ...`) hold that plug-in's own settings, resolved through `registry.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
import pydantic
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError

from spot_async import registry

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every configuration section: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class PluginSettings(Section):
    """Base of the settings of a backend, policy or verifier; `kind` names the plug-in."""

    kind: str = Field(description="name of an installed plug-in, or module:Class")


class PluginSettingsError(ValueError):
    """Carries a plug-in section's own validation errors out of the section that holds it."""

    def __init__(self, schema: type[BaseModel], errors: ValidationError) -> None:
        super().__init__(str(errors))
        self.schema = schema
        self.errors = errors


def _resolver(group: registry.Group, default: str | None = None) -> pydantic.BeforeValidator:
    """Validates a plug-in's section with the plug-in's own schema; without a `kind` it is `default`'s."""

    def resolve(value: Any) -> Any:
        if isinstance(value, PluginSettings):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, dict) and default is not None:
            value = {"kind": default} | value
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise ValueError(f"needs a `kind`, one of: {', '.join(registry.names(group))}")
        schema = registry.load(group, value["kind"]).Settings
        try:
            return schema.model_validate_json(msgspec.json.encode(value))
        except ValidationError as errors:
            raise PluginSettingsError(schema, errors) from None

    return pydantic.BeforeValidator(resolve)


BackendSettings = Annotated[SerializeAsAny[PluginSettings], _resolver("backends", "local")]
PolicySettings = Annotated[SerializeAsAny[PluginSettings], _resolver("policies")]
TrainingVerifier = Annotated[SerializeAsAny[PluginSettings], _resolver("verifiers", "boxed_match")]
EvaluationVerifier = Annotated[SerializeAsAny[PluginSettings], _resolver("verifiers", "math_verify")]


class RunConfig(Section):
    directory: str | None = Field(None, description="run directory, new or empty; default runs/<config name>/<time>")
    seed: int = Field(0, ge=0, description="every seed of the run derives from it")


class ModelConfig(Section):
    """A model in one role (student, teacher or reference) and the backend that serves it."""

    model: str = Field(description="Hugging Face model directory with tokenizer and chat template")
    backend: BackendSettings = Field(default_factory=dict, validate_default=True)


class DataConfig(Section):
    train: str = Field(description="JSONL file of problems: `problem`, `answer`, optionally `id` and `tier`")
    shuffle: bool = Field(True, description="draw problems in a new seeded order every epoch")


class PromptConfig(Section):
    """How a problem becomes a prompt. Evaluation always uses the student's own template."""

    instruction: str = Field(
        "Please reason step by step, and put your final answer within \\boxed{}.",
        description="appended to the problem after a blank; empty for none",
    )
    template: Literal["teacher", "student"] = Field(
        "teacher", description="whose chat template renders training prompts"
    )
    template_arguments: dict[str, bool | int | str] = Field(
        {"enable_thinking": False}, description="extra variables for the chat template"
    )


class SamplingConfig(Section):
    """Rollouts, probes and responses of the teacher."""

    temperature: PositiveFloat = 1.0
    top_p: Probability = 1.0
    max_prompt_tokens: PositiveInt = Field(1024, description="longer prompts are filtered and counted")
    max_response_tokens: PositiveInt = 4096


class TrainingConfig(Section):
    epochs: PositiveInt | None = Field(None, description="passes over the problems; exclusive with iterations")
    iterations: PositiveInt | None = Field(None, description="rollout-and-train iterations")
    batch_size: PositiveInt = Field(128, description="prompts per iteration")
    mini_batch_size: PositiveInt = Field(32, description="prompts per optimiser update; divides batch_size")
    micro_batch_tokens: PositiveInt = Field(16384, description="padded tokens per forward pass of one rank")
    learning_rate: PositiveFloat = 3e-6
    schedule: Literal["cosine", "constant"] = Field("cosine", description="stepped once per iteration")
    warmup_iterations: int = Field(0, ge=0)
    weight_decay: NonNegativeFloat = 0.01
    max_grad_norm: PositiveFloat = 1.0
    clip: PositiveFloat = Field(0.2, description="epsilon of the clipped policy ratio")
    dual_clip: float | None = Field(None, gt=1, description="bound of the loss at negative advantages; off by default")
    reference_kl: NonNegativeFloat = Field(0.0, description="coefficient of the KL to the reference")
    loss_aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"
    behavior: Literal["served", "recomputed"] = Field(
        "served",
        description="pi_old of ratios and advantages: as the inference server reported it, or recomputed by the "
        "trainer before an iteration's first update",
    )
    importance_cap: PositiveFloat | None = Field(
        None,
        description="weigh each token's policy term by min(recomputed / served probability, cap); off by default, "
        "needs `behavior: recomputed`",
    )
    ranks: PositiveInt = Field(1, description="trainer processes")
    threads: PositiveInt = Field(1, description="CPU threads of each rank")
    dtype: Literal["float32", "bfloat16"] = "float32"
    keep_weights: int = Field(2, ge=2, description="published weight directories kept; the one served must stay")
    step_timeout_s: PositiveFloat = Field(1800.0, description="longest time one iteration of training may take")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size % self.mini_batch_size:
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size} must divide batch_size={self.batch_size}: "
                f"the nearest that does is {nearest_divisor(self.batch_size, self.mini_batch_size)}"
            )
        if self.importance_cap is not None and self.behavior == "served":
            raise ValueError(
                f"importance_cap={self.importance_cap:g} needs behavior=recomputed: with the served pi_old there is "
                "nothing to weigh it against"
            )
        if (self.epochs is None) == (self.iterations is None):
            raise ValueError("give exactly one of epochs and iterations")
        if self.iterations is not None and self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"warmup_iterations={self.warmup_iterations} leaves nothing of iterations={self.iterations}: lower it"
            )
        return self


class QueueConfig(Section):
    """The bounded queue of finished supervision in front of the trainer."""

    order: Literal["admission"] = Field("admission", description="batches are made in admission order")
    capacity_prompts: int | None = Field(None, description="default: one batch", gt=0)
    capacity_bytes: PositiveInt = Field(1 << 30, description="worst-case bytes of all admitted prompts together")


class StageConfig(Section):
    concurrency: PositiveInt = Field(64, description="requests in flight")
    timeout_s: PositiveFloat = Field(
        600.0, description="deadline of a request, all attempts included, from its first sending"
    )
    attempts: PositiveInt = Field(3, description="sendings of a request that fails transiently")


class StagesConfig(Section):
    rollout: StageConfig = StageConfig()
    score: StageConfig = StageConfig()
    candidates: StageConfig = StageConfig()
    probe: StageConfig = StageConfig(concurrency=256)
    verify: StageConfig = StageConfig(timeout_s=60.0)
    teacher_response: StageConfig = Field(StageConfig(), description="responses of the teacher")
    reference: StageConfig = Field(StageConfig(), description="the frozen reference's log-probabilities of a response")


class EvaluationConfig(Section):
    problems: str = Field(description="JSONL file of held-out problems")
    samples: PositiveInt = Field(8, description="responses per problem: the k of Avg@k and Pass@k")
    temperature: PositiveFloat = 1.0
    top_p: Probability = 0.8
    max_response_tokens: PositiveInt = 8192
    seed: int = Field(42, ge=0, description="sample i of problem j gets its own seed derived from it")
    verifier: EvaluationVerifier = Field(default_factory=dict, validate_default=True)
    concurrency: PositiveInt = Field(256, description="responses in flight")
    timeout_s: PositiveFloat = Field(600.0, description="deadline of one response")


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    student: ModelConfig
    teacher: ModelConfig | None = Field(None, description="required by policies that learn from a teacher")
    reference: ModelConfig | None = Field(
        None, description="frozen model of `training.reference_kl`; default: the initial student, served like it"
    )
    data: DataConfig
    prompt: PromptConfig = PromptConfig()
    sampling: SamplingConfig = SamplingConfig()
    policy: PolicySettings
    verifier: TrainingVerifier = Field(default_factory=dict, validate_default=True)
    training: TrainingConfig
    max_staleness: int = Field(0, ge=0, description="iterations by which a sample may lag behind the weights")
    queue: QueueConfig = QueueConfig()
    stages: StagesConfig = StagesConfig()
    evaluation: EvaluationConfig | None = Field(None, description="measured before and after training")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_staleness > 0:
            raise ValueError(f"max_staleness={self.max_staleness}: only 0 (strict) is built so far")
        capacity, batch = self.queue.capacity_prompts, self.training.batch_size
        if capacity is not None and capacity < batch:
            raise ValueError(
                f"queue.capacity_prompts={capacity} holds less than one batch (training.batch_size={batch}): "
                f"raise it to {batch} or more"
            )
        return self

    @property
    def queue_capacity_prompts(self) -> int:
        return self.queue.capacity_prompts or self.training.batch_size


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted`, the smaller one on a tie."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
