"""The schema of a run's configuration: every key, its type, default, unit and meaning.

Reading YAML, overrides and turning errors into one line is `config_loading.py`; what can only be
checked against model directories and data is `preflight.py`. Keys whose value names a plug-in
(`kind: ...`) hold that plug-in's own settings, resolved through `registry.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

import msgspec
import pydantic
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    ValidationError,
)

from spot_async import registry
from spot_async.retry import DEFAULT_ATTEMPTS

if TYPE_CHECKING:
    from spot_async.spending.account import Account

CONFIG_VERSION = 1  # of the schema below; raised when a file of the version before can no longer be read as it is

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Thinking = Annotated[
    bool | None,
    Field(description="`enable_thinking` for chat templates that know it; `null` leaves it to the template's default"),
]


class Section(BaseModel):
    """Base of every configuration section: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


T = TypeVar("T")

# A value, or a list of such values: for what may be said of each of several servers. The tags keep errors readable:
# those of the form that was given and of no other, under the key itself (`config_loading` leaves the tags out).
ONE, SEVERAL = "<one>", "<several>"


def _form(value: Any) -> str:
    return SEVERAL if isinstance(value, list) else ONE


OneOrMore: TypeAlias = Annotated[
    Annotated[T, Tag(ONE)] | Annotated[list[T], Field(min_length=1), Tag(SEVERAL)], Discriminator(_form)
]


def as_list(value: T | list[T] | None) -> list[T]:
    """The values of a `OneOrMore`, or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


class Place(NamedTuple):
    """Where a backend's server listens, when its settings say so."""

    setting: str  # that says so, such as `port=8123`
    address: str  # equal for two that cannot be told apart
    is_attached: bool = False  # to a server that runs already


class PluginSettings(Section):
    """Base of the settings of a backend, policy or verifier; `kind` names the plug-in."""

    kind: str = Field(description="name of an installed plug-in, or `module:Class`")
    _number: int | None = PrivateAttr(None)  # of the server, from 1 on; None where it is its role's only one

    def servers(self) -> Sequence[Self]:
        """One settings object for each server of a backend; several are made by `numbered`."""
        return (self,)

    def open_account(self, role: str) -> Account | None:
        """What all servers of a backend share: limits, prices, a ledger and a budget. None where nothing is counted."""
        return None

    def server_name(self, role: str) -> str:
        """What a server of a backend is called in messages, logs and metrics: its role, numbered if one of several."""
        return role if self._number is None else f"{role}-{self._number}"

    def numbered(self, servers: Sequence[Mapping[str, Any]]) -> Sequence[Self]:
        """For `servers`: these settings with other values for each of several. A single one has no number."""
        copies = [self.model_copy(update=dict(each)) for each in servers]
        if len(copies) > 1:
            for number, each in enumerate(copies, 1):
                each._number = number
        return copies

    @property
    def place(self) -> Place | None:
        """Of a backend: None where each start gets a place of its own."""
        return None

    def check_machine(self, section: str) -> None:
        """Whether this machine has what the settings name, before anything starts; `section` is where they stand.

        Raises ConfigError.
        """


class PluginSettingsError(ValueError):
    """Carries a plug-in section's own validation errors out of the section that holds it."""

    def __init__(self, schema: type[BaseModel], errors: ValidationError) -> None:
        super().__init__(str(errors))
        self.schema = schema
        self.errors = errors


def _resolver(group: registry.Group, default: str | None = None, *, optional: bool = False) -> pydantic.BeforeValidator:
    """Validates a plug-in's section with the plug-in's own schema; without a `kind` it is `default`'s."""

    def resolve(value: Any) -> Any:
        if isinstance(value, PluginSettings) or (optional and value is None):
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
BenchmarkVerifier = Annotated[
    SerializeAsAny[PluginSettings] | None, _resolver("verifiers", "math_verify", optional=True)
]


