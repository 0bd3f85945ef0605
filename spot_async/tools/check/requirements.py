"""Computes what a run takes of memory, disk, wires, tokens and money, before it starts. It measures nothing.

Prompts are known, token by token, but lengths of responses are not: the upper estimate of what an endpoint is asked
takes the longest that are allowed. Memory and sizes of files are `models/footprint`'s. Here are money, tokens, and what
is kept of files. How long all that takes is `simulate`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from spot_async.base.processes.resources import free_bytes
from spot_async.checks.device_shares import device_gib, ranks_on_gpus, servers_on_devices, starting_order, taking_turns
from spot_async.checks.diagnosis import PROMPTS
from spot_async.checks.plan import TrainPlan
from spot_async.checks.server_diagnosis import RESPONSE_TOKENS
from spot_async.config import Config, teacher_name
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.loop.sample_bytes import payload_bytes
from spot_async.models.footprint import ADAPTER_BYTES, MachineMemory, Parameters, merged_every
from spot_async.models.model_size import read_size
from spot_async.run_directory.reading import RunFiles
from spot_async.spending.account import Account
from spot_async.spending.prices import Usage
from spot_async.spending.run_spending import RunSpending
from spot_async.stages.services import requests_per_prompt
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
    start: tuple[Estimate, Estimate]  # before the first prompt, likewise: what backends and the checks ask

    @property
    def early_ends(self) -> list[str]:
        """A line for each budget that is less than start and run may take together."""
        lines, account = [], self.account
        expected, most = zip(self.start, (self.expected, self.at_most), strict=True)
        of_money = account.budget, account.currency, lambda each: each.money or 0.0
        for budget, unit, of in (of_money, (account.token_budget, "tokens", lambda each: each.used.tokens)):
            if budget is not None and sum(map(of, most)) > budget:
                ends = "ends" if sum(map(of, expected)) > budget else "may end"
                lines.append(f"The budget of {budget:.10g} {unit} {ends} the run early")
        return lines


def estimate_endpoints(config: Config, plan: TrainPlan, expected_tokens: float) -> list[RoleEstimate]:
    """Return estimates for the roles whose requests cost money or are limited."""
    accounts = RunSpending(plan.served, verifier=config.verifier).accounts
    needs, longest = plan.policy.needs, config.sampling.max_response_tokens
    prompts = list(islice(plan.schedule, plan.schedule.iterations * config.training.batch_size))
    estimates = []
    teachers = [(role, needs.teacher) for role in plan.teachers]
    for role, asked in (*teachers, ("reference", needs.reference), ("verifier", True)):
        account = accounts.get(role)
        if account is not None and asked and (account.is_metered or account.is_limited):
            expected, at_most = (
                _estimate(role, needs, prompts, tokens, account) for tokens in (expected_tokens, longest)
            )
            start = _start(plan, role, account, *START_EXPECTED), _start(plan, role, account, *START_AT_MOST)
            estimates.append(RoleEstimate(account, expected, at_most, start))
    return estimates


def _estimate(
    role: str, needs: PolicyNeeds, prompts: Sequence[Prompt], response_tokens: float, account: Account
) -> Estimate:
    is_teacher = (name := teacher_name(role)) is not None
    prompts = [each for each in prompts if name is None or each.problem.asks(name)]
    if role != "reference":
        prompts = _taught(needs, prompts)
    if role == "verifier":  # whose tokens nobody counts
        responses = requests_per_prompt(needs)["rollout"] + needs.teacher_responses + needs.probes_per_prompt
        questions = len(prompts) * needs.rounds * responses
        return _priced(questions, NO_TOKENS, account)
    prompt_tokens = sum(_read_by_teacher(needs, each, role) if is_teacher else len(each.token_ids) for each in prompts)
    requests = prompt_total = completion_total = 0.0
    if scores := _scores(needs) if is_teacher else needs.samples_per_prompt:
        scored = len(prompts) * scores
        requests += scored
        prompt_total += scores * prompt_tokens + scored * response_tokens
        completion_total += scored  # endpoints generate one token after each sequence that they score
    if is_teacher and needs.teacher_responses:
        written = len(prompts) * needs.teacher_responses
        requests += written
        prompt_total += needs.teacher_responses * prompt_tokens
        completion_total += written * response_tokens
    return _priced(
        requests, Usage(prompt_tokens=round(prompt_total), completion_tokens=round(completion_total)), account
    )


def _start(plan: TrainPlan, role: str, account: Account, requests: int, generated: int) -> Estimate:
    """Return what all servers of a role are asked at the start; each request may generate so many tokens."""
    if role not in plan.served:  # a verifier, which must answer one question
        return _priced(1, NO_TOKENS, account)
    asked = requests * len(plan.served[role].backend.servers())
    longest = max(len(each.read_by(teacher_name(role) or "")) for each in islice(plan.schedule, PROMPTS))
    used = Usage(prompt_tokens=asked * (longest + RESPONSE_TOKENS), completion_tokens=asked * generated)
    return _priced(asked, used, account)


def _priced(requests: float, used: Usage, account: Account) -> Estimate:
    money = None
    if account.prices is not None:
        # `cost` includes the price of one request.
        money = account.prices.cost(used) + (requests - 1) * account.prices.request
    minutes = [
        amount / limit
        for amount, limit in ((requests, account.requests_per_minute), (used.tokens, account.tokens_per_minute))
        if limit is not None
    ]
    return Estimate(round(requests), used, money, max(minutes, default=None))


def _scores(needs: PolicyNeeds) -> int:
    """Return how many responses the teacher scores for each prompt, in all of its rounds."""
    return needs.rounds * requests_per_prompt(needs)["score"] if needs.teacher_scores else 0


def _taught(needs: PolicyNeeds, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts that the teacher is asked about: of each problem one, where only it writes responses."""
    if needs.teacher_responses and needs.rollouts_per_prompt == 0:
        return list({prompt.problem.id: prompt for prompt in prompts}.values())
    return prompts


