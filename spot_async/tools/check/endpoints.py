"""Estimates before a start what a run asks of an endpoint: requests, tokens, money, and time at the given rate limits.

Prompts are known, token by token, but lengths of responses are not. The upper estimate takes the longest allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from spot_async.checks.plan import TrainPlan
from spot_async.config import Config
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.spending.account import Account
from spot_async.spending.prices import Usage
from spot_async.spending.run_spending import RunSpending
from spot_async.types import PolicyNeeds, Prompt


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


def estimate_endpoints(config: Config, plan: TrainPlan, expected_tokens: float) -> list[RoleEstimate]:
    """Return estimates for the roles whose requests cost money or are limited."""
    accounts = RunSpending(plan.served).accounts
    needs, longest = plan.policy.needs, config.sampling.max_response_tokens
    prompts = list(islice(plan.schedule, plan.schedule.iterations * config.training.batch_size))
    estimates = []
    for role, asked in (("teacher", needs.teacher), ("reference", needs.reference)):
        account = accounts.get(role)
        if account is not None and asked and (account.is_metered or account.is_limited):
            expected, at_most = (
                _estimate(role, needs, prompts, tokens, account) for tokens in (expected_tokens, longest)
            )
            estimates.append(RoleEstimate(account, expected, at_most))
    return estimates


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
