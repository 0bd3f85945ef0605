"""`spot-async tune`: opens a run's servers as training does, notes its mix of requests, and ramps one after another.

`choice.py` says what follows from that. This module shows and writes it.

Only one of a role's servers is measured. They are alike (`check` compares them), and measuring all would take longer.
The ramp asks the server directly, without the pool's concurrency limit, since that is what it looks for.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from spot_async.base.files import as_json
from spot_async.base.seeds import derive_seed
from spot_async.base.tasks import root_cause
from spot_async.base.text import first_line
from spot_async.checks.plan import TrainPlan
from spot_async.checks.served import PAID_KEYS
from spot_async.config import Config
from spot_async.errors import ConfigError, SpotError
from spot_async.running.assembly import make_stages, make_verifier
from spot_async.running.services import Companions, StartListener, open_services
from spot_async.spending.account import Account
from spot_async.spending.run_spending import RunSpending
from spot_async.stages.services import STAGE_SERVERS, requests_per_prompt
from spot_async.tools.pages.page import write_files
from spot_async.tools.pages.series import seconds, short_number
from spot_async.tools.simulate.measured import Level, Ramp, Tuning
from spot_async.tools.tune.choice import check_run, choose
from spot_async.tools.tune.mix import Template, by_server, endless, note_requests, recorded_prompts
from spot_async.tools.tune.ramp import RampLimits, ramp, without_limits
from spot_async.tools.tune.results import as_yaml, check_output, terminal_tables
from spot_async.types import PolicyNeeds

PROMPTS = 16  # for so many prompts requests are noted: enough for responses of many lengths


@dataclass(frozen=True)
class TuneOptions:
    """The options of the command."""

    source: Path  # the configuration
    overrides: Sequence[str]  # of it
    output: Path
    seconds: float  # for each server
    limit_requests: int | None = None  # for each server
    is_paid: bool = False  # whether to ramp endpoints with prices or rate limits too
    run: Path | None = None  # whose trainer and lengths a recommended `max_staleness` is simulated with


def paid_keys(config: Config) -> dict[str, list[str]]:
    """Return the keys, by role, that say that a backend's requests cost money or are counted."""
    found = {
        role: [f"{role}.backend.{key}" for key in PAID_KEYS if getattr(model.backend, key, None) is not None]
        for role, model in config.models.items()
    }
    found["verifier"] = [f"verifier.{key}" for key in PAID_KEYS if getattr(config.verifier, key, None) is not None]
    return {role: keys for role, keys in found.items() if keys}


def check_options(config: Config, options: TuneOptions) -> None:
    """Raise ConfigError for what must not be written to, a run that asks no teacher, and a paid ramp without a bound.

    Raises DataError for an earlier run that is not enough to simulate with.
    """
    check_output(options.source, options.output)
    if config.teacher is not None and config.teacher.replay:
        raise ConfigError("teacher.replay: a replay asks no teacher, so none can be tuned; set teacher.replay=false")
    if options.is_paid and options.limit_requests is None and (paid := paid_keys(config)):
        key = next(iter(paid.values()))[0]
        raise ConfigError(f"--paid: {key} is set, so give --limit-requests too: nothing else bounds what is spent")
    if options.run is not None:
        check_run(options.run, config)


def run(
    screen: Console,
    config: Config,
    plan: TrainPlan,
    directory: Path,
    options: TuneOptions,
) -> None:
    """Tune, and show and write the results. Raises what `measure` raises, and DataError if they cannot be written."""
    with screen.status("starting the servers") as status:

        def tell(line: str) -> None:
            screen.print(Text(line), soft_wrap=True)

        def show(server: str, level: Level) -> None:
            status.update(
                f"{server}: {short_number(level.throughput)} requests/s with {level.concurrency} in flight, half of "
                f"them within {seconds(level.p50_s)}"
            )

        measured, templates = asyncio.run(measure(config, plan, directory, options, tell, show))
        status.update("simulating")
        tuning = chosen(config, plan.policy.needs, measured, templates, options.run)
    for table in terminal_tables(tuning):
        screen.print(table)
    for warning in tuning.warnings:
        screen.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for line in tuning.advice:
        screen.print(Text(line), soft_wrap=True)
    output, overrides, figures = options.output, options.overrides, options.output.with_suffix(".json")
    contents = {output: as_yaml(tuning, options.source, output, overrides).encode(), figures: as_json(tuning)}
    write_files(contents, "-o")
    train = " ".join(["spot-async train", str(output), *overrides])
    screen.print(Text(f"to train with these limits: {train}"), soft_wrap=True)
    plots = f"spot-async report RUN --tuning {figures}"
    screen.print(Text(f"plots in the report of a run: {plots}"), soft_wrap=True)