class RunConfig(Section):
    """Where the run writes, and its seed."""

    directory: str | None = Field(None, description="run directory, new or empty; default `runs/<config name>/<time>`")
    seed: int = Field(0, ge=0, description="every seed of the run derives from it")
    samples_every: int = Field(
        1, ge=0, description="write samples.jsonl every that many iterations (about 80 bytes a token); 0 for never"
    )
    max_dead_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the prompts that may be given up before the run stops, after a batch of them",
    )
    trace: bool = Field(True, description="write trace.json, the run's timeline for ui.perfetto.dev")
    stall_timeout_s: NonNegativeFloat | None = Field(
        None,
        description="silence without anything committed after which the run ends with a report and exit code 3; "
        "default: what the deadlines of a prompt's stages and `recovery_timeout_s` allow, and a minute; 0 for never",
    )
    verdict_every_s: NonNegativeFloat = Field(
        60.0, description="time between two lines that say what holds the run up; 0 for none"
    )


class ServingConfig(Section):
    """What is done about a role's servers while the run goes on."""

    max_in_flight: PositiveInt = Field(
        512, description="most requests of all stages at one server; less while it is overloaded"
    )
    stall_s: PositiveFloat = Field(
        20.0, description="a server that has requests and answered none for as long is asked whether it lives"
    )
    restarts: int = Field(3, ge=0, description="how often one server that ended is started again within an hour")
    recovery_timeout_s: PositiveFloat = Field(
        600.0, description="longest time without any server that serves; starting one again has to fit in"
    )


class ModelConfig(Section):
    """A model in one role (student, teacher or reference) and the backend that serves it."""

    model: str = Field(description="Hugging Face model directory with tokenizer and chat template")
    backend: BackendSettings = Field(
        default_factory=dict, validate_default=True, description="how the model is served; a backend's own settings"
    )
    serving: ServingConfig = Field(ServingConfig(), description="what is done about servers that fail or are slow")


class TeacherConfig(ModelConfig):
    """The model that is learned from, and what is kept of its answers."""

    cache: str | None = Field(
        None,
        description="file that keeps its scores, so that none is asked for twice; runs may share it",
    )
    replay: bool = Field(False, description="ask nobody: all scores must be in the cache, and no teacher is started")

    @pydantic.model_validator(mode="after")
    def _check_replay(self) -> Self:
        if self.replay and self.cache is None:
            raise ValueError("replay=true needs cache, the file of an earlier run")
        return self


Layout: TypeAlias = Literal[
    "auto",
    "plain",
    "math",
    "dapo",
    "math500",
    "amc23",
    "minerva",
    "hmmt",
    "aime",
    "gpqa_diamond",
    "mmlu_pro",
    "alpaca_eval",
]


Duplicates: TypeAlias = Literal["conflicting", "exact", "spacing", "keep"]


