"""Runs Algorithm 1 as one structured program: admit prompts, supervise them, train on batches, update weights.

Three loops share one TaskGroup. Admission starts a policy's coroutine for each prompt, as soon as the book allows it.
The train pump trains on batches in admission order. The publish pump (`publishing.py`) sends the new weights to the
student's servers.

`trained` is the trainer's step, `served` that of the weights that new prompts are sampled from. The trainer may be
`max_staleness` steps ahead, and one more while it waits. A strict run is one with staleness 0: the same code, in which
the loops wait for each other.

The orchestrator knows neither what a policy computes nor what a backend is. It has no clock of its own, so it runs
unchanged on the simulator's virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import structlog

from spot_async.errors import BudgetSpentError, PluginError, RequestError, SpotError, ThrottledError, TransientError
from spot_async.loop.admission import AdmissionBook, Finished, PromptState, QueueSettings, is_trained
from spot_async.loop.events import IterationFinished, OrchestratorState, Phases, PhaseTimes, PromptEnded, StepBegan
from spot_async.loop.publishing import LiveStudent, WeightPublisher
from spot_async.loop.resuming import Records, StateSaver
from spot_async.loop.sample_bytes import held_bytes, worst_case_bytes
from spot_async.protocols import Observer, Policy, Reviser, Trainer
from spot_async.run_directory.dead_letters import FILE_NAME
from spot_async.stages.events import RequestEvent, WaitClock, seconds_by_stage
from spot_async.stages.plugin_contract import is_ours, observe, revise, supervise
from spot_async.stages.stages import Stages
from spot_async.trainer.feed_check import WrongSupervisionError, check_feed
from spot_async.types import IterationReport, LiveBatch, Prompt, Supervision, WeightVersion

T = TypeVar("T")

# So many problems given up without an answer, with no prompt finished in between, mean that the endpoint is down.
UNANSWERED_IN_A_ROW = 3


Compute = Callable[..., Awaitable[Any]]  # calls a function with what follows it; `computed` in a run


async def at_once(function: Callable[..., T], *given: Any) -> T:
    return function(*given)


@dataclass(frozen=True, kw_only=True)
class OrchestratorSettings(QueueSettings):
    """What an orchestrator needs to know: from the configuration, and from what was planned with it."""

    max_response_tokens: int
    vocab_size: int  # of the student's softmax
    weight_update_timeout_s: float
    max_dead_share: float  # of the prompts finished so far, once these are as many as a batch
    teacher_lag: int = 0  # iterations by which a teacher that follows the student may lag behind what it serves
    compute: Compute = at_once  # how a policy's numpy is done that may take long


@dataclass(eq=False)
class Orchestrator:
    """Runs a policy. `run` returns when all iterations are done, or when the prompts or the money ran out.

    What happens is published on the channel of its stages.
    """

    settings: OrchestratorSettings
    _: KW_ONLY
    prompts: Iterable[Prompt]
    policy: Policy
    stages: Stages
    trainer: Trainer
    student: LiveStudent
    records: Records  # those of an earlier part too, whose weights trainer and servers hold then

    def __post_init__(self) -> None:
        self.state = OrchestratorState()
        self.book = AdmissionBook(self.settings)
        self._prompts = iter(self.prompts)
        self._ledger = self.records.ledger
        self._resumption = self.records.resumption
        self._trained = self._resumption.version
        self._ending: asyncio.Task[None] | None = None  # of the newest iteration
        self._figures = None if self.student.evaluation is None else self.student.evaluation.figures
        self._saver = StateSaver(self.trainer, self.records.checkpoints, self._trained.step)
        self._no_more_prompts = False
        self._is_over = False  # nothing is trained any more
        self._changed = asyncio.Event()  # the book, the weights, or what may still be admitted
        self._publisher = WeightPublisher(
            self.student,
            self.stages,
            timeout_s=self.settings.weight_update_timeout_s,
            drains=self.settings.max_staleness > 0 and not _updates_in_flight(self.stages),
            served=self._trained,
            changed=self._changed,
        )
        self._accuracy: dict[int, Mapping[str, float]] = {}  # of finished prompts, until their batch is taken
        self._unanswered_in_a_row: set[str] = set()  # the problems of these prompts
        self._last_death = ""
        self.waits = WaitClock(self.stages.all)
        self._events = self.stages.events
        self._events.subscribe(self.waits, to=RequestEvent)
        self._phases = Phases("train", self._events)
        self.state.iteration = self._trained.step
        for ordinal, state in self._resumption.settled.items():
            self.book.settle(ordinal, state)

    @property
    def is_strict(self) -> bool:
        """Whether the trainer waits for its weights to be served, so that its two pumps are never busy at once."""
        return self.settings.max_staleness == 0

    @property
    def trained(self) -> WeightVersion:
        """The newest weights that the trainer has made."""
        return self._trained

    @property
    def served(self) -> WeightVersion:
        """The weights that new prompts are sampled from, or older ones than a server already holds."""
        return self._publisher.served

    def stop(self) -> None:
        """Let `run` return once the step that is under way is trained, and the trainer's state is saved.

        What is under way beside it then ends unfinished: prompts, a weight update, an evaluation.
        """
        self.state.stopped = True
        self._changed.set()

    async def run(self) -> None:
        """Train until nothing is left to do. Raise an ExceptionGroup of the failures that ended the run earlier."""
        try:
            await self._run()
        finally:
            await self._publisher.sleepers.end()
        self.book.leave_over()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(self._admit_prompts(), name="admission"),
                group.create_task(self._publisher.run(), name="publishing"),
            ]
            await self._train_batches(group)
            if self._ending is not None:
                await asyncio.wait([self._ending])
            ends_early = self.state.stopped or self.state.spent is not None
            saves = ends_early and self._saver.lacks(self._trained.step)
            if self._saver.is_busy or saves:
                self._events.publish(StepBegan("saving a checkpoint"))
            if saves:
                await self._saver.bring_up_to(self._trained.step)
            if self.state.stopped:
                for task in beside:
                    task.cancel()
            self._is_over = True
            self._changed.set()
            self._publisher.complete()

    async def _admit_prompts(self) -> None:
        """Start a coroutine per prompt, in order, as the book allows, and wait for the last one to end."""
        async with asyncio.TaskGroup() as group:
            for prompt in self._prompts:
                if prompt.ordinal in self._resumption.settled:
                    continue
                size_bytes = self._worst_case_bytes(prompt)
                while not self._admits_none and not self.book.may_admit(size_bytes, served=self.served.step):
                    await self._change()
                if self._admits_none:
                    break
                self.book.admit(prompt.ordinal, size_bytes)
                kept = self._resumption.samples_of(prompt.ordinal)
                if kept is not None:
                    self._accuracy[prompt.ordinal] = self._resumption.accuracy_of(prompt.ordinal)
                    self.book.finish(prompt.ordinal, kept, held_bytes(kept))
                    self._changed.set()
                    continue
                self._ledger.admit(prompt.ordinal, prompt.problem.id)
                group.create_task(self._supervise(prompt), name=f"prompt {prompt.ordinal}")
        self._no_more_prompts = True
        self._changed.set()

    @property
    def _admits_none(self) -> bool:
        return self._is_over or self.state.stopped or self.state.spent is not None

    async def _next_batch(self) -> list[Finished] | None:
        """Wait for a whole batch and return it; None for a stopped run, or once no prompt comes that could fill one."""
        while not self.state.stopped:
            self._check_refill()
            batch = self.book.take_batch()
            if batch is not None or self._no_more_prompts:
                return batch
            await self._change()
        return None

    async def _change(self) -> None:
        """Wait until the book, the weights, or what may still be admitted has changed."""
        self._changed.clear()
        await self._changed.wait()

    async def _supervise(self, prompt: Prompt) -> None:
        """Supervise a prompt until its samples are queued. If a request of it fails for good, give it up instead."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.state.running[prompt.ordinal] = prompt
        error: RequestError | BudgetSpentError | None = None
        try:
            stages = self.stages.for_prompt(prompt)
            samples = stages.recorded(await supervise(self.policy, prompt, stages))
        except (RequestError, BudgetSpentError) as failure:
            error = failure
        finally:
            del self.state.running[prompt.ordinal]
        match error:
            case None:
                accuracy = self._accuracy[prompt.ordinal] = stages.accuracy()
                self.book.finish(prompt.ordinal, samples, held_bytes(samples))
                self._ledger.finish(prompt.ordinal, samples, accuracy)
                outcome = PromptState.QUEUED
                self._unanswered_in_a_row.clear()
            case RequestError():
                outcome = PromptState.DEAD
            case BudgetSpentError():  # prompts under way finish, and no new one begins
                outcome = PromptState.UNPAID
                if self.state.spent is None:
                    structlog.get_logger().warning("budget spent", error=str(error))
                self.state.spent = error
        if error is not None:
            self.book.give_up(prompt.ordinal, outcome)
            self._ledger.give_up(prompt.ordinal, outcome, str(error))
        self._changed.set()
        self._events.publish(PromptEnded(prompt, outcome, started, loop.time(), error))
        if isinstance(error, RequestError):
            self._check_deaths(prompt, error)

    def _check_deaths(self, prompt: Prompt, last: RequestError) -> None:
        """Raise SpotError if so many prompts were given up that it is not their fault.

        Those whose server answered others meanwhile say nothing of it: in a batch they are the last to end.
        """
        self._last_death = str(last)
        if isinstance(last, TransientError | ThrottledError) and not last.others_answered:
            self._unanswered_in_a_row.add(prompt.problem.id)
            if len(self._unanswered_in_a_row) >= UNANSWERED_IN_A_ROW:
                raise SpotError(
                    f"{UNANSWERED_IN_A_ROW} prompts in a row went unanswered, the last one: {self._last_death}"
                )
        self._check_dead_share()

    def _check_dead_share(self) -> None:
        """Raise SpotError if more prompts were given up than may be, once as many as a batch have finished."""
        dead, finished = self.book.count(PromptState.DEAD), self.book.finished
        most = self.settings.max_dead_share
        if finished >= self.settings.batch_size and dead > most * finished:
            raise SpotError(
                f"{dead} of {finished} prompts failed for good, more than run.max_dead_share={most:g} allows "
                f"({FILE_NAME} has them all), the last one with: {self._last_death}"
            )

    def _check_refill(self) -> None:
        """Raise SpotError if so many prompts in a row taught nothing that batches may never be full."""
        batches, in_vain = self.settings.refill_at_most, self.book.most_in_vain
        if batches is not None and in_vain > batches * self.settings.batch_size:
            raise SpotError(
                f"{in_vain} prompts in a row taught nothing (policy {type(self.policy).__name__}), more than "
                f"training.refill_at_most={batches} batches: raise it, or choose problems that are sometimes solved"
            )

    async def _train_batches(self, group: asyncio.TaskGroup) -> None:
        for number in range(self._trained.step + 1, self.settings.iterations + 1):
            times = PhaseTimes()
            phase = self._phases.begin(number, "wait for batch")
            batch = await self._next_batch()
            self._check_dead_share()  # earlier failures count as soon as a batch has finished
            if batch is None:
                return
            ordinals = [ordinal for ordinal, _ in batch]
            accuracy = [self._accuracy.pop(ordinal, {}) for ordinal in ordinals]
            waits = self.waits.take(phase.at_s, asyncio.get_running_loop().time())
            times.waited_for = seconds_by_stage(waits)
            times.wait_for_batch = self._phases.end(phase, ordinals, waits)

            phase = self._phases.begin(number, "train")
            if self._publisher.sleepers:
                await self._put_to_sleep()
            taught = await self._revised(number - 1, batch, times)
            samples = [sample for _, group in taught for sample in group]
            trained = [sample.supervision for sample in samples if sample.supervision is not None]
            self._check_feed(trained)
            found = {ordinal: is_trained(group) if self.book.fills(ordinal) else None for ordinal, group in taught}
            self._ledger.cut(number - 1, self._trained.lineage, found)
            if not trained:
                structlog.get_logger().warning("no step", iteration=number, left_out=len(samples))
            report = await self.trainer.train(number - 1, trained)
            finished = IterationFinished(number, samples, report, times, accuracy)
            await self._tell_policy(finished)
            self.book.trained(taught)
            self._changed.set()
            self._trained = report.snapshot.version
            written = group.create_task(self.trainer.published(number), name=f"weights {number}")
            self._publisher.offer(number, report, written)
            if self._saver.is_due(number):
                await self._saver.begin(number)
            times.train = self._phases.end(phase, ordinals)

            await self._wait_for_served(number, ordinals, times)
            if pending := [each for each in (self._ending, written) if each is not None and not each.done()]:
                self._ending = group.create_task(self._end_after(pending, finished, group), name=f"iteration {number}")
            else:
                self._end(finished, group)

    async def _revised(self, iteration: int, batch: list[Finished], times: PhaseTimes) -> list[Finished]:
        """Return a batch with the terms that the policy gives it once it knows what the student in training says."""
        drafts = [sample for _, group in batch for sample in group if sample.supervision is not None]
        if not drafts or not isinstance(self.policy, Reviser):
            return batch
        supervision = [sample.supervision for sample in drafts if sample.supervision is not None]
        self._check_feed(supervision)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        live = await self.trainer.look(iteration, supervision)
        times.look = loop.time() - began_s
        progress = iteration / self.settings.iterations
        asked = LiveBatch(samples=tuple(drafts), live=tuple(live), iteration=iteration, progress=progress)
        given = iter(await self.settings.compute(revise, self.policy, asked))
        times.revise = loop.time() - began_s - times.look
        return [
            (ordinal, [sample if sample.supervision is None else next(given) for sample in group])
            for ordinal, group in batch
        ]

    async def _tell_policy(self, trained: IterationFinished) -> None:
        """Tell a policy that observes, before weights are served that its next prompts are sampled from."""
        if not isinstance(self.policy, Observer):
            return
        iteration = trained.iteration - 1
        step = iteration - self.settings.max_staleness  # its evaluation is there: see `_wait_for_served`
        figures = await self._figures(step) if self._figures is not None and step > 0 else {}
        metrics = {f"train/{name}": value for name, value in trained.report.metrics.items() if not name.endswith("_s")}
        report = IterationReport(iteration=iteration, metrics=trained.means | metrics, evaluation={**figures})
        await self.settings.compute(observe, self.policy, report)

    async def _end_after(
        self, pending: Sequence[asyncio.Task[Any]], finished: IterationFinished, group: asyncio.TaskGroup
    ) -> None:
        """End an iteration after the previous one and once its weights are on disk.

        So no file names weights that do not exist.
        """
        await asyncio.wait(pending)
        self._end(finished, group)

    def _end(self, finished: IterationFinished, group: asyncio.TaskGroup) -> None:
        number = self.state.iteration = finished.iteration
        self._changed.set()
        self._events.publish(finished)
        if self._saver.is_due(number):  # only now do other files have all of the iteration
            group.create_task(self._saver.finish(number), name=f"checkpoint {number}")

    async def _wait_for_served(self, number: int, ordinals: Sequence[int], times: PhaseTimes) -> None:
        """Wait until the trainer is no more than `max_staleness` steps ahead, and after the last iteration none.

        A run that is stopped does not wait.

        No batch could be complete earlier: its last prompts are admitted then.
        """
        is_last = number == self.settings.iterations
        step = self._trained.step - (0 if is_last else self.settings.max_staleness)
        publisher = self._publisher
        phase = self._phases.begin(number, "update weights")
        while publisher.confirmed.step < step and not self.state.stopped:
            await self._change()
        times.update_weights = self._phases.end(phase, ordinals)
        if publisher.served.step < step and not self.state.stopped:
            phase = self._phases.begin(number, "evaluate")
            while publisher.served.step < step and not self.state.stopped:
                await self._change()
            times.evaluate = self._phases.end(phase, ordinals)

    def _check_feed(self, trained: Sequence[Supervision]) -> None:
        settings = self.settings
        try:
            check_feed(
                trained,
                vocab_size=settings.vocab_size,
                live=self._trained,
                max_staleness=settings.max_staleness,
                teacher_lag=settings.teacher_lag,
            )
        except WrongSupervisionError as wrong:
            if is_ours(self.policy):
                raise
            raise PluginError(f"policy {type(self.policy).__name__}: {wrong}") from wrong

    async def _put_to_sleep(self) -> None:
        busy = sum(stage.in_flight for stage in self.stages.all)
        if busy:  # some servers end when they are put to sleep with requests in flight
            raise RuntimeError(f"{busy} requests are in flight although the batch is complete")
        await self._publisher.sleepers.sleep()

    def _worst_case_bytes(self, prompt: Prompt) -> int:
        own = max((len(ids) for ids in (prompt.teacher_ids, *prompt.own_ids.values()) if ids is not None), default=0)
        return worst_case_bytes(
            len(prompt.token_ids), self.settings.max_response_tokens, self.policy.needs, teacher_prompt_tokens=own
        )


def _updates_in_flight(stages: Stages) -> bool:
    """Whether the student's servers load weights while requests are under way. Servers that were not asked do not."""
    student = stages.services.capabilities.get("student")
    return student is not None and student.in_flight_updates
