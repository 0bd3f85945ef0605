"""The schema of a run's configuration: every key, its type, default, unit and meaning.

`training.py` has the trainer, `problems.py` problem sets and prompts, `evaluation.py` evaluation, and `base.py` the
building blocks of sections.
A section with a `kind` holds the settings of that plug-in (`plugins.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import pydantic
from pydantic import Field

from spot_async.base.retry import DEFAULT_ATTEMPTS, START_TIMEOUT_S
from spot_async.config.base import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    check_attempt_timeout,
    spelled,
)
from spot_async.config.environment import EnvironmentConfig
from spot_async.config.evaluation import EvaluationConfig, check_paper
from spot_async.config.plugins import BackendSection, PluginSettings, PolicySettings, RouteConfig, TrainingVerifier
from spot_async.config.problems import DataConfig, PromptConfig, TeacherPromptConfig
from spot_async.config.training import ClusterConfig, TrainingConfig
from spot_async.errors import ConfigError

CONFIG_VERSION = 2  # raised when a file of the version before can no longer be read as it is
ROLES = ("student", "teacher", "reference")


def teacher_role(name: str) -> str:
    """Return the role of a teacher: `teacher` for the only one, which has no name, and `teachers.<name>` of several."""
    return f"teachers.{name}" if name else "teacher"


def teacher_name(role: str) -> str | None:
    """Return the name of the teacher that has this role, empty for the only one; None for another's role."""
    kind, _, name = role.partition(".")
    return name if kind in ("teacher", "teachers") else None


def model_sections(tree: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of models in a configuration's plain values, by role."""
    several = {teacher_role(name): section for name, section in (tree.get("teachers") or {}).items()}
    given = {role: tree.get(role) for role in ROLES[:2]} | several | {"reference": tree.get("reference")}
    return {role: section for role, section in given.items() if isinstance(section, dict) and section}


TeacherName: TypeAlias = Annotated[
    str, spelled(r"[a-z][a-z0-9_]*", "give a name of small letters, digits and _, such as math")
]


def teacher_area(name: str) -> str:
    """Return what the names of a teacher's metrics begin with."""
    return f"teacher/{name}" if name else "teacher"


class RunConfig(Section):
    """Where the run writes, and its seed."""

    directory: str | None = Field(None, description="run directory, new or empty; default `runs/<config name>/<time>`")
    seed: int = Field(0, ge=0, description="every seed of the run derives from it")
    samples_every: int = Field(
        1, ge=0, description="iterations between two additions to samples.jsonl (about 80 bytes a token); 0 for never"
    )
    max_dead_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="largest share of prompts that may be given up; above it the run stops, once as many prompts as a "
        "batch holds have finished",
    )
    rehearsal: bool = Field(True, description="first ask a policy of your own for a few prompts on simulated servers")
    trace: bool = Field(True, description="write trace.json, the run's timeline for ui.perfetto.dev")
    stall_timeout_s: NonNegativeFloat | None = Field(
        None,
        description="the run ends with a report and exit code 3 after so long without progress; 0 for never. Default: "
        "the deadlines of a prompt's stages, plus `recovery_timeout_s`, plus a minute",
    )
    verdict_every_s: NonNegativeFloat = Field(
        60.0, description="time between two lines that say what holds the run up; 0 for no lines"
    )


class ServingConfig(Section):
    """How a role's servers are used, watched and started again during a run."""

    max_in_flight: PositiveInt = Field(
        512, description="most requests at one server, from all stages; fewer while it is overloaded"
    )
    stall_s: PositiveFloat = Field(
        20.0, description="a server that has requests and has answered none for so long is pinged"
    )
    restarts: int = Field(3, ge=0, description="how often one server that has ended is started again within an hour")
    recovery_timeout_s: PositiveFloat = Field(
        600.0,
        description="longest time without any server that serves; starting one again must fit in. At the start also "
        "the longest wait for a server at a `url`, and for one to start where it is more than 10 minutes",
    )
    own_cores: int = Field(
        0,
        ge=0,
        description="for servers on the CPU: cores of this machine that each has to itself while prompts are "
        "supervised. The orchestrator and other servers share the rest; training uses all",
    )

    @property
    def start_timeout_s(self) -> float:
        """How long one server may take until it answers, the first time and again."""
        return max(START_TIMEOUT_S, self.recovery_timeout_s)


