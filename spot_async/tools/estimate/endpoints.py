"""Estimates before a start what a run asks of an endpoint: requests, tokens, money, and time at the given rate limits.

Prompts are known, token by token, but lengths of responses are not. The upper estimate takes the longest allowed. The
expected one takes the lengths of an earlier run, or half of the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.run_directory.reading import RunFiles
from spot_async.spending.account import Account
from spot_async.spending.prices import Usage
from spot_async.spending.run_spending import RunSpending
from spot_async.types import PolicyNeeds, Prompt

ASSUMED_SHARE = 0.5  # assumed length of a response, as a share of the longest
# Requests to an endpoint that scores before the first prompt, by its adapter and by the checks of the start together;
# see docs/remote-teachers.md.
REQUESTS_AT_START = 60


@dataclass(frozen=True)
class Estimate:
    """What one endpoint is asked for over the whole run."""

    requests: int
    used: Usage
    money: float | None  # None if it has no prices
    minutes: float | None  # None if it has no rate limits


@dataclass(frozen=True)
class RoleEstimate:
    """What a role's endpoint is asked: with responses of expected length, and with the longest ones."""

    account: Account
    expected: Estimate
    at_most: Estimate
    assumption: str


def estimate_run(config: Config, plan: TrainPlan, earlier: Path | None = None) -> list[RoleEstimate]:
    """Return estimates for the roles whose requests cost money or are limited. `earlier` is another run's directory."""
    accounts = RunSpending(plan.served).accounts
    rows = () if earlier is None else RunFiles(earlier).metrics()
    longest = config.sampling.max_response_tokens
    needs = plan.policy.needs
    count = plan.schedule.iterations * config.training.batch_size
    prompts = list(islice(plan.schedule, count))
    estimates = []
    for role, asked in (("teacher", needs.teacher), ("reference", needs.reference)):
        account = accounts.get(role)
        if account is None or not asked or not (account.is_metered or account.is_limited):
            continue
        measured = mean_response_tokens(rows, of_teacher=needs.teacher_responses)
        expected = measured if measured is not None else ASSUMED_SHARE * longest
        estimates.append(
            RoleEstimate(
                account,
                _estimate(role, needs, prompts, min(expected, longest), account),
                _estimate(role, needs, prompts, longest, account),
                f"responses of {expected:.0f} tokens, "
                + (
                    "as in the run given" if measured is not None else f"half of sampling.max_response_tokens={longest}"
                ),
            )
        )
    return estimates


def mean_response_tokens(rows: Sequence[Mapping[str, Any]], *, of_teacher: bool) -> float | None:
    """Return the mean length of responses over a run's iterations; None without iterations."""
    name = "teacher/tokens" if of_teacher else "rollout/tokens"
    found = [float(row[name]) for row in rows if name in row]
    return sum(found) / len(found) if found else None


def _estimate(
    role: str, needs: PolicyNeeds, prompts: Sequence[Prompt], response_tokens: float, account: Account
) -> Estimate:
    is_teacher = role == "teacher"
    if is_teacher and needs.teacher_responses:  # one response for each problem, however many epochs there are
        prompts = list({prompt.problem.id: prompt for prompt in prompts}.values())
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    requests = prompt_total = completion_total = 0.0
    if not is_teacher or needs.teacher_top_k:
        scored = len(prompts) * needs.samples_per_prompt
        requests += scored
        prompt_total += needs.samples_per_prompt * prompt_tokens + scored * response_tokens
        completion_total += scored  # endpoints generate one token after each sequence that they score
    if is_teacher and needs.teacher_responses:
        requests += len(prompts)
        prompt_total += prompt_tokens
        completion_total += len(prompts) * response_tokens
    used = Usage(prompt_tokens=round(prompt_total), completion_tokens=round(completion_total))
    money = None
    if account.prices is not None:
        # `cost` includes the price of one request.
        money = account.prices.cost(used) + (requests - 1) * account.prices.request
    return Estimate(round(requests), used, money, _minutes(requests, used, account))


def _minutes(requests: float, used: Usage, account: Account) -> float | None:
    given = [
        amount / limit
        for amount, limit in ((requests, account.requests_per_minute), (used.tokens, account.tokens_per_minute))
        if limit is not None
    ]
    return max(given) if given else None


def evaluation_estimate(config: Config, benchmarks: Sequence[Benchmark]) -> str:
    """Return a line about a stand-alone evaluation: responses, tokens, and money if the student's server has prices."""
    responses = sum(len(each.sources) * each.samples for each in benchmarks)
    prompts = sum(each.samples * len(source.token_ids) for each in benchmarks for source in each.sources)
    generated = sum(len(each.sources) * each.samples * each.max_response_tokens for each in benchmarks)
    noun = "response" if responses == 1 else "responses"
    line = f"asks for {responses:,} {noun}: {prompts:,} prompt tokens, at most {generated:,} generated"
    account = config.student.backend.open_account("student")
    if account is None or account.prices is None:
        return line
    used = Usage(prompt_tokens=prompts, completion_tokens=generated)
    money = account.prices.highest_cost(used) + (responses - 1) * account.prices.request
    return f"{line}, at most {money:,.4g} {account.currency} without retries and what the start asks"


def show_estimates(screen: Console, estimates: Sequence[RoleEstimate]) -> None:
    for each in estimates:
        screen.print(estimate_table(each))
        screen.print(Text(assumptions(each)), soft_wrap=True)


def estimate_table(each: RoleEstimate) -> Table:
    """Return the table of a role, for people."""
    account = each.account
    table = Table(f"{account.role}: asked in the run", "expected", "at most", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    both = (each.expected, each.at_most)
    table.add_row("requests", *(f"{one.requests:,}" for one in both))
    table.add_row("prompt tokens", *(f"{one.used.prompt_tokens:,}" for one in both))
    table.add_row("generated tokens", *(f"{one.used.completion_tokens:,}" for one in both))
    if account.prices is not None:
        table.add_row(f"{account.currency}", *(f"{one.money:,.4g}" for one in both))
    if each.expected.minutes is not None:
        table.add_row("minutes, at its limits", *(f"{one.minutes:,.3g}" for one in both))
    return table


def assumptions(each: RoleEstimate) -> str:
    """Return what the table takes for granted, as one line."""
    line = (
        f"assumes {each.assumption}; nothing cached; not counted: about {REQUESTS_AT_START} small requests at the "
        "start, retries, and single positions asked for again"
    )
    budget = each.account.budget
    if budget is not None and each.expected.money is not None and each.expected.money > budget:
        line += f". The budget of {budget:g} {each.account.currency} ends the run early"
    return line
