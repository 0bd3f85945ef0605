"""Checks a run before anything starts, and prepares what it needs of models and data.

Everything here is read from files: no server, no process, no GPU. What only a running backend can say
(`Capabilities`) is checked by `check_capabilities` once it answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from spot_async import registry
from spot_async.config import Config
from spot_async.errors import ConfigError, DataError
from spot_async.prompts import PromptRenderer, PromptSchedule, PromptSource, load_problems, render_all
from spot_async.protocols import Policy
from spot_async.supervision_queue import worst_case_bytes
from spot_async.telemetry.sinks import check_packages
from spot_async.types import Capabilities, PolicyContext, PolicyNeeds
from spot_async.vocabulary import Vocabulary, first_line, stop_token_ids

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx")


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory says of itself."""

    directory: Path
    vocab_size: int
    max_context_tokens: int
    vocabulary: Vocabulary

    @property
    def policy_context(self) -> PolicyContext:
        """What a policy may know, when these are the teacher's files."""
        return PolicyContext(vocab_size=self.vocab_size, tokenizer=self.vocabulary.tokenizer)


@dataclass(frozen=True)
class TrainPlan:
    """A training run that can start."""

    student: ModelFiles
    teacher: ModelFiles
    renderer: PromptRenderer
    schedule: PromptSchedule
    problems: int
    filtered: int  # problems whose prompts are too long
    policy: Policy
    evaluation: Sequence[PromptSource]  # empty without an evaluation section

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_token_ids(self.student.vocabulary, self.teacher.vocabulary)


def plan_training(config: Config) -> TrainPlan:
    """Raises ConfigError or DataError, one line each, for everything that would fail later."""
    check_packages(config.telemetry)
    student = read_model("student", config.student.model)
    teacher = read_model("teacher", config.teacher.model)
    _check_same_vocabulary(student, teacher)
    _check_context(config, student, teacher)
    problems = load_problems(Path(config.data.train))
    template_owner = teacher if config.prompt.template == "teacher" else student
    renderer = PromptRenderer(template_owner.vocabulary, config.prompt)
    sources = render_all(problems, renderer, config.sampling.max_prompt_tokens)
    schedule = PromptSchedule(
        sources,
        batch_size=config.training.batch_size,
        run_seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=config.training.epochs,
        iterations=config.training.iterations,
    )
    policy = make_policy(config, teacher)
    _check_queue_bytes(config, policy.needs)
    return TrainPlan(
        student=student,
        teacher=teacher,
        renderer=renderer,
        schedule=schedule,
        problems=len(problems),
        filtered=len(problems) - len(sources),
        policy=policy,
        evaluation=plan_evaluation(config, student) if config.evaluation is not None else (),
    )


def plan_evaluation(config: Config, student: ModelFiles) -> Sequence[PromptSource]:
    """The held-out problems, rendered with the student's own chat template."""
    if config.evaluation is None:
        raise ConfigError("evaluation: required, but not given; it names the held-out problems")
    problems = load_problems(Path(config.evaluation.problems))
    renderer = PromptRenderer(student.vocabulary, config.prompt)
    room = student.max_context_tokens - config.evaluation.max_response_tokens
    sources = render_all(problems, renderer, room)
    if len(sources) < len(problems):
        raise ConfigError(
            f"evaluation.max_response_tokens={config.evaluation.max_response_tokens} leaves {room} prompt tokens of "
            f"the student's context of {student.max_context_tokens}, too few for {len(problems) - len(sources)} of "
            f"{len(problems)} problems: lower it"
        )
    return sources


def make_policy(config: Config, teacher: ModelFiles) -> Policy:
    policy: Policy = registry.load("policies", config.policy.kind)(config.policy, teacher.policy_context)
    return policy