class ModelConfig(Section):
    """A model in one role (student, teacher or reference) and the backend that serves it."""

    model: str = Field(
        description="Hugging Face model directory with tokenizer and chat template, or a model of the hub "
        "(`org/name`, `org/name@revision`), which is downloaded"
    )
    backend: BackendSection = Field(
        default_factory=dict, validate_default=True, description="how the model is served; a backend's own settings"
    )
    serving: ServingConfig = Field(
        ServingConfig(), description="what servers are given, and what is done about those that fail"
    )

    def _check(self) -> None:
        threads, own = getattr(self.backend, "threads", 1), self.serving.own_cores
        if 0 < own < threads:
            raise ValueError(
                f"serving.own_cores={own}: fewer than backend.threads={threads}, which would wait for each other: set "
                f"serving.own_cores={threads}, or 0 to share all cores"
            )


class FollowsConfig(Section):
    """How a teacher follows the student: every so many iterations it gets the student's weights, or their average."""

    every: PositiveInt | None = Field(
        None, description="iterations between two that give it the student's weights; 1: it is the live student"
    )
    decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="it gets the exponential average of the student's weights: after each iteration `decay` of what it "
        "was, and the rest of the new weights",
    )

    def _check(self) -> None:
        if (self.every is None) == (self.decay is None):
            raise ValueError("give exactly one of every (a lagged or live student) and decay (an average of it)")

    @property
    def is_live(self) -> bool:
        """Whether it always has the student's own weights."""
        return self.every == 1

    @property
    def longest_lag(self) -> int:
        """The most iterations by which its weights are older than the student's."""
        return (self.every or 1) - 1

    def step_at(self, step: int) -> int:
        """Return the step whose weights, or whose average, it has when the student has those of `step`."""
        return step - step % (self.every or 1)


class TeacherConfig(ModelConfig):
    """The model that the student learns from, and the file that keeps its answers."""

    cache: str | None = Field(
        None,
        description="file that keeps its scores and responses, so that none is asked for twice; runs may share it",
    )
    replay: bool = Field(False, description="start no teacher; all its answers must be in the cache")
    weight: PositiveFloat = Field(
        1.0, description="of several teachers that a prompt asks: this one's part of what is learnt, beside the others'"
    )
    follows: FollowsConfig | None = Field(
        None,
        description="the teacher is the student, lagged, live or averaged (docs/teachers.md); default: it is frozen",
    )
    served_by: Literal["teacher", "student"] = Field(
        "teacher",
        description="whose servers answer: its own, or the `student`'s, as the live student or, beside LoRA adapters, "
        "as the frozen one",
    )
    prompt: TeacherPromptConfig | None = Field(
        None,
        description="what this one of several reads in place of the student's prompt; null: as in `prompt`",
    )
    temperature: PositiveFloat | None = Field(
        None, description="divides its logits, in scores and responses; null: `sampling.temperature`"
    )
    tokenizer: Literal["student", "own"] = Field(
        "student",
        description="the tokens that it reads: the `student`'s, which its model must have too, or the same text in its "
        "`own` (docs/teachers.md)",
    )
    special_tokens: dict[str, str] = Field(
        {}, description="beside tokenizer=own: its special token for one of the student's; equal texts need no entry"
    )

    def _check(self) -> None:
        super()._check()
        if self.tokenizer == "student" and self.special_tokens:
            raise ValueError("special_tokens: only tokenizer=own needs them: set that, or remove them")
        if self.tokenizer == "own" and (self.follows is not None or self.served_by == "student"):
            key = "served_by=student" if self.follows is None else "follows"
            raise ValueError(f"tokenizer=own beside {key}: the student has its own tokenizer: remove one of the two")
        if self.replay and self.cache is None:
            raise ValueError("replay=true needs cache, the file of an earlier run")
        is_moving = self.follows is not None
        if self.cache is not None and (is_moving or self.served_by == "student"):
            key = "follows" if is_moving else "served_by=student"
            raise ValueError(
                f"cache={self.cache} beside {key}: the cache keeps answers of a teacher of its own that never "
                "changes: remove cache"
            )
        if self.served_by == "teacher":
            return
        if self.follows is not None and not self.follows.is_live:
            raise ValueError(
                "served_by=student: those servers have the live student, and no lagged or averaged one: set "
                "follows={every: 1}, or served_by=teacher"
            )
        plain = ModelConfig(model=self.model)
        for key in ("backend", "serving"):
            if getattr(self, key) != getattr(plain, key):
                raise ValueError(
                    f"{key}: the student's servers answer (served_by=student), on its account: remove {key}"
                )


