"""`check --slope`: lets the run's policy supervise some problems before any training, and shows what came of it.

The policy is the run's own, with enough probes of each candidate to tell their values from noise. Nothing is selected,
probed or scored here, and nothing is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
from rich.console import Console

from spot_async.base.tasks import gather
from spot_async.base.text import counted
from spot_async.checks.plan import TrainPlan, make_policy
from spot_async.config import Config
from spot_async.errors import BudgetSpentError, ConfigError, RequestError
from spot_async.protocols import Policy, Verifier
from spot_async.running.assembly import make_stages
from spot_async.running.services import OpenServices
from spot_async.spending.run_spending import spending_words, summarize_spending
from spot_async.stages.services import requests_per_prompt
from spot_async.stages.stages import Stages
from spot_async.telemetry.outcome_slope import areas, outcome_words
from spot_async.telemetry.screen import shown
from spot_async.tools.check.slope_figures import OF_PROBED, Supervised, slope_figures, slope_table, supervised
from spot_async.types import Prompt

ROLLOUTS = 4  # of a problem at least, so that each is compared with others to it
PROBES = 4  # of a candidate at least: two choose positions as an oracle would, and two others judge them
AT_ONCE = 64  # prompts under way: enough to keep servers busy, and few enough that a budget is soon felt


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run's teachers before training. Figures have names as metrics have."""

    problems: int
    rollouts_per_problem: int
    probes_per_rollout: int  # at most
    figures: dict[str, float]
    notes: list[str]  # what is missing, and what was spent


def check_slope(config: Config, plan: TrainPlan) -> None:
    """Raise ConfigError for a run in which nothing can be measured of a teacher."""
    needs = plan.policy.needs
    if not needs.teacher_scores or needs.rollouts_per_prompt == 0:
        raise ConfigError(
            f"policy.kind={config.policy.kind}: no teacher scores what the student writes in such a run, and --slope "
            "is about that: add policy.kind=opd"
        )
    needs_answers = all(judge.JUDGES_ANSWERS for judge in config.verifiers.values())
    if needs_answers and not any(each.problem.answer for each in plan.schedule.sources):
        raise ConfigError(
            "data.train: no problem has an answer, and --slope is about verdicts; name their column in fields.answer"
        )
    config.refuse_environment("--slope")
    for role, teacher in config.teachers_by_role.items():
        if teacher.replay:
            raise ConfigError(f"{role}.replay: --slope asks the teacher about new responses; set {role}.replay=false")