class ProblemSetConfig(Section):
    """A set of problems and how its rows are read. A plain value is short for `path`."""

    path: OneOrMore[str] = Field(
        description="file (.jsonl, .json, .csv or .parquet, also .gz), id of a data set on the Hugging Face hub, or a "
        "list of such"
    )
    layout: Layout = Field("auto", description="how a row becomes a problem; `auto` goes by its columns")
    subset: str | None = Field(None, description="of a data set on the hub that has several")
    split: str | None = Field(None, description="of a data set on the hub that has several")
    revision: str | None = Field(None, description="commit or tag of a data set on the hub; default: its newest")
    fields: dict[Literal["problem", "answer", "id", "tier", "category", "choices", "solution"], str] = Field(
        {}, description="columns that hold a problem's parts, where the layout has others; `a.b` is b inside a"
    )
    duplicates: Duplicates | None = Field(
        None,
        description="which rows with the same text are dropped: `conflicting` ones, all of those whose answers differ; "
        "`exact`, these and all but the first of others; `spacing`, the same but for white space; `keep`, none. "
        "Default: `exact` for DAPO, `keep` for benchmarks that are taken whole, else `conflicting`",
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        if isinstance(value, str | list):
            return {"path": value}
        if not isinstance(value, dict):
            raise ValueError(f"input should be a valid string, a list of them or a section, but got {value!r}")
        return value

    @property
    def paths(self) -> list[str]:
        return as_list(self.path)


class DataConfig(Section):
    """The problems to train on."""

    train: ProblemSetConfig = Field(description="problems to train on")
    shuffle: bool = Field(True, description="draw problems in a new seeded order every epoch")


class PromptConfig(Section):
    """How a problem becomes a prompt. Evaluation always uses the student's own template."""

    instruction: str = Field(
        "Please reason step by step, and put your final answer within \\boxed{}.",
        description="appended to the problem; empty for none",
    )
    separator: str = Field(" ", description="between the problem and the instruction")
    template: str = Field(
        "teacher",
        pattern=r"^(teacher|student|.+\.jinja)$",
        description="whose chat template renders training prompts: `teacher`, `student`, or a Jinja file's path",
    )
    thinking: Thinking = False
    template_arguments: dict[str, bool | int | str] = Field({}, description="extra variables for the chat template")

    @pydantic.model_validator(mode="after")
    def _check_thinking(self) -> Self:
        if "enable_thinking" in self.template_arguments:
            raise ValueError("template_arguments.enable_thinking is what thinking sets: remove it")
        return self


class SamplingConfig(Section):
    """Rollouts, probes and responses of the teacher."""

    temperature: PositiveFloat = Field(1.0, description="divides the logits; the trainer uses the same")
    top_p: Probability = Field(1.0, description="share of probability that is sampled from; 1 is all of it")
    max_prompt_tokens: PositiveInt = Field(1024, description="longer prompts are filtered and counted")
    max_response_tokens: PositiveInt = Field(4096, description="longest response; a probe gets what its prefix leaves")


class TrainingConfig(Section):
    """The student's optimisation."""

    epochs: PositiveInt | None = Field(None, description="passes over the problems; exclusive with iterations")
    iterations: PositiveInt | None = Field(None, description="rollout-and-train iterations")
    batch_size: PositiveInt = Field(128, description="prompts per iteration")
    mini_batch_size: PositiveInt = Field(32, description="prompts per optimiser update; divides batch_size")
    micro_batch_tokens: PositiveInt = Field(16384, description="padded tokens per forward pass of one rank")
    learning_rate: PositiveFloat = Field(3e-6, description="highest one, of AdamW")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="stepped once per iteration")
    warmup_iterations: int = Field(0, ge=0, description="over which the learning rate rises from 0")
    weight_decay: NonNegativeFloat = Field(0.01, description="of AdamW")
    max_grad_norm: PositiveFloat = Field(1.0, description="gradients are scaled down to this norm")
    clip: PositiveFloat = Field(0.2, description="epsilon of the clipped policy ratio")
    dual_clip: float | None = Field(None, gt=1, description="bound of the loss at negative advantages; off by default")
    reference_kl: NonNegativeFloat = Field(0.0, description="coefficient of the KL to the reference")
    loss_aggregation: Literal["sequence_mean", "token_mean"] = Field(
        "sequence_mean", description="mean of each response first, or of all tokens of a mini-batch alike"
    )
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
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of forward passes and published weights")
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
    """One kind of request."""

    concurrency: PositiveInt = Field(64, description="requests in flight")
    timeout_s: PositiveFloat = Field(
        600.0, description="deadline of a request, all attempts included, from its first sending"
    )
    attempts: PositiveInt = Field(
        DEFAULT_ATTEMPTS,
        description="sendings of a request that fails transiently; throttled ones go on to the deadline",
    )


class ScoreStageConfig(StageConfig):
    """Requests that a second server may answer as well."""

    hedge_after_s: PositiveFloat | None = Field(
        None,
        description="one that is not answered by then is sent once more, to another server where there is one, and the "
        "first answer counts: for few slow answers; both are paid for. Default: never",
    )


class StagesConfig(Section):
    """What a prompt's coroutine asks for, each with limits of its own."""

    rollout: StageConfig = Field(StageConfig(), description="responses of the student")
    score: ScoreStageConfig = Field(ScoreStageConfig(), description="the teacher's log-probabilities of a response")
    candidates: StageConfig = Field(StageConfig(), description="the student's log-probabilities of chosen tokens")
    probe: StageConfig = Field(StageConfig(concurrency=256), description="continuations after a teacher candidate")
    verify: StageConfig = Field(StageConfig(timeout_s=60.0), description="verdicts on responses and branches")
    teacher_response: StageConfig = Field(StageConfig(), description="responses of the teacher")
    reference: StageConfig = Field(StageConfig(), description="the frozen reference's log-probabilities of a response")

    @pydantic.field_validator("score", mode="before")
    @classmethod
    def _plain_score(cls, value: Any) -> Any:
        """Programs may give all stages the same section."""
        return ScoreStageConfig(**value.model_dump()) if type(value) is StageConfig else value


