"""Runs a training run from its first process to its last file: enters what `assembly.py` makes, and leaves it again.

Whatever ends a run (its last iteration, a dead server, Ctrl-C), all children are gone when this
returns, and the run directory is complete up to the last finished iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from spot_async import registry
from spot_async.assembly import Backends, make_backends, make_orchestrator, make_stages, served_models, trainer_settings
from spot_async.checks.diagnosis import Diagnosis, compare_students, diagnose
from spot_async.checks.preflight import TrainPlan
from spot_async.concurrency import alongside, budget_error, running, watched
from spot_async.config import Config
from spot_async.errors import BudgetSpentError, RequestError, StorageError
from spot_async.evaluation.measuring import measure, write_evaluation
from spot_async.evaluation.results import EvaluationResult
from spot_async.initial_weights import send_initial_weights
from spot_async.ledger import PromptState
from spot_async.monitoring import Phases, make_live_verdict
from spot_async.orchestrator import IterationResult, Orchestrator, OrchestratorState, RunObserver
from spot_async.processes.cores import confined
from spot_async.protocols import Verifier
from spot_async.run_directory import RunDirectory
from spot_async.run_summary import TrainOutcome, summarize
from spot_async.servers import core_shares
from spot_async.spending.records import SpendingLog
from spot_async.spending.run_spending import RunSpending
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.evaluation_history import BestCheckpoint, EvaluationHistory
from spot_async.telemetry.live_verdict import replica_lines
from spot_async.telemetry.loop_lag import LoopLag
from spot_async.telemetry.run_log import RunLog, log_events_to
from spot_async.telemetry.sinks import open_sinks
from spot_async.telemetry.trace import trace_to
from spot_async.trainer.handle import TrainerProcess
from spot_async.types import Prompt
from spot_async.vocabulary import Vocabulary
from spot_async.watchdog.monitor import Watchdog


class Observers:
    """Passes each event on, in the order given: the files first, then the screen."""

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def iteration_finished(self, result: IterationResult) -> None:
        for observer in self._observers:
            observer.iteration_finished(result)

    def prompt_died(self, prompt: Prompt, error: RequestError) -> None:
        for observer in self._observers:
            observer.prompt_died(prompt, error)


@dataclass
class Reached:
    """What a run has come to so far."""

    before: EvaluationResult | None = None
    after: EvaluationResult | None = None
    orchestrator: Orchestrator | None = None
    spent: BudgetSpentError | None = None  # outside of prompts: by an evaluation, or as a server was brought back

    def is_out_of_money(self, error: BaseException) -> None:
        self.spent = self.spent or budget_error(error)
        structlog.get_logger().warning("budget spent", error=str(self.spent))

    def outcome(self, directory: Path, best: BestCheckpoint | None, spending: Mapping[str, Any]) -> TrainOutcome:
        state = OrchestratorState() if self.orchestrator is None else self.orchestrator.state
        prompts = {each.value: state.ledger.count(each) for each in PromptState if state.ledger.count(each)}
        return TrainOutcome(
            directory,
            state.iteration,
            self.before,
            self.after,
            best,
            prompts,
            spent=state.spent or self.spent,
            spending=spending,
        )


async def train(
    config: Config,
    plan: TrainPlan,
    directory: RunDirectory,
    console: Console,
    *,
    exit_process: Callable[[str], None] | None = None,
) -> TrainOutcome:
    """One training run, evaluated before and after where the configuration says so.

    `exit_process`: see `Watchdog`.
    """
    screen = RunConsole(console, plan.schedule.iterations)
    spending = RunSpending(config, plan)
    ledger_file = SpendingLog(directory, spending.accounts)
    cores = core_shares(served_models(config, plan))
    backends = make_backends(config, plan, directory, spending, cores)
    replicas = partial(replica_lines, backends.by_role())
    screen.replicas = replicas
    for pool in backends.pools().values():
        pool.tell_of_limits(screen.warn)
    watchdog = Watchdog(plan.silence, directory.path, exit_process=exit_process, replicas=replicas)
    lag = LoopLag()
    student = backends.student
    trainer = TrainerProcess(trainer_settings(config, plan, directory), cores=cores.available if cores.own else None)
    verifier: Verifier = registry.load("verifiers", config.verifier.kind)(config.verifier)
    stages = make_stages(config, plan, backends, verifier)
    stages.teacher_cache = spending.teacher_cache
    history = EvaluationHistory(directory, config.evaluation.best_by if config.evaluation else "avg")
    reached = Reached()

    with ExitStack() as stack:
        with suppress(StorageError):  # no locks there: other starts are refused anyway, without its process
            stack.enter_context(directory.locked())
        stack.enter_context(log_events_to(directory.path / "logs" / "run.jsonl"))
        stack.callback(ledger_file.write)  # whatever ends the run
        sinks = stack.enter_context(open_sinks(config, directory.path, stages.all))
        stack.enter_context(screen.live())
        stack.enter_context(watchdog)
        stack.enter_context(lag.measuring())
        stack.enter_context(confined(cores))
        for warning in cores.warnings:
            screen.warn(warning)
        phases = Phases(screen, watchdog)
        phases.begin(f"starting {', '.join(backends.pools())} and trainer")

        async def run() -> None:
            phases.begin("checking the servers")
            diagnosis = await diagnose_servers(config, plan, backends)
            diagnosis.raise_if_unsafe()
            for warning in diagnosis.warnings:
                screen.warn(warning)
            stages.capabilities = diagnosis.capabilities
            await spending.teacher_asked(diagnosis.capabilities)
            ledger_file.write(iteration=0)
            await send_initial_weights(config.student, student, stages.capabilities["student"], phases.begin)
            student_offers = await compare_students(plan, student, diagnosis.capabilities["student"], screen.warn)
            stages.capabilities = {**diagnosis.capabilities, "student": student_offers}
            vocabulary = Vocabulary(plan.student.vocabulary.tokenizer, plan.stop_token_ids)

            async def evaluated(when: str, weights: Path) -> EvaluationResult | None:
                result = None
                try:
                    result = await measure(
                        config, plan.evaluation, vocabulary, student, directory, phases, when, weights
                    )
                except* BudgetSpentError as spent:
                    reached.is_out_of_money(spent)
                return result

            async def evaluate_live(iteration: int) -> EvaluationResult | None:
                if not evaluation_is_due(config, iteration):
                    return None
                result = await evaluated(f"{iteration:06d}", directory.weights_after(iteration))
                if iteration < plan.schedule.iterations:  # else it is over
                    phases.begin(f"training with {config.policy.kind}", orchestrator)
                return result

            reached.before = await evaluated("before", plan.student.directory)
            log = RunLog(
                directory,
                stages,
                sinks,
                samples_every=config.run.samples_every,
                backends=backends.by_role(),
                loop_lag=lag,
                spending=spending.metrics(),
            )
            observer = Observers(log, ledger_file, history, screen)
            orchestrator = make_orchestrator(config, plan, stages, trainer, [student], observer, evaluate_live)
            orchestrator.report_to(watchdog)
            reached.orchestrator = orchestrator
            phases.begin(f"training with {config.policy.kind}", orchestrator)
            verdicts = make_live_verdict(config, orchestrator, backends.by_role(), screen)
            trace = trace_to(directory.path / "trace.json", orchestrator) if config.run.trace else nullcontext()
            with trace:
                async with alongside(verdicts.speak):
                    await orchestrator.run()
            iterations = orchestrator.state.iteration
            after, last = history.result_after(iterations), directory.weights_after(iterations)
            if after is not None:  # the same weights, problems and seeds: asking again would give it again
                write_evaluation(config, plan.evaluation, directory, "after", last, after)
            elif reached.spent is None:
                after = await evaluated("after", last if iterations else plan.student.directory)
                if after is not None and history.best is not None:
                    history.add(iterations, after, (directory.path / "student").resolve())
            reached.after = after

        servers = list(backends.by_role().values())
        async with alongside(watchdog.watch), running(*spending.resources, *servers, trainer, verifier):
            try:
                await watched(run(), [*(each.watch for each in servers), trainer.watch])
            except* BudgetSpentError as spent:
                reached.is_out_of_money(spent)
            outcome = reached.outcome(directory.path, history.best, spending.summary())
            watchdog.phase_began("stopping")
        structlog.get_logger().info("finished", process="orchestrator", cpu_s=time.process_time())
    directory.write_summary(summarize(config, plan, outcome))
    return outcome


def evaluation_is_due(config: Config, iteration: int) -> bool:
    """Whether the weights of this iteration (the first one is 1) are evaluated during training."""
    every = config.evaluation.eval_every if config.evaluation is not None else 0
    return every > 0 and iteration % every == 0


async def diagnose_servers(config: Config, plan: TrainPlan, backends: Backends) -> Diagnosis:
    """Ask servers that were entered. One that ends of a question is not started again: it says what is wrong."""
    pools = backends.pools().values()
    watches = [server.watch for pool in pools for server in pool.backends.values()]
    return await watched(diagnose(config, plan, backends.by_role()), watches)
