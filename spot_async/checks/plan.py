"""Checks a run before anything starts, and prepares what it needs of models and data.

It only reads files, and needs no server and no GPU. The one kind of process that it starts is a server's interpreter,
to see whether the server is installed. `capabilities.py` checks what only running backends can say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from spot_async.base import registry
from spot_async.base.text import counted
from spot_async.checks.capabilities import (
    CANNOT_SUM,
    check_environment,
    check_own_tokenizers,
    context_needed,
    sums_ends,
)
from spot_async.checks.device_shares import added_start_s, shared_out
from spot_async.checks.plan_inputs import (
    PlannedData,
    PlannedModels,
    check_ends,
    check_weights,
    common_of_files,
    plan_data,
    plan_models,
)
from spot_async.checks.served import (
    answering,
    check_places,
    check_roles,
    check_selves,
    offers,
    served_models,
)
from spot_async.config import Config, ModelConfig, teacher_name
from spot_async.config.loading import doubled_backslashes
from spot_async.data.problem_set import count_identical
from spot_async.data.prompts import DATE_WARNING
from spot_async.errors import ConfigError
from spot_async.evaluation.benchmarks import Benchmark, check_eval_every, plan_benchmarks
from spot_async.loop.sample_bytes import worst_case_bytes
from spot_async.models.common_vocabulary import CommonVocabulary
from spot_async.models.files import ModelFiles
from spot_async.models.footprint import Parameters
from spot_async.models.vocabulary import Vocabulary, stop_token_ids
from spot_async.models.weight_files import same_weights
from spot_async.protocols import CandidateScorer, Policy, Reviser, ScheduleChecker
from spot_async.stages.plugin_contract import check_policy
from spot_async.telemetry.sinks import check_packages
from spot_async.types import IntArray, PolicyNeeds
from spot_async.verification.normalization import answer_start
from spot_async.watchdog.silence import SilenceLimits, silence_limits


@dataclass(frozen=True)
class TrainPlan(PlannedModels, PlannedData):
    """A training run that has passed all checks and can start."""

    parameters: Parameters | None  # the student's, by its weights; None where these are not here or no safetensors
    served: Mapping[str, ModelConfig]  # the models to serve, by role: student, teachers, reference
    answering: Mapping[str, str]  # the role whose servers answer for each teacher
    doubts: Sequence[str]  # a line for each thing in data.train that may not be meant, or that no response can meet
    filtered: int  # how many problems have prompts that are too long, for the student or for the teacher
    policy: Policy
    evaluation: Sequence[Benchmark]  # empty without an evaluation section
    seen: Mapping[str, int]  # how many held-out problems are in data.train too, by the key of their set; no zeros
    silence: SilenceLimits | None  # how long the run may commit nothing; None: for ever

    @property
    def rows(self) -> Mapping[str, int]:
        """What became of the rows of data.train: read, dropped, mended."""
        rows: Counter[str] = Counter()
        for each in self.sets.values():
            rows.update(each.counts)
        return rows

    @property
    def reference(self) -> ModelConfig | None:
        """The model to serve as the frozen reference; None if the policy asks for none, or the student's servers."""
        return self.served.get("reference")

    @property
    def reference_is_base(self) -> bool:
        """Whether the student's servers answer for the frozen reference, with their adapters off (`BaseScorer`)."""
        return self.policy.needs.reference and self.reference is None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        alike = [each.vocabulary for role, each in self.teachers.items() if role not in self.own_tokens]
        return stop_token_ids(self.student.vocabulary, *alike)

    @property
    def reads_clock(self) -> bool:
        """Whether prompts of training or evaluation contain today's date."""
        problem = next(iter(self.schedule)).problem
        in_training = any(each.reads_clock(problem) for each in {self.renderer, *self.teacher_renderers.values()})
        return in_training or any(benchmark.reads_clock for benchmark in self.evaluation)