async def measure_slope(
    config: Config,
    plan: TrainPlan,
    services: OpenServices,
    verifier: Verifier,
    wanted: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Slope:
    """Supervise so many different problems, and return what that shows. `tell` gets how far it is.

    Raises the first error of prompts if none can be supervised.
    """
    policy = probing_policy(config, plan)
    stages = make_stages(config, dataclasses.replace(plan, policy=policy), services, verifier)
    problems = different_problems(config, plan, wanted)
    own = max(1, requests_per_prompt(policy.needs)["rollout"])
    epochs = -(-ROLLOUTS // own)
    at_once = min(AT_ONCE, config.queue_capacity_prompts)
    found, notes = await supervise(policy, stages, in_epochs(problems, epochs), at_once=at_once, tell=tell)
    if len(problems) < wanted:
        notes.insert(0, f"the run draws {len(problems)} different problems, fewer than --slope {wanted}")
    figures = slope_figures(
        found,
        gamma=getattr(config.policy, "gamma", 0.0),
        is_random=getattr(config.policy, "selection", None) == "random",
    )
    notes += what_is_unknown(config, found, figures)
    spent = summarize_spending(services.spending.accounts)
    notes += [f"{role} spent: {spending_words(each)}" for role, each in spent.items()]
    return Slope(
        problems=len({each.problem_id for each in found}),
        rollouts_per_problem=own * epochs,
        probes_per_rollout=policy.needs.probes_per_prompt,
        figures=figures,
        notes=notes,
    )


def probing_policy(config: Config, plan: TrainPlan) -> Policy:
    """Return the run's policy, with more probes of a candidate if it makes any."""
    settings = config.policy
    if plan.policy.needs.probes_per_prompt and hasattr(settings, "probes"):
        settings = settings.model_copy(update={"probes": max(PROBES, settings.probes)})
    return make_policy(config.model_copy(update={"policy": settings}), plan.of_policy, plan.common)


def different_problems(config: Config, plan: TrainPlan, wanted: int) -> list[Prompt]:
    """Return the first prompts of so many problems, or of all that the run draws."""
    found: dict[tuple[str, str], Prompt] = {}
    for prompt in islice(plan.schedule, plan.schedule.iterations * config.training.batch_size):
        found.setdefault((prompt.problem.set_key, prompt.problem.id), prompt)
        if len(found) == wanted:
            break
    return list(found.values())


def in_epochs(problems: Sequence[Prompt], epochs: int) -> list[Prompt]:
    """Return the prompts of each problem as of so many epochs: ordinals decide what is sampled.

    Those of a problem follow each other, so that a budget that is spent leaves whole ones.
    """
    each_often = [prompt for prompt in problems for _ in range(epochs)]
    return [msgspec.structs.replace(prompt, ordinal=place) for place, prompt in enumerate(each_often)]


async def supervise(
    policy: Policy,
    stages: Stages,
    prompts: Sequence[Prompt],
    *,
    at_once: int,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[list[Supervised], list[str]]:
    """Supervise all prompts that the budgets allow, `at_once` at a time; return what came of each, and notes.

    Prompts whose requests fail are left out. Raise the first failure if none is left.
    """
    finished: dict[int, Supervised] = {}
    failures: list[RequestError | BudgetSpentError] = []
    waiting = iter(prompts)

    async def work() -> None:
        for prompt in waiting:
            asked = stages.for_prompt(prompt)
            try:
                samples = asked.recorded(await policy.supervise(prompt, asked))
            except BudgetSpentError as error:
                failures.append(error)
                return
            except RequestError as error:
                failures.append(error)
            else:
                finished[prompt.ordinal] = supervised(prompt.problem.id, samples)
            tell(f"{len(finished)} of {len(prompts)} prompts")

    await gather(work() for _ in range(at_once))
    if not finished and failures:
        raise failures[0]
    return [finished[ordinal] for ordinal in sorted(finished)], list(missing(len(prompts), len(finished), failures))


def missing(wanted: int, finished: int, failures: Sequence[RequestError | BudgetSpentError]) -> Iterator[str]:
    """Yield why there are fewer prompts than were wanted, and what that may do to the figures."""
    if spent := [error for error in failures if isinstance(error, BudgetSpentError)]:
        yield (
            f"{finished} of {wanted} prompts were supervised: {spent[0]}. Those with short responses finish first, so "
            "they count too much"
        )
    if failed := [error for error in failures if isinstance(error, RequestError)]:
        yield f"{counted(len(failed), 'prompt')} left out, whose requests failed: {failed[0]}"


def what_is_unknown(config: Config, found: Sequence[Supervised], figures: Mapping[str, float]) -> Iterator[str]:
    """Yield what is not said of the teacher, and what would say it."""
    if not areas([figures]):
        yield "no response has both a verdict and the teacher's log-probabilities, so nothing is known of the teacher"
    if config.sampling.top_p < 1:  # telemetry/outcome_slope.py says why
        yield f"what OPD gains is not known with sampling.top_p={config.sampling.top_p:g}: it takes sampling.top_p=1"
    probed, judged = sum(each.probed for each in found), sum(len(each.places) for each in found)
    if judged < probed:
        yield f"{probed - judged} of {probed} probed positions left out: a candidate has less than two verdicts"
    if not judged:
        return
    if getattr(config.policy, "selection", None) != "random":
        yield "rules are compared where positions are random: policy.selection=random policy.positions=8"
    elif "of_oracle_by_score" not in figures:
        yield f"rules are compared where {OF_PROBED} scored positions of a response are probed: raise policy.positions"
    for key in ("shuffle_outcomes", "baseline"):
        if value := getattr(config.policy, key, None):
            yield f"SPOT's tilt is without policy.{key}={value}, which changes what a branch teaches"


def show_slope(screen: Console, found: Slope) -> None:
    """Print what was found, in a table and in words."""
    screen.rule("is the teacher worth it?", align="left")
    probes = f", up to {counted(found.probes_per_rollout, 'probe')} a rollout" if found.probes_per_rollout else ""
    rollouts = counted(found.rollouts_per_problem, "rollout")
    screen.print(f"{counted(found.problems, 'problem')}, {rollouts} each{probes}", highlight=False)
    screen.print(slope_table(found.figures))
    if words := outcome_words([found.figures]):
        screen.print(shown(words), soft_wrap=True)
    for line in found.notes:
        screen.print(shown(line), soft_wrap=True)