def read_model(role: str, name: str) -> ModelFiles:
    """Read a Hugging Face directory's configuration and tokenizer."""
    directory = Path(name)
    if not directory.is_dir():
        raise ConfigError(f"{role}.model: no directory {name!r}; give the path of a Hugging Face model directory")
    try:
        raw = msgspec.json.decode((directory / "config.json").read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise DataError(f"{role}.model: {name} has no config.json, so it is no Hugging Face model directory") from None
    except (msgspec.DecodeError, OSError) as error:
        raise DataError(f"{role}.model: cannot read {name}/config.json: {first_line(error)}") from None
    text_config = raw.get("text_config", raw)  # multimodal models keep the language model's part apart
    context = next((text_config[key] for key in CONTEXT_KEYS if key in text_config), None)
    if context is None or "vocab_size" not in text_config:
        raise DataError(f"{role}.model: {name}/config.json names no vocab_size or no context length")
    return ModelFiles(
        directory=directory,
        vocab_size=int(text_config["vocab_size"]),
        max_context_tokens=int(context),
        vocabulary=Vocabulary.load(directory),
    )


def check_capabilities(config: Config, needs: PolicyNeeds, student: Capabilities, teacher: Capabilities) -> None:
    """Whether running backends offer what the policy needs. Raises ConfigError with the key to change."""
    if student.vocab_fingerprint != teacher.vocab_fingerprint:
        raise ConfigError(
            f"teacher.model: the vocabularies that student ({student.model}) and teacher ({teacher.model}) serve differ"
        )
    missing = [
        (teacher.max_top_k < needs.teacher_top_k, f"teacher.backend serves top-{teacher.max_top_k}, "
         f"policy {config.policy.kind} needs top-{needs.teacher_top_k}"),
        (needs.exact_entropy and not teacher.exact_entropy, "teacher.backend does not serve exact entropies"),
        (needs.candidate_logprobs and not student.candidate_logprobs,
         "student.backend does not serve log-probabilities of chosen candidates"),
        (not student.weight_update, "student.backend takes no new weights"),
        ("truncated" in (student.logprob_convention, teacher.logprob_convention),
         "log-probabilities must be those of the untruncated distribution"),
        *_context_too_small(config, student, teacher),
    ]  # fmt: skip
    for is_missing, message in missing:
        if is_missing:
            raise ConfigError(message)


def _context_too_small(config: Config, student: Capabilities, teacher: Capabilities) -> list[tuple[bool, str]]:
    sampling, evaluation = config.sampling, config.evaluation
    rollout = (
        sampling.max_prompt_tokens + sampling.max_response_tokens,
        f"sampling.max_prompt_tokens={sampling.max_prompt_tokens} + "
        f"sampling.max_response_tokens={sampling.max_response_tokens}",
    )
    needs = [("student", student, *rollout), ("teacher", teacher, *rollout)]
    if evaluation is not None:
        tokens = evaluation.max_response_tokens
        needs.append(("student", student, tokens + 1, f"evaluation.max_response_tokens={tokens} and a prompt"))
    return [
        (served.max_context_tokens < tokens, f"{role}.backend serves a context of {served.max_context_tokens} tokens, "
         f"fewer than {what}: raise {role}.backend.max_context_tokens or lower those")
        for role, served, tokens, what in needs
    ]  # fmt: skip


def _check_same_vocabulary(student: ModelFiles, teacher: ModelFiles) -> None:
    if student.vocabulary.fingerprint == teacher.vocabulary.fingerprint:
        return
    ours, theirs = (model.vocabulary.tokenizer.get_vocab() for model in (student, teacher))
    different = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, theirs.get(token)), token),
    )
    raise ConfigError(
        f"teacher.model: {teacher.directory} and student {student.directory} have different vocabularies "
        f"({len(different)} tokens, the first is {different[0]!r}); distillation needs the same token ids"
    )


def _check_context(config: Config, student: ModelFiles, teacher: ModelFiles) -> None:
    sampling = config.sampling
    needed = sampling.max_prompt_tokens + sampling.max_response_tokens
    for role, model in (("student", student), ("teacher", teacher)):
        if needed > model.max_context_tokens:
            raise ConfigError(
                f"sampling.max_prompt_tokens={sampling.max_prompt_tokens} + sampling.max_response_tokens="
                f"{sampling.max_response_tokens} exceed the {role}'s context of {model.max_context_tokens} tokens: "
                f"lower one by {needed - model.max_context_tokens} or more"
            )


def _check_queue_bytes(config: Config, needs: PolicyNeeds) -> None:
    sampling, batch = config.sampling, config.training.batch_size
    each = worst_case_bytes(sampling.max_prompt_tokens, sampling.max_response_tokens, needs.soft_target_bytes)
    if config.queue.capacity_bytes < batch * each:
        raise ConfigError(
            f"queue.capacity_bytes={config.queue.capacity_bytes} holds less than one batch in the worst case: "
            f"raise it to {batch * each} or more"
        )