class SamplingConfig(Section):
    """Rollouts, probes and responses of the teacher."""

    temperature: PositiveFloat = Field(1.0, description="divides the logits; the trainer uses the same")
    top_p: Probability = Field(1.0, description="share of probability that is sampled from; 1 is all of it")
    max_prompt_tokens: PositiveInt = Field(1024, description="longer prompts are filtered and counted")
    max_response_tokens: PositiveInt = Field(4096, description="longest response; a probe gets what its prefix leaves")

    @property
    def longest_sequence(self) -> int:
        """Tokens of a prompt and its response, at most."""
        return self.max_prompt_tokens + self.max_response_tokens


class QueueConfig(Section):
    """The bounded queue of finished supervision in front of the trainer."""

    capacity_bytes: PositiveInt = Field(
        1 << 30, description="most bytes of all admitted prompts together; running ones count with their worst case"
    )


class StageConfig(Section):
    """One kind of request."""

    concurrency: PositiveInt = Field(64, description="requests in flight")


class ScoreStageConfig(StageConfig):
    """Requests to the teacher, and how it scores the student's end token."""

    end_token: Literal["replace", "sum"] = Field(
        "replace",
        description="how a response's last token is scored where student and teacher end with different ones: as the "
        "teacher's first (`replace`), or by the probability of all that end its responses (`sum`), which needs a "
        "server that gives log-probabilities of chosen tokens",
    )


class StagesConfig(Section):
    """What a prompt's coroutine asks for: how much of each at once, and how long and how often it may try."""

    timeout_s: PositiveFloat = Field(
        600.0, description="deadline of a request with all its attempts, from its first sending on"
    )
    attempt_timeout_s: PositiveFloat | None = Field(
        None,
        description="longest time of one attempt, after which its reply counts as lost and is asked for again: longer "
        "than any answer takes, with its wait at the server. Default: all of `timeout_s`, since a limit that only long "
        "answers miss would leave these out of training",
    )
    attempts: PositiveInt = Field(
        DEFAULT_ATTEMPTS,
        description="how often a request is sent that fails transiently; throttled ones are sent until the deadline",
    )
    rollout: StageConfig = Field(StageConfig(), description="responses of the student")
    score: ScoreStageConfig = Field(ScoreStageConfig(), description="the teacher's log-probabilities of a response")
    candidates: StageConfig = Field(StageConfig(), description="the student's log-probabilities of chosen tokens")
    probe: StageConfig = Field(StageConfig(concurrency=256), description="continuations after a teacher candidate")
    verify: StageConfig = Field(StageConfig(), description="verdicts on responses and branches")
    environment: StageConfig = Field(StageConfig(), description="answers of the environment")
    teacher_response: StageConfig = Field(StageConfig(), description="responses of the teacher")
    reference: StageConfig = Field(StageConfig(), description="the frozen reference's log-probabilities of a response")

    def _check(self) -> None:
        check_attempt_timeout(self.attempt_timeout_s, self.timeout_s)


class WandbConfig(Section):
    """A run of Weights & Biases. The key comes from `wandb login` or the environment, never from here."""

    project: str = Field(description="project that the run belongs to; W&B reads WANDB_ENTITY, WANDB_MODE and the like")


class TelemetryConfig(Section):
    """Where metrics go besides `metrics.jsonl`."""

    tensorboard: bool = Field(False, description="event files in `tensorboard/`; needs the package `tensorboardX`")
    wandb: WandbConfig | None = Field(None, description="Weights & Biases; needs the package `wandb`")
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="port that serves the newest metrics to Prometheus; default: none"
    )
    prometheus_host: str = Field(
        "127.0.0.1",
        description="address of this machine that it listens on; elsewhere than on loopback all can read it",
    )