# What `evaluation.preset: paper` holds to their defaults, which are the paper's (method.md section 6).
PAPER_EVALUATION = ("thinking", "samples", "temperature", "top_p", "max_response_tokens", "seed")
PAPER_PROMPT = ("instruction", "separator", "template_arguments")


class BenchmarkConfig(ProblemSetConfig):
    """A set of held-out problems, and what is different for it. A plain value is short for `path`."""

    format: Literal["boxed", "multiple_choice", "alpaca_eval"] = Field(
        "boxed",
        description="`boxed` asks for an answer, `multiple_choice` for an option's letter; `alpaca_eval` sends the "
        "bare instruction and writes what comes back for its own tool, one response each, nothing judged",
    )
    verifier: BenchmarkVerifier = Field(
        None, description="default: `evaluation.verifier`, or `multiple_choice` for that format"
    )
    instruction: str | None = Field(None, description="default: `prompt.instruction`; of `alpaca_eval` always none")
    samples: PositiveInt | None = Field(None, description="responses per problem; default: `evaluation.samples`")
    max_response_tokens: PositiveInt | None = Field(None, description="default: `evaluation.max_response_tokens`")
    order_choices: bool = Field(
        True, description="give the options letters in a seeded order that does not depend on the file's"
    )
    examples: ProblemSetConfig | None = Field(
        None, description="worked examples in front of each question, of the question's own category"
    )
    example_count: PositiveInt = Field(5, description="how many of `examples` each question has")
    in_macro: bool = Field(True, description="count for the mean over benchmarks, if it is judged")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.format == "alpaca_eval" and (self.samples or 1) > 1:
            raise ValueError(f"samples={self.samples}: format=alpaca_eval writes one response each; remove it")
        if self.format == "alpaca_eval" and self.verifier is not None:
            raise ValueError("verifier: format=alpaca_eval judges nothing; remove it")
        if self.format != "multiple_choice" and self.examples is not None:
            raise ValueError("examples: only for format=multiple_choice")
        return self

    def verifier_of(self, evaluation: EvaluationConfig) -> PluginSettings:
        """What judges it, unless nothing does."""
        if self.verifier is None and self.format == "multiple_choice":
            return TypeAdapter(EvaluationVerifier).validate_python("multiple_choice")
        return self.verifier or evaluation.verifier


class EvaluationConfig(Section):
    """Figures on problems that are not trained on."""

    preset: Literal["paper"] | None = Field(
        None, description="hold the evaluation to the paper's protocol: keys that say otherwise are refused"
    )
    problems: ProblemSetConfig | None = Field(None, description="held-out problems; exclusive with `benchmarks`")
    benchmarks: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")], BenchmarkConfig] = Field(
        {}, description="several sets of held-out problems by name, reported one by one and as their mean"
    )
    thinking: Thinking = False
    samples: PositiveInt = Field(8, description="responses per problem: the n of Avg@n, and the largest k of Pass@k")
    pass_k: list[PositiveInt] = Field([], description="further k, up to `samples`, to report an unbiased Pass@k of")
    eval_every: int = Field(
        0, ge=0, description="iterations between evaluations during training, which keep the best student; 0 is off"
    )
    best_by: Literal["avg", "pass"] = Field("avg", description="which figure of all problems the best student has")
    temperature: NonNegativeFloat = Field(1.0, description="divides the logits; 0 takes the likeliest token")
    top_p: Probability = Field(0.8, description="share of probability that is sampled from; 1 is all of it")
    max_response_tokens: PositiveInt = Field(8192, description="longest response")
    seed: int = Field(42, ge=0, description="sample i of problem j gets its own seed derived from it")
    verifier: EvaluationVerifier = Field(
        default_factory=dict, validate_default=True, description="judges responses; a verifier's own settings"
    )
    concurrency: PositiveInt = Field(256, description="responses in flight")
    timeout_s: PositiveFloat = Field(600.0, description="deadline of one response")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if (self.problems is None) == (not self.benchmarks):
            raise ValueError("give exactly one of problems and benchmarks")
        if too_large := [k for k in self.pass_k if k > self.samples]:
            raise ValueError(
                f"pass_k={too_large[0]} needs as many samples as that, but samples={self.samples}: raise it"
            )
        if self.preset == "paper":
            _check_defaults(self, PAPER_EVALUATION)
            if self.verifier.kind != "math_verify":
                raise ValueError(
                    f"verifier={self.verifier.kind} is not the paper's math_verify: remove it, or the preset"
                )
        return self

    def sets(self) -> Mapping[str, BenchmarkConfig]:
        """All benchmarks by name; the only one of `problems` is called so."""
        if self.problems is None:
            return self.benchmarks
        return {"problems": BenchmarkConfig.model_validate(dict(self.problems))}

    def key_of(self, name: str) -> str:
        """Where one of `sets` stands in the configuration."""
        return f"evaluation.benchmarks.{name}" if self.benchmarks else "evaluation.problems"


