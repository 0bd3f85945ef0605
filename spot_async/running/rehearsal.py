"""Rehearses a policy before anything starts: some of the run's own prompts on simulated servers and virtual time.

So a bug in a policy shows in moments, in the line with which it would end the run. What servers offer, what models
write, and what anything costs shows in the run alone.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import structlog

from spot_async.base.events import logged_by
from spot_async.base.tasks import root_cause
from spot_async.checks.plan import TrainPlan, make_policy
from spot_async.config import Config, teacher_name
from spot_async.errors import ConfigError, PluginError
from spot_async.loop.sample_bytes import payload_bytes
from spot_async.models.files import ModelFiles
from spot_async.protocols import Policy, Reviser, ScheduleChecker
from spot_async.stages.plugin_contract import arrays, bounded, is_ours
from spot_async.stages.services import TeacherService
from spot_async.terms import policy_tokens
from spot_async.testing.environments import simulated_environment
from spot_async.testing.services import SimulatedStudent, SimulatedTeacher, SimulatedTrainer, capabilities
from spot_async.testing.simulation import SimulatedRun, make_run
from spot_async.testing.virtual_time import DeadlockError, run_on_virtual_time
from spot_async.types import IterationReport, LiveBatch, Sample

BATCHES, BATCH_SIZE = 2, 4
PROMPTS = 4 * BATCHES * BATCH_SIZE  # with those in place of prompts that are given up
MOST_TOKENS, MEAN_TOKENS = 12, 8  # of a response: some end by themselves, and some do not
LONGEST_S = 60.0  # of virtual time for each of a policy's rounds, as of a thousand requests, one after the other


def rehearse(config: Config, plan: TrainPlan, *, shipped: bool = False) -> list[str]:
    """Rehearse the plan's policy; return a line for what people should know. `shipped`: also one of spot-async's own.

    Raises ConfigError for a policy that would end the run.
    """
    if not config.run.rehearsal or (is_ours(plan.policy) and not shipped):
        return []
    not_rehearsed = f"policy {type(plan.policy).__name__} was not rehearsed"
    try:
        with logged_by(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)):
            run = _rehearsed(config, plan)
    except (DeadlockError, TimeoutError):
        return [f"{not_rehearsed}: it waits for something that is no stage, or without end"]
    except ConfigError as error:  # the policy was made for longer responses before
        return [f"{not_rehearsed}: {error}"]
    except (ExceptionGroup, PluginError) as failures:
        cause = root_cause(failures) if isinstance(failures, ExceptionGroup) else failures
        raise ConfigError(f"{cause} (found on simulated servers; run.rehearsal=false asks none)") from cause
    if not run.trained:
        dead = [f": {error}" for error in run.journal.dead.values()]
        return [f"{not_rehearsed}: none of its samples was trained on{''.join(dead[:1])}"]
    return _frozen(plan.policy, run) if config.max_staleness else []


def _rehearsed(config: Config, plan: TrainPlan) -> SimulatedRun:
    """Run a fresh policy, and return the run. Raises what ends it early."""
    short = min(MOST_TOKENS, config.sampling.max_response_tokens)
    sampling = config.sampling.model_copy(update={"max_response_tokens": short})
    policy = make_policy(config.model_copy(update={"sampling": sampling}), plan.of_policy, plan.common)
    if isinstance(policy, ScheduleChecker):  # it may keep something of the prompts that it supervises later
        policy.check(islice(plan.schedule, max(PROMPTS, plan.schedule.iterations * config.training.batch_size)))
    needs = policy.needs
    widths = {role: files.vocab_size for role, files in {"student": plan.student, **plan.teachers}.items()}
    teachers = {
        teacher_name(role) or "": TeacherService(
            server=SimulatedTeacher(**_short(files), name=role),
            vocabulary=files.vocabulary,
            own_tokens=plan.own_tokens.get(role),
            render_turns=plan.teacher_renderers[role].turn_ids,
            weight=config.teachers_by_role[role].weight,
        )
        for role, files in plan.teachers.items()
        if needs.teacher
    }
    run = make_run(
        policy,
        prompts=islice(plan.schedule, PROMPTS),
        trainer=SimulatedTrainer(vocab_size=widths["student"]),
        student=SimulatedStudent(**_short(plan.student)),
        teachers=teachers,
        environments=dict.fromkeys(plan.environments, simulated_environment(plan.student.vocabulary)),
        reference=SimulatedTeacher(**_short(plan.student), name="reference") if needs.reference else None,
        vocabulary=plan.student.vocabulary,
        common=plan.common,
        capabilities={role: capabilities(width, max_generation_top_k=width) for role, width in widths.items()},
        sampling=sampling,
        iterations=BATCHES,
        batch_size=BATCH_SIZE,
        max_staleness=config.max_staleness,
        capacity_bytes=sys.maxsize,
        vocab_size=widths["student"],
        max_dead_share=1.0,
        compute=partial(_revised_twice, config.training.step_timeout_s),
    )
    run_on_virtual_time(asyncio.wait_for(run.orchestrator.run(), LONGEST_S * needs.rounds))
    _check_bytes(policy, run.samples)
    return run


def _short(files: ModelFiles) -> dict[str, Any]:
    """Return what a simulated server has of a model, and how long its responses are."""
    end_token = files.vocabulary.end_token_ids[0]
    return {"mean_tokens": MEAN_TOKENS, "vocab_size": files.vocab_size, "end_token": end_token}


def _frozen(policy: Policy, run: SimulatedRun) -> list[str]:
    """Return a line if a policy without a second word puts numbers of the student into terms, which grow old."""
    supervise: Any = type(policy).supervise
    student: Any = run.stages.services.student
    code = getattr(supervise, "__code__", None)
    if code is None or supervise.__module__.startswith("spot_async.") or isinstance(policy, Reviser):
        return []
    given = [each.advantages[policy_tokens(each)] for each in run.trained if each.advantages is not None]
    if student.told_others:
        what = "asks for the student's log-probabilities of other tokens than it sampled"
    elif policy.needs.teacher and any((each != each[:1]).any() for each in given):
        what = "gives each token an advantage of its own beside a teacher"
    else:
        return []
    return [
        f"policy {type(policy).__name__} {what}, at {code.co_filename}:{code.co_firstlineno}. With max_staleness, what "
        "its terms have of the student is of older weights: decide it in `revise`, or give a pull"
    ]


async def _revised_twice(
    timeout_s: float, call: Callable[..., Any], policy: Policy, told: LiveBatch | IterationReport
) -> Any:
    """Return what `revise` gives, which must be the same when it is asked once more, as after a resume."""
    if isinstance(told, IterationReport):  # for `observe`
        return bounded(timeout_s, call, policy, told)
    batch, both = told, [bounded(timeout_s, call, policy, told) for _ in range(2)]
    _check_bytes(policy, [*batch.samples, *both[0]])
    terms = [[each.tobytes() for each in arrays(tuple(sample.supervision for sample in given))] for given in both]
    if terms[0] != terms[1]:
        name = f"policy {type(policy).__name__}.revise"
        raise PluginError(f"{name} gave other terms when it was asked once more: it must be a pure function")
    return both[0]


def _check_bytes(policy: Policy, samples: Sequence[Sample]) -> None:
    """Raise PluginError if a trajectory's arrays are larger than what the policy's needs state of its terms."""
    name, needs = type(policy).__name__, policy.needs
    for each in (sample.supervision for sample in samples if sample.supervision is not None):
        tokens = len(each.response_ids)
        stated = payload_bytes(len(each.prompt_ids), tokens, needs) / needs.samples_per_prompt
        over = sum(array.nbytes for array in arrays(each)) - stated
        if over > 0:
            raise PluginError(
                f"policy {name}: the terms of {each.problem_id} take {over / tokens:.3g} bytes a token more than its "
                "needs state: raise PolicyNeeds.term_bytes_per_token by as many"
            )