def _read_by_teacher(needs: PolicyNeeds, prompt: Prompt, role: str) -> int:
    """Return the tokens that a teacher reads before a response; contexts of a policy's making at their longest."""
    return max(len(prompt.read_by(teacher_name(role) or "")), needs.teacher_prompt_tokens)


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


NO_TOKENS = Usage(prompt_tokens=0)
# What a server that scores and samples is asked before the first prompt, and the tokens that it generates for each.
START_EXPECTED = 75, RESPONSE_TOKENS // 3
START_AT_MOST = 150, RESPONSE_TOKENS
ASSUMED_SHARE = 0.5  # assumed length of a response, as a share of the longest
SAMPLE_BYTES_PER_TOKEN = 80  # of samples.jsonl, as `run.samples_every` says
COPIES = 2  # in the run directory, of students published elsewhere: of the last checkpoint, and of the next


@dataclass(frozen=True)
class Tokens:
    """The tokens of a whole run."""

    rollouts: float
    probes: float
    teacher_written: float
    scored: float  # by teacher and reference, prompts included
    trained: float  # forward and backward, prompts included
    evaluations: float


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a run sends and keeps, with responses of one length. None where the student's size is unknown."""

    batch_bytes: int  # one batch's supervision, which the trainer is sent
    publish_bytes: int | None  # one directory of weights, which servers are sent; most have an adapter alone
    adapter_bytes: int | None  # the part of it that is the adapter
    checkpoint_bytes: int | None
    published_elsewhere_bytes: int | None  # in training.weights_directory; 0 without
    published_kept_bytes: int | None  # in the run directory
    checkpoints_kept_bytes: int | None
    samples_bytes: int  # samples.jsonl
    disk_bytes: int  # all that is kept


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a run will take."""

    parameters: Parameters | None
    memory: MachineMemory | None  # None for an architecture that the estimate does not know
    expected: Sizes
    at_most: Sizes
    expected_tokens: Tokens
    most_tokens: Tokens
    endpoints: Sequence[RoleEstimate]  # what is asked of those that cost money or have limits
    response_words: str  # how long responses are expected to be, and why
    free_disk_bytes: int
    warnings: list[str]

    def as_tree(self) -> dict[str, Any]:
        """Return what programs read."""
        return {
            "parameters": self.parameters,
            "rank_gib": None if self.memory is None else self.memory.rank(),
            "devices_gib": [] if self.memory is None else self.memory.devices,
            "expected": self.expected,
            "at_most": self.at_most,
            "expected_tokens": self.expected_tokens,
            "most_tokens": self.most_tokens,
            "endpoints": {
                each.account.role: {"expected": each.expected, "at_most": each.at_most, "start": each.start}
                for each in self.endpoints
            },
            "free_disk_bytes": self.free_disk_bytes,
            "warnings": self.warnings,
        }


def requirements(
    config: Config, plan: TrainPlan, directory: Path, earlier: Path | None = None, *, nodes: int = 1
) -> Requirements:
    """Return what a run takes that would write to `directory`, on one of `nodes` machines.

    `earlier` is a run whose lengths of responses are taken. Raises DataError where it cannot be read.
    """
    longest = config.sampling.max_response_tokens
    rows = () if earlier is None else RunFiles(earlier).metrics()
    name = "teacher/tokens" if plan.policy.needs.rollouts_per_prompt == 0 else "rollout/tokens"
    measured = [float(row[name]) for row in rows if name in row]  # means of iterations
    expected = min(float(longest), sum(measured) / len(measured) if measured else ASSUMED_SHARE * longest)
    memory = machine_memory(config, plan, nodes=nodes)
    parameters = plan.parameters
    if parameters is None and memory is not None:
        size = memory.student
        parameters = Parameters(size.parameters, size.layers * size.adapter_parameters(config.training.lora))
    free = free_bytes(directory)
    at_most = sizes(config, plan, parameters, float(longest))
    warnings = [] if memory is None else memory.misfits()
    if at_most.disk_bytes > free:
        warnings.append(
            f"the disk of {directory} has {free / 1e9:.1f} GB left, and the run keeps up to "
            f"{at_most.disk_bytes / 1e9:.1f} GB"
        )
    why = "as in the run given" if measured else f"half of sampling.max_response_tokens={longest}"
    if config.training.refill:
        why += ", and prompts that all teach something: training.refill has others besides, so it is at least so much"
    return Requirements(
        parameters=parameters,
        memory=memory,
        expected=sizes(config, plan, parameters, expected),
        at_most=at_most,
        expected_tokens=tokens(config, plan, expected, ASSUMED_SHARE),
        most_tokens=tokens(config, plan, float(longest), 1.0),
        endpoints=estimate_endpoints(config, plan, expected),
        response_words=f"responses of {expected:.0f} tokens, {why}",
        free_disk_bytes=free,
        warnings=warnings,
    )


def machine_memory(config: Config, plan: TrainPlan, *, nodes: int = 1) -> MachineMemory | None:
    """Return what one of `nodes` machines keeps on its devices, each of which has a whole student.

    None for a student whose architecture is unknown.
    """
    if (student := read_size(plan.student.directory)) is None:
        return None
    ranks = ranks_on_gpus(config.training, nodes)
    return MachineMemory(
        student=student,
        training=config.training.model_copy(update={"ranks": config.training.ranks // nodes}),
        sampling=config.sampling,
        context_tokens=plan.student.max_context_tokens,
        servers=servers_on_devices(plan.served, device_gib(config.cluster, plan.served)),
        ranks=ranks,
        order=taking_turns(starting_order(plan.served, ranks)),
        copies=config.copies,
    )


def tokens(config: Config, plan: TrainPlan, response_tokens: float, evaluation_share: float) -> Tokens:
    """Return the tokens of a run whose responses all have one length; evaluations reach a share of their limits.

    Probes continue from anywhere in a response, and so take half of its length on average.
    """
    needs, iterations, evaluation = plan.policy.needs, plan.schedule.iterations, config.evaluation
    prompts = list(islice(plan.schedule, iterations * config.training.batch_size))
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    responses = len(prompts) * needs.samples_per_prompt
    sequences = needs.samples_per_prompt * prompt_tokens + responses * response_tokens
    taught = len(_taught(needs, prompts))
    asking = [(each, role) for each in prompts for role in plan.teachers if each.problem.asks(teacher_name(role) or "")]
    read = sum(_read_by_teacher(needs, *each) for each in asking) / max(1, len(prompts))
    teachers = len(asking) / max(1, len(prompts))  # that a prompt asks
    evaluations = 0
    if evaluation is not None:
        evaluations = 2 + (iterations // evaluation.eval_every if evaluation.eval_every else 0)
    return Tokens(
        rollouts=len(prompts) * requests_per_prompt(needs)["rollout"] * response_tokens,
        probes=responses * needs.probes_per_prompt * response_tokens / 2,
        teacher_written=teachers * taught * needs.teacher_responses * response_tokens,
        scored=taught * _scores(needs) * (read + teachers * response_tokens) + needs.reference * sequences,
        trained=sequences,
        evaluations=evaluations
        * evaluation_share
        * sum(len(each.sources) * each.samples * each.max_response_tokens for each in plan.evaluation),
    )


def sizes(config: Config, plan: TrainPlan, parameters: Parameters | None, response_tokens: float) -> Sizes:
    """Return the sizes for responses of one length. What is kept counts the one that is being written too."""
    training = config.training.under_staleness(config.max_staleness)
    needs, iterations = plan.policy.needs, plan.schedule.iterations
    prompts = list(islice(plan.schedule, plan.schedule.per_epoch))
    prompt_tokens = sum(len(each.token_ids) for each in prompts) / len(prompts)
    trained_tokens = iterations * training.batch_size * needs.samples_per_prompt * response_tokens
    every = config.run.samples_every
    publish = adapter = checkpoint = published = published_kept = checkpoints_kept = None
    if parameters is not None:
        adapter = ADAPTER_BYTES * parameters.adapter
        whole = parameters.published_bytes(training)
        publish = whole if merged_every(config) == 1 else adapter
        published = parameters.kept_bytes(config, iterations)
        keeps_best = config.evaluation is not None and config.evaluation.eval_every > 0
        is_elsewhere = training.weights_directory is not None
        published_kept = whole * keeps_best + (whole * min(iterations, COPIES) if is_elsewhere else published)
        checkpoint = parameters.checkpoint_bytes(config.copies)
        checkpoints_kept = checkpoint * _checkpoints(iterations, config)
    samples = round(SAMPLE_BYTES_PER_TOKEN * trained_tokens / every) if every else 0
    return Sizes(
        batch_bytes=round(training.batch_size * payload_bytes(prompt_tokens, response_tokens, needs)),
        publish_bytes=publish,
        adapter_bytes=adapter,
        checkpoint_bytes=checkpoint,
        published_elsewhere_bytes=published if training.weights_directory is not None else 0,
        published_kept_bytes=published_kept,
        checkpoints_kept_bytes=checkpoints_kept,
        samples_bytes=samples,
        disk_bytes=samples + (published_kept or 0) + (checkpoints_kept or 0),
    )


def _checkpoints(iterations: int, config: Config) -> int:
    """Return how many checkpoints are on the disk at most, with the one that is being written."""
    training = config.training
    if not training.checkpoint_every:
        return 0
    steps = {*range(training.checkpoint_every, iterations + 1, training.checkpoint_every), iterations}
    every = training.keep_checkpoints.every
    for_good = 0 if every is None else sum(step % every == 0 for step in steps)
    return min(len(steps), training.keep_checkpoints.last + 1 + for_good)