def plan_training(config: Config, *, starts: bool = True) -> TrainPlan:
    """Return the plan of a training run. Raises ConfigError or DataError for what would fail later.

    If it `starts` no server, none has to be installed here.
    """
    check_packages(config.telemetry)
    models = plan_models(config)
    policy = _plan_policy(config, models)
    data = plan_data(config, policy.needs, models)
    schedule = data.schedule
    _check_schedule(config, schedule.iterations)
    check_eval_every(config, schedule.iterations)
    if isinstance(policy, ScheduleChecker):
        more = schedule.per_epoch if config.training.refill else 0  # nobody knows how many prompts batches take
        policy.check(islice(schedule, max(more, schedule.iterations * config.training.batch_size)))
    _check_queue_bytes(config, policy.needs)
    silence = silence_limits(config, policy.needs, revises=isinstance(policy, Reviser))
    evaluation = plan_evaluation(config, models.student) if config.evaluation is not None else ()
    served = _plan_servers(config, policy.needs, models, starts=starts)
    return TrainPlan(
        **vars(data),
        student=models.student,
        teachers=models.teachers,
        frozen=models.frozen,
        parameters=Parameters.of(models.student.directory, config.training.lora),
        served=served,
        answering=answering(config),
        doubts=[line for key, judge in config.verifiers.items() for line in data.sets[key].doubts(key, judge)],
        filtered=len(data.problems) - len(schedule.sources),
        policy=policy,
        evaluation=evaluation,
        seen={each.key: seen for each in evaluation if (seen := count_identical(data.problems, each.problems))},
        silence=silence and {**silence, None: silence[None] + added_start_s(served)},
    )


def _plan_policy(config: Config, models: PlannedModels) -> Policy:
    """Return the policy. Raises ConfigError for what it needs of models, servers and verifiers and they do not have."""
    policy = make_policy(config, models.of_policy, models.common)
    needs = policy.needs
    _check_widths(config, needs, models.common)
    check_roles(config, needs)
    check_selves(config, models.student, models.teachers)
    check_own_tokenizers(config, needs, models.student.vocab_size)
    check_environment(config, needs)
    _check_context(config, needs, models.by_role)
    for role, teacher in config.teachers_by_role.items():
        if sums_ends(config, needs, models.student, models.teachers[role]) and not offers(teacher, CandidateScorer):
            raise ConfigError(CANNOT_SUM.format(role=role))
    check_places(config, needs)
    config.verifier.check_machine("verifier")
    for key, settings in config.data.sets.items():
        if settings.verifier is not None:
            settings.verifier.check_machine(f"{key}.verifier")
            if getattr(settings.verifier, "prices", None) is not None:
                raise ConfigError(f"{key}.verifier.prices: only what the run's own verifier costs counts: remove it")
    return policy


def _plan_servers(
    config: Config, needs: PolicyNeeds, models: PlannedModels, *, starts: bool
) -> Mapping[str, ModelConfig]:
    """Return the models to serve, by role, each with its share of the machine."""
    served = shared_out(served_models(config, needs), config.cluster)
    for role, each in served.items():
        if starts:
            each.backend.check_installed(f"{role}.backend")
        if (model := models.frozen.get(role)) is not None:
            check_weights(role, each, model.directory)
    return served


def plan_evaluation(config: Config, student: ModelFiles) -> Sequence[Benchmark]:
    """Return the benchmarks of an evaluation, rendered with the student's own chat template."""
    if config.evaluation is None:
        raise ConfigError("evaluation: required, but not given; it names the held-out problems")
    config.student.backend.check_machine("student.backend")
    silence_limits(config, PolicyNeeds())
    common = common_of_files(config, student)
    check_ends(common, {"student": student})
    return plan_benchmarks(config, student, common.limit)


def make_policy(config: Config, model: ModelFiles, common: CommonVocabulary | None = None) -> Policy:
    """Return the configured policy. `model` is the teacher, or the student in a run without a teacher."""
    context = msgspec.structs.replace(
        model.policy_context,
        vocab_limit=None if common is None else common.limit,
        teachers=() if config.route is not None else tuple(config.teachers),
        sampling=config.sampling,
        answer_start=answer_start if all(each.READS_BOX for each in config.verifiers.values()) else None,
        run_seed=config.run.seed,
        reference_kl=config.training.reference_kl > 0,
        training=config.training,
        max_staleness=config.max_staleness,
    )
    policy: Policy = registry.load("policies", config.policy.kind)(config.policy, context)
    check_policy(policy, config.policy.kind)
    return policy