def chosen(
    config: Config, needs: PolicyNeeds, measured: Tuning, templates: Sequence[Template], run: Path | None
) -> Tuning:
    """Return what follows from what was measured, which is kept even if the run cannot be simulated."""
    try:
        return choose(config, needs, measured, recorded_prompts(templates), run)
    except (SpotError, ExceptionGroup) as error:
        words = f"the run cannot be simulated, so its limits stay as configured: {first_line(root_cause(error))}"
        return msgspec.structs.replace(measured, warnings=[*measured.warnings, words])


async def measure(
    config: Config,
    plan: TrainPlan,
    directory: Path,
    options: TuneOptions,
    tell: Callable[[str], None],
    on_level: Callable[[str, Level], None],
) -> tuple[Tuning, list[Template]]:
    """Measure every server that the policy asks. Logs go under `directory`; `tell` gets what is about to be sent.

    Raises what starting the servers raises, ConfigError if `check` would refuse them, and RequestError if a prompt
    cannot be supervised.
    """
    config.refuse_environment("tune")
    verifier = make_verifier(config, RunSpending({}))
    unlimited = config.model_copy(update={"stages": without_limits(config.stages)})

    async with open_services(
        plan.served,
        directory,
        run=(config, plan),
        directly=True,
        beside=Companions(entered=[verifier], listener=StartListener(step=tell, warn=tell)),
    ) as services:
        accounts = services.spending.accounts
        schedule = iter(plan.schedule)
        prompts = [next(schedule) for _ in range(min(PROMPTS, config.training.batch_size))]
        tell(f"asking for {len(prompts)} prompts once, as the run would: their requests are what is sent again")
        templates = await note_requests(plan.policy, make_stages(config, plan, services, verifier), prompts)
        ramped = make_stages(unlimited, plan, services, verifier, bounds_prompts=False)
        paid = paid_keys(config)
        ramps: list[Ramp] = []
        skipped: list[str] = []
        noted = by_server(templates)
        for server, own in noted.items():
            if server in paid and not options.is_paid:
                skipped.append(
                    f"{server}: not ramped, because {paid[server][0]} is set: --paid --limit-requests N does"
                )
                tell(skipped[-1])
                continue
            limits = RampLimits(options.seconds, most_in_flight(config, plan.policy.needs, own), options.limit_requests)
            tell(announcement(server, own, limits, accounts.get(server)))
            requests = endless(own, ramped, schedule, derive_seed(config.run.seed, "tune", server))
            ramps.append(await ramp(server, requests, limits, on_level))
        for role, account in accounts.items():
            if account.prices is not None:
                tell(f"{role}: {account.total.requests} requests cost {account.total.money:.4g} {account.currency}")
        measured = Tuning(
            measured=datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
            seconds=options.seconds,
            prompts=len(prompts),
            requests_per_prompt={server: len(own) / len(prompts) for server, own in noted.items()},
            ramps=ramps,
            warnings=skipped,
        )
        return measured, templates


def announcement(server: str, templates: Sequence[Template], limits: RampLimits, account: Account | None) -> str:
    """Return what a ramp is going to send, and what that costs if its requests cost as much as those so far."""
    names = {template.stage for template in templates}
    stages = ", ".join(stage for stage in STAGE_SERVERS if stage in names)
    tokens = sum(template.tokens for template in templates) / len(templates)
    parts = [
        f"{server}: {stages} requests" + (f" of {tokens:.0f} tokens on average" if tokens else ""),
        f"1 to {limits.most} at a time",
        f"{limits.seconds:g} s at most",
    ]
    if limits.requests is not None:
        parts.append(f"{limits.requests} requests in all at most")
        if account is not None and account.prices is not None and account.total.requests:
            each = account.total.money / account.total.requests
            parts.append(f"about {limits.requests * each:.4g} {account.currency}")
    return ", ".join(parts)


def most_in_flight(config: Config, needs: PolicyNeeds, templates: Sequence[Template]) -> int:
    """Return how many requests the run can have at one server at a time, from all prompts that run at a time."""
    per_prompt = requests_per_prompt(needs)
    return config.queue_capacity_prompts * sum(per_prompt[stage] for stage in {each.stage for each in templates})