class Config(Section):
    """A whole run."""

    version: int = Field(CONFIG_VERSION, ge=1, description="of this file's format")
    run: RunConfig = Field(RunConfig(), description="where the run writes, and its seed")
    student: ModelConfig = Field(description="the model that is trained")
    teacher: TeacherConfig | None = Field(None, description="the model that is learned from, if the policy needs one")
    teachers: dict[TeacherName, TeacherConfig] = Field(
        {}, description="several models to learn from, by name, in place of `teacher`: `{math: {...}, code: {...}}`"
    )
    reference: ModelConfig | None = Field(
        None,
        description="frozen model of `training.reference_kl`; default: the initial student, served like it, or by the "
        "student's own servers where they take adapters",
    )
    data: DataConfig = Field(description="the problems to train on; a list in `train` has a section for each set")
    prompt: PromptConfig = Field(PromptConfig(), description="how a problem becomes a prompt")
    sampling: SamplingConfig = Field(SamplingConfig(), description="rollouts, probes and responses of the teacher")
    environment: EnvironmentConfig | None = Field(None, description="what answers the model's turns")
    policy: PolicySettings = Field(description="the method; a policy's own settings")
    verifier: TrainingVerifier = Field(
        default_factory=dict, validate_default=True, description="judges rollouts; a verifier's own settings"
    )
    training: TrainingConfig = Field(description="the student's optimisation")
    max_staleness: int = Field(0, ge=0, description="iterations by which a sample may lag behind the weights")
    queue: QueueConfig = Field(QueueConfig(), description="finished supervision in front of the trainer")
    stages: StagesConfig = Field(StagesConfig(), description="limits of requests, of each kind where they differ")
    evaluation: EvaluationConfig | None = Field(None, description="measured before and after training")
    telemetry: TelemetryConfig = Field(TelemetryConfig(), description="where metrics go besides the run directory")
    cluster: ClusterConfig = Field(ClusterConfig(), description="the machines that the trainer's ranks are spread over")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check_version(cls, tree: Any) -> Any:
        """Refuse a newer file before anything else: complaints about its other keys would only mislead."""
        version = tree.get("version") if isinstance(tree, dict) else None
        if isinstance(version, int) and version > CONFIG_VERSION:
            raise ValueError(
                f"version {version} is newer than this spot-async can read ({CONFIG_VERSION}): install a newer one"
            )
        return tree

    def _check(self) -> None:
        self.student.backend.with_lora(self.training.lora)
        for role in self.following:
            self.teachers_by_role[role].backend.following(self.training.lora)
        cap = self.training.importance_cap
        if cap is not None and self.training.under_staleness(self.max_staleness).behavior == "served":
            raise ValueError(
                f"training: importance_cap={cap:g} needs behavior=recomputed: with the served pi_old there is nothing "
                "to weigh it against"
            )
        self._check_resources()
        if self.teacher is not None and self.teacher.prompt is not None:
            raise ValueError("teacher.prompt: is for one of several teachers: move it to prompt.teacher")
        if self.teacher is not None and self.teachers:
            raise ValueError(
                f"teachers: teacher is given too: name that one as the others are, in teachers.NAME, or remove "
                f"{' and '.join(self.teachers)}"
            )
        held_out = [] if self.evaluation is None else [*self.evaluation.sets().values()]
        own = [each.environment for each in ([] if self.data is None else self.data.sets.values())]
        if self.environment is not None and None not in [*own, *(each.environment for each in held_out)]:
            raise ValueError("environment: is no set's, since each has one of its own: remove it, or one of theirs")
        if self.environments and self.own_tokenizers:
            raise ValueError(
                f"environment: {self.own_tokenizers[0]}.tokenizer=own is not built beside it (docs/coming-from.md)"
            )
        is_played = any(each.environment or self.environment for each in held_out)
        if is_played and self.evaluation is not None and self.evaluation.thinking_tokens:
            raise ValueError("evaluation.thinking_tokens: nobody knows which turn of an environment's it would cut")
        if self.evaluation is not None and self.evaluation.preset == "paper":
            check_paper(self.evaluation, self.prompt)

    def _check_resources(self) -> None:
        asked = resources_of(self.models)
        if asked and self.cluster.kind != "ray":
            raise ValueError(f"launch.resources of {next(iter(asked))}: needs cluster.kind=ray")
        if self.cluster.kind == "ray" and not asked and not self.cluster.placed_nodes:
            raise ValueError(
                "cluster.kind=ray: give the servers to place launch.resources, or cluster.nodes, or remove it"
            )

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The models that the configuration names, by role."""
        others = {} if self.reference is None else {"reference": self.reference}
        return {"student": self.student, **self.teachers_by_role, **others}

    @property
    def teachers_by_role(self) -> dict[str, TeacherConfig]:
        """The teachers: `teacher`, or `teachers.<name>` of each of several, in the configuration's order."""
        if self.teacher is not None:
            return {"teacher": self.teacher}
        return {teacher_role(name): teacher for name, teacher in self.teachers.items()}

    def with_teacher(self, name: str | None, what: str) -> Config:
        """Return the configuration with this one of several teachers as its only one, for a command that is about one.

        `what` names the command's work. Raises ConfigError if the name is missing or is nobody's.
        """
        if name is None and not self.teachers:
            return self
        if not self.teachers:
            raise ConfigError(f"--teacher {name}: the run has one teacher: leave it out")
        if name not in self.teachers:
            known = " or ".join(f"--teacher {each}" for each in self.teachers)
            raise ConfigError(f"teachers: {what} is about one teacher: give {known}")
        policy = self.policy.model_copy(update={"route": None} if hasattr(self.policy, "route") else {})
        own = self.teachers[name]
        prompt = self.prompt.model_copy(update={"teacher": own.prompt or self.prompt.teacher})
        only = own.model_copy(update={"prompt": None})
        return self.model_copy(update={"teacher": only, "teachers": {}, "policy": policy, "prompt": prompt})

    def teacher_prompt(self, role: str) -> TeacherPromptConfig | None:
        """Return what a teacher reads in place of the student's prompt; None where it reads that."""
        given = getattr(self.models.get(role), "prompt", None) or self.prompt.teacher
        if given is not None or role not in self.own_tokenizers:
            return given
        return TeacherPromptConfig(max_tokens=2 * self.sampling.max_prompt_tokens, thinking=self.prompt.thinking)

    def temperature(self, role: str) -> float:
        """Return the temperature of a role's log-probabilities and responses."""
        return getattr(self.models.get(role), "temperature", None) or self.sampling.temperature

    @property
    def verifiers(self) -> dict[str, PluginSettings]:
        """What judges the problems of each training set, by the set's key."""
        return {key: each.verifier or self.verifier for key, each in self.data.sets.items()}

    @property
    def route(self) -> RouteConfig | None:
        """Which of several teachers a prompt asks; None: all of them."""
        return getattr(self.policy, "route", None)

    @property
    def following(self) -> dict[str, FollowsConfig]:
        """How teachers follow the student, by role; those that do not are left out."""
        return {role: each.follows for role, each in self.teachers_by_role.items() if each.follows is not None}

    @property
    def teacher_lag(self) -> int:
        """The most iterations by which what such a teacher has is older than the student that is served."""
        return max((each.longest_lag for each in self.following.values()), default=0)

    @property
    def copies(self) -> int:
        """How many copies of what is trained the trainer keeps, for teachers that follow the student at a distance."""
        return sum(not each.is_live for each in self.following.values())

    @property
    def all_take_adapters(self) -> bool:
        """Whether all servers that get new weights take adapters alone."""
        others = [self.teachers_by_role[role] for role in self.following if role not in self.served_by_student]
        return all(each.backend.takes_adapters for each in [self.student, *others])

    def refuse_environment(self, what: str) -> None:
        """Raise ConfigError if there is an environment, for a command that asks single turns."""
        if self.environments:
            raise ConfigError(f"environment: {what} is not built beside it (docs/coming-from.md): leave one out")

    @property
    def environments(self) -> dict[str, EnvironmentConfig]:
        """What answers turns about the problems of each training set that has an environment, by the set's key."""
        sets = {} if self.data is None else self.data.sets
        return {key: own for key, each in sets.items() if (own := each.environment or self.environment) is not None}

    @property
    def own_tokenizers(self) -> list[str]:
        """The roles of teachers that read in tokens of their own."""
        return [role for role, each in self.teachers_by_role.items() if each.tokenizer == "own"]

    @property
    def served_by_student(self) -> list[str]:
        """The roles of teachers that the student's servers answer for."""
        return [role for role, each in self.teachers_by_role.items() if each.served_by == "student"]

    @property
    def queue_capacity_prompts(self) -> int:
        """The most admitted prompts: as many as staleness lets be under way."""
        return (self.max_staleness + 1) * self.training.batch_size


class EvaluationOnly(Config):
    """A configuration as `eval` reads it: what only training needs may be missing."""

    data: DataConfig | None = None  # type: ignore[assignment]
    policy: PolicySettings | None = None  # type: ignore[assignment]
    training: TrainingConfig = TrainingConfig(iterations=1)
    evaluation: EvaluationConfig


def resources_of(served: Mapping[str, ModelConfig]) -> dict[str, dict[str, float]]:
    """Return what each server that Ray should place, and has not yet, takes of a machine, by its name."""
    return {
        each.server_name(role): dict(launch.resources)
        for role, model in served.items()
        for each in model.backend.servers()
        if (launch := getattr(each, "launch", None)) is not None
        and getattr(launch, "resources", None)
        and not launch.prefix
    }