def _check_widths(config: Config, needs: PolicyNeeds, common: CommonVocabulary) -> None:
    """Raise ConfigError if the policy asks for more tokens than all models have, or needs rows that are left out."""
    tokens, top_k = min(common.widths.values()), max(needs.teacher_top_k, needs.rollout_top_k)
    if top_k > tokens:
        key = needs.teacher_top_k_key or f"kind={config.policy.kind}: its top-k"
        raise ConfigError(
            f"policy.{key}={top_k}: lower it to {tokens}, which is how many tokens the models have in common"
        )
    if (whole := needs.whole_softmax_key) is not None and (rows := common.left_out("student")):
        raise ConfigError(
            f"policy.{whole}={getattr(config.policy, whole)}: needs all rows of the student's softmax, and {rows} of "
            f"its {common.widths['student']} are left out, which another model lacks: set it to 1; "
            "sampling.temperature may differ"
        )


def _check_context(config: Config, needs: PolicyNeeds, models: Mapping[str, ModelFiles]) -> None:
    for role, model in models.items():
        tokens, what = context_needed(config, needs, role)
        if tokens > model.max_context_tokens:
            raise ConfigError(
                f"{what} exceed the {role}'s context: together they may be at most {model.max_context_tokens}"
            )


def _check_schedule(config: Config, iterations: int) -> None:
    """Raise ConfigError if the learning rate would be 0 before the last iteration."""
    ends = config.training.schedule_iterations
    if ends is not None and ends < iterations:
        raise ConfigError(
            f"training.schedule_iterations={ends}: the learning rate would be 0 from then on, and the run has "
            f"{iterations} iterations: raise it to {iterations} or more, or set it to null"
        )


def _check_queue_bytes(config: Config, needs: PolicyNeeds) -> None:
    sampling, batch = config.sampling, config.training.batch_size
    prompts = filter(None, map(config.teacher_prompt, config.teachers_by_role))
    own = max((prompt.max_tokens for prompt in prompts), default=0)
    each = worst_case_bytes(sampling.max_prompt_tokens, sampling.max_response_tokens, needs, teacher_prompt_tokens=own)
    if config.queue.capacity_bytes < batch * each:
        raise ConfigError(
            f"queue.capacity_bytes={config.queue.capacity_bytes} holds less than one batch in the worst case: "
            f"raise it to {batch * each} or more"
        )


PROMPTS_READ = 64
UNKNOWN_SHARE = 0.5
NOT_EXACT = (
    "environment.replayable=false: a run that was interrupted goes on with other episodes, and ends with other weights "
    "than one that was not"
)


def plan_warnings(config: Config, plan: TrainPlan) -> list[str]:
    """Return the warnings about models, prompts, tokenizers and the policy of a run, which need no server."""
    prompts = [prompt.token_ids for prompt in islice(plan.schedule, PROMPTS_READ)]
    first = next(iter(plan.schedule)).problem
    renderers = dict.fromkeys([plan.renderer, *plan.teacher_renderers.values()])
    return [
        *([DATE_WARNING] if plan.reads_clock else []),
        *doubled_backslashes(config),
        *self_teacher_warnings(config, plan),
        *[
            f"{role}.tokenizer=own: its tokenizer is the student's, so this changes nothing: leave it out"
            for role in plan.own_tokens
            if plan.teachers[role].vocabulary.fingerprint == plan.student.vocabulary.fingerprint
        ],
        *[line for role, read in plan.texts_read.items() for line in read.doubts(role)],
        *dict.fromkeys(line for each in plan.environments.values() for line in each.bridges.doubts),
        *([] if all(each.replayable for each in config.environments.values()) else [NOT_EXACT]),
        *[line for each in renderers for line in each.thinking_doubts(first)],
        *_prompts_of_teachers(plan),
        *plan.doubts,
        *(f"policy.{line}" for line in config.policy.doubts),
        *_unknown_tokens("data.train", plan.of_policy.vocabulary, prompts),
        *_of_benchmarks(plan.evaluation, plan.student.vocabulary),
        *_seen_in_training(plan),
    ]