def _check_defaults(section: Section, keys: Sequence[str], prefix: str = "") -> None:
    for key in keys:
        value, paper = getattr(section, key), type(section).model_fields[key].default
        if value != paper:
            raise ValueError(f"{prefix}{key}={value!r} is not the paper's {paper!r}: remove it, or evaluation.preset")


class WandbConfig(Section):
    """A run of Weights & Biases. The key comes from `wandb login` or the environment, never from here."""

    project: str = Field(description="project that the run belongs to")
    entity: str | None = Field(None, description="team or user; default: the account's own")
    name: str | None = Field(None, description="name of the run; default: that of the run directory")
    mode: Literal["online", "offline"] = Field("online", description="offline writes to the run directory only")


class TelemetryConfig(Section):
    """Where metrics go besides `metrics.jsonl`."""

    tensorboard: bool = Field(False, description="event files in `tensorboard/`; needs `spot-async[tensorboard]`")
    wandb: WandbConfig | None = Field(None, description="Weights & Biases; needs `spot-async[wandb]`")
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="loopback port that serves the newest metrics to Prometheus; default: none"
    )


class Config(Section):
    """A whole run."""

    version: int = Field(CONFIG_VERSION, ge=1, description="of this file's format")
    run: RunConfig = Field(RunConfig(), description="where the run writes, and its seed")
    student: ModelConfig = Field(description="the model that is trained")
    teacher: TeacherConfig | None = Field(None, description="the model that is learned from, if the policy needs one")
    reference: ModelConfig | None = Field(
        None, description="frozen model of `training.reference_kl`; default: the initial student, served like it"
    )
    data: DataConfig = Field(description="the problems to train on")
    prompt: PromptConfig = Field(PromptConfig(), description="how a problem becomes a prompt")
    sampling: SamplingConfig = Field(SamplingConfig(), description="rollouts, probes and responses of the teacher")
    policy: PolicySettings = Field(description="the method; a policy's own settings")
    verifier: TrainingVerifier = Field(
        default_factory=dict, validate_default=True, description="judges rollouts; a verifier's own settings"
    )
    training: TrainingConfig = Field(description="the student's optimisation")
    max_staleness: int = Field(0, ge=0, description="iterations by which a sample may lag behind the weights")
    queue: QueueConfig = Field(QueueConfig(), description="finished supervision in front of the trainer")
    stages: StagesConfig = Field(StagesConfig(), description="limits of each kind of request")
    evaluation: EvaluationConfig | None = Field(None, description="measured before and after training")
    telemetry: TelemetryConfig = Field(TelemetryConfig(), description="where metrics go besides the run directory")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_version(cls, tree: Any) -> Any:
        """First of all: a newer file's other keys would only be misunderstood."""
        version = tree.get("version") if isinstance(tree, dict) else None
        if isinstance(version, int) and version > CONFIG_VERSION:
            raise ValueError(
                f"version {version} is newer than this spot-async can read ({CONFIG_VERSION}): install a newer one"
            )
        return tree

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
        if self.evaluation is not None and self.evaluation.preset == "paper":
            _check_defaults(self.prompt, PAPER_PROMPT, "prompt.")
        return self

    @property
    def queue_capacity_prompts(self) -> int:
        return self.queue.capacity_prompts or self.training.batch_size


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` closest to `wanted`, the smaller one on a tie."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: (abs(d - wanted), d))