def self_teacher_warnings(config: Config, plan: TrainPlan) -> list[str]:
    """Return a line for each thing that goes wrong where a teacher that scores has the student's own weights."""
    needs, warnings = plan.policy.needs, []
    own = [role for role, each in plan.teachers.items() if same_weights(plan.student.directory, each.directory)]
    if not own or not needs.teacher_scores:
        return []
    warnings += [
        f"{role}.model: it has the student's own weights and reads the same prompt, so it teaches nothing (its KL "
        "to the student is 0): give it a context of its own in prompt.teacher.text, or another model"
        for role in own
        if not needs.teacher_prompt_tokens and _reads_as_student(plan, teacher_name(role) or "")
    ]
    skips = getattr(config.policy, "skip_answer", True)
    if needs.candidates_key is not None and getattr(config.policy, needs.candidates_key) == "score" and not skips:
        warnings.append(
            "policy.selection=score: the teacher has the student's own weights, and the score goes to where it reads "
            "the answer: set policy.skip_answer=true, and compare with plain OPD (policy.kind=opd). The "
            "score has cost 28 points in one study, and nothing in another (docs/methods.md)"
        )
    return warnings


def _reads_as_student(plan: TrainPlan, teacher: str) -> bool:
    prompts = islice(plan.schedule, plan.schedule.per_epoch)
    first = next((prompt for prompt in prompts if prompt.problem.asks(teacher)), None)
    return first is not None and np.array_equal(first.read_by(teacher), first.token_ids)


def _prompts_of_teachers(plan: TrainPlan) -> list[str]:
    """Return a line for each section that leads a teacher into a response by other words than the student's.

    Likewise for each that leaves out the instruction which the student reads.
    """
    problem = next(iter(plan.schedule)).problem
    students, lines = plan.renderer.generation_prompt(problem), {}
    for role, each in plan.teacher_renderers.items():
        if (teachers := each.generation_prompt(problem)) != students and role not in plan.own_tokens:
            lines[each.key] = (
                f"{each.key}: behind the user's message the teacher reads {teachers!r}, and the student {students!r}, "
                "so they expect different first tokens: unless that is meant, set template, thinking and "
                "template_arguments as they are in prompt"
            )
        read = [one.problem for one in plan.schedule.sources if one.problem.asks(teacher_name(role) or "")]
        if untold := [told for one in read if (told := each.instruction(one)) not in each.message(one)]:
            lines[f"{each.key}.text"] = (
                f"{each.key}.text: the teacher is not told {untold[0]!r}, and the student is: name {{instruction}} in "
                "it, unless that is meant"
            )
    return list(lines.values())


def evaluation_warnings(benchmarks: Sequence[Benchmark], vocabulary: Vocabulary) -> list[str]:
    """Return the warnings about prompts and tokenizers of a stand-alone evaluation, which need no server."""
    dated = [DATE_WARNING] if any(benchmark.reads_clock for benchmark in benchmarks) else []
    return dated + _of_benchmarks(benchmarks, vocabulary)


def _of_benchmarks(benchmarks: Sequence[Benchmark], vocabulary: Vocabulary) -> list[str]:
    warnings = []
    for benchmark in benchmarks:
        prompts = [source.token_ids for source in benchmark.sources[:PROMPTS_READ]]
        warnings += _unknown_tokens(benchmark.key, vocabulary, prompts)
        warnings += benchmark.doubts
        warnings += [benchmark.warning] if benchmark.warning is not None else []
    return [*dict.fromkeys(warnings)]


def _seen_in_training(plan: TrainPlan) -> list[str]:
    """Return a line for each set of held-out problems of which some are trained on."""
    return [
        f"{benchmark.key}: {seen} of {counted(len(benchmark.problems), 'problem')} are in data.train too, word for "
        "word: figures on them say nothing about new problems; take them out of one of the two"
        for benchmark in plan.evaluation
        if (seen := plan.seen.get(benchmark.key, 0))
    ]


def _unknown_tokens(key: str, vocabulary: Vocabulary, prompts: Sequence[IntArray]) -> list[str]:
    """Return a line about the prompts of `key` if much of their text, special tokens apart, is unknown."""
    unknown, tokens = vocabulary.tokenizer.unk_token_id, np.concatenate(prompts)
    special = {*vocabulary.tokenizer.all_special_ids, *vocabulary.tokenizer.added_tokens_decoder} - {unknown}
    ordinary = tokens[~np.isin(tokens, list(special))]
    share = float((ordinary == unknown).mean()) if unknown is not None and len(ordinary) else 0.0
    if share <= UNKNOWN_SHARE:
        return []
    return [
        f"{key}: {share:.0%} of the prompts' tokens are the tokenizer's token for what it does not know "
        f"({vocabulary.tokenizer.unk_token}): no model can read them; the problems, or the models, are the wrong ones"
    ]
