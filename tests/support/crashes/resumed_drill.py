"""One life of a simulated run that may crash: it begins as `train --resume` does, and keeps what such a run keeps.

What must hold over all lives, besides what `faults.invariants` says of one:

    I10  nothing that was committed is lost, and trained once is trained once: the last weights are those that follow
         from the batches that the ledger names, each with the samples that its prompts were finished with last
    I11  an evaluation that counts is made once, of the weights that count
    I12  rows of metrics and samples appear once for each iteration
    I13  finished samples are used again if their weights count and are new enough, and only then
    I14  what was spent is known, as far as it was written down
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
from faults import plan as fault_plan
from faults.invariants import Witnessed, misnamed, require, teachers_weights, weights_after, whole_response
from faults.plan import Fault
from faults.run import Drill, WitnessedTeacher
from faults.servers import SimulatedReplica, SimulatedServer, SimulatedTeacherReplica
from faults.stateful_trainer import Line
from pydantic import BaseModel

from crashes.plan import DiskFault
from crashes.saving_trainer import SavingTrainer, read_checkpoint
from spot_async.base.events import Event
from spot_async.base.files import write_whole
from spot_async.base.seeds import derive_seed
from spot_async.config import FollowsConfig, TrainingConfig
from spot_async.config.training import KeptCheckpoints
from spot_async.evaluation.results import EvaluationResult
from spot_async.loop.admission import is_trained
from spot_async.loop.events import IterationFinished
from spot_async.loop.resuming import Resumption
from spot_async.protocols import Policy
from spot_async.replicas.pool import ReplicaPool
from spot_async.run_directory import manifest
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.ledger import Ledger, PromptRow, batch_faults
from spot_async.run_directory.manifest import Checkpoint
from spot_async.running.checkpoints import POLICY_FILE, RunCheckpoints, go_back
from spot_async.spending.account import Account, Spending
from spot_async.stages.plugin_contract import called, state_of
from spot_async.stages.stage import Stage
from spot_async.telemetry.run_log import RunLog, SpendingLog
from spot_async.testing.simulation import SimulatedRun
from spot_async.trainer.feed_check import sampled_spans, teacher_versions
from spot_async.types import Sample, Supervision

# By what struck a life, the errors with which it may end early, beside those of `fault_plan.MAY_END`.
MAY_END = {
    "full": "StorageError|ConfigError: run.directory|TrainerError: cannot (publish|save)|DataError: .*(full|No space)",
    "bad commit": "DataError: .* is damaged",
}


@dataclass
class Witness:
    """What happened in all lives of a run in truth."""

    line: Line = field(default_factory=Line)
    sampled: Witnessed = field(default_factory=dict)
    finished: dict[int, Sequence[Sample]] = field(default_factory=dict)  # by ordinal, as the policy made them
    forgotten: dict[int, Sequence[Sample]] = field(default_factory=dict)  # those that a life made again
    unpaid: set[int] = field(default_factory=set)  # ordinals of prompts that some life had no money for
    commits: list[int] = field(default_factory=list)  # steps whose checkpoints were committed, and are whole
    damaged: set[int] = field(default_factory=set)  # steps whose checkpoints are not
    evaluated: set[int] = field(default_factory=set)  # iterations
    evaluated_for_good: set[int] = field(default_factory=set)  # those that outlive a power cut
    spent: int = 0  # requests to teachers
    billed: int = 0  # those that were written down
    flushed: int = 0  # those that outlive a power cut
    has_lost_power: bool = False  # since the last life began
    made_again: int = 0  # prompts whose finished samples were not used again
    is_disturbed: bool = False  # whether faults decided what is trained on

    def forget(self, ordinal: int) -> Sequence[Sample] | None:
        """Note that a finished prompt is made again; return its samples."""
        samples = self.finished.pop(ordinal, None)
        if samples is not None:
            self.forgotten[ordinal] = samples
        return samples

    def lose_power(self) -> None:
        self.has_lost_power = True
        self.billed = self.flushed
        self.evaluated &= self.evaluated_for_good

    def begin_anew(self) -> None:
        self.line.cut(0, 0)
        self.finished.clear()
        self.forgotten.clear()
        self.unpaid.clear()
        self.commits.clear()
        self.damaged.clear()
        self.evaluated.clear()
        self.spent = self.billed = self.flushed = 0


class _RunSettings(BaseModel):
    """What the run's directory gets as its configuration."""

    seed: int


class ResumedDrill(Drill):
    """One life of a run, from the moment at which its process begins."""

    may_end: ClassVar[Mapping[str, str]] = {**fault_plan.MAY_END, **MAY_END}
    trainer_class = SavingTrainer
    # Each comes once. A policy may remember what an earlier epoch gave it, which a new process does not: KD without
    # `teacher.cache` has another response for a problem then.
    problems = 1000

    def __init__(
        self,
        seed: int,
        policy: Policy,
        max_staleness: int,
        faults: Sequence[Fault],
        witness: Witness,
        strikes: Mapping[Any, DiskFault],
        after: Callable[[int], None],
        follows: FollowsConfig | None = None,
        refill_at_most: int | None = None,
    ) -> None:
        """Make a life that has not begun. `after` is told of each iteration of it, which counts from 1."""
        self.follows = follows
        self.refill_at_most = refill_at_most
        self._witness = witness
        self._strikes = strikes
        self._after = after
        self._finished = 0  # iterations of this life
        self._arguments = seed, policy, max_staleness, faults
        self._run: SimulatedRun | None = None
        self._account = Account("teacher", token_budget=sys.maxsize)
        rng = random.Random(derive_seed(seed, "checkpoints"))
        self.batch_size, self.iterations = rng.randint(2, 3), rng.randint(3, 6)
        self.max_staleness = max_staleness
        self._training = TrainingConfig(
            iterations=self.iterations,
            checkpoint_every=rng.choice([1, 1, 2, 3, 4]),
            keep_checkpoints=KeptCheckpoints(last=rng.choice([1, 2]), every=rng.choice([None, 2])),
        )

    def begin(self, path: Path, checkpoint: Checkpoint | None, stack: ExitStack) -> None:
        """Do what a process does before it starts its servers."""
        witness = self._witness
        if checkpoint is None:
            settings: Any = _RunSettings(seed=self._arguments[0])
            self._directory = RunDirectory.create(path, settings)
        else:
            self._directory = RunDirectory.open(path)
        self._beginning = manifest.beginning(checkpoint, keys="", data="")
        step = self._beginning.step
        witness.line.cut(step, self._beginning.lineage)
        witness.evaluated -= {each for each in witness.evaluated if each > step}
        witness.commits = [each for each in witness.commits if each <= step]
        self._ledger = stack.enter_context(closing(_WitnessedLedger.open(path)))
        self._ledger.witness = witness
        self._spending = SpendingLog(self._directory, {"teacher": self._account})
        self._resumption = Resumption()
        if checkpoint is not None:
            saved = read_checkpoint(checkpoint.directory)
            require(saved == witness.line.weights[step], "I10", f"checkpoint {step} has weights of other batches")
            limits: Any = SimpleNamespace(
                max_staleness=self.max_staleness,
                batch_size=self.batch_size,
                refill_at_most=self.refill_at_most,
                teacher_lag=0 if self.follows is None else self.follows.longest_lag,
            )
            self._resumption = go_back(self._directory, self._beginning, self._ledger, limits)
            if state_of(policy := self._arguments[1]) is not None:
                called(policy, "load_state_dict", json.loads((checkpoint.directory / POLICY_FILE).read_text()))
            self._spending.go_on()
            self._check_bill()
            self._check_reuse(all_kept=not witness.damaged and not witness.has_lost_power)
        # Not before: a life that is killed while it goes back leaves the rest of that to the next.
        witness.has_lost_power = False
        witness.damaged.clear()
        witness.unpaid |= {row.ordinal for row in self._ledger.prompts() if row.state == "unpaid"}
        super().__init__(
            *self._arguments,
            path / "weights",
            line=witness.line,
            unpaid=witness.unpaid,
            witnessed=witness.sampled,
            follows=self.follows,
            refill_at_most=self.refill_at_most,
        )

    def sizes(self, rng: random.Random) -> tuple[int, int]:
        return self.batch_size, self.iterations

    # What it keeps

    def kept(self) -> Mapping[str, Any]:
        checkpoints = _WitnessedCheckpoints(
            self._directory,
            self._training,
            iterations=self.iterations,
            beginning=self._beginning,
            ledger=self._ledger,
            expected_bytes=0,
            policy_state=partial(state_of, self._arguments[1]),
        )
        checkpoints.witness = self._witness
        return {"ledger": self._ledger, "checkpoints": checkpoints, "resumption": self._resumption}

    async def catch_up(self, student: ReplicaPool[Any]) -> None:
        """Send the weights, and make evaluations that were cut off, as `TrainingRun` does."""
        for iteration in range(1, self._beginning.step):
            is_missing = self.evaluation_is_due(iteration) and not self._is_evaluated(iteration)
            if is_missing and self.trainer.path(iteration).is_dir():
                await self.send(student, iteration)
                await self.measured(self.evaluations(student), iteration)
        await super().catch_up(student)
        if self.evaluation_is_due(self._beginning.step) and not self._is_evaluated(self._beginning.step):
            await self.measured(self.evaluations(student), self._beginning.step)

    def made(self, run: SimulatedRun) -> None:
        self._run = run
        log = RunLog(self._directory, run.stages, is_strict=self.max_staleness == 0)
        run.stages.events.subscribe(log, self._spending, self)

    def on(self, event: Event) -> None:
        if isinstance(event, IterationFinished):  # the others have written their files
            self._witness.billed = self._witness.spent
            self._finished += 1
            self._after(self._finished)

    def teacher(self, server: SimulatedServer, *, attaches: bool) -> SimulatedTeacherReplica:
        return _BilledTeacher(server, self._witness.sampled, self._pay, attaches=attaches)

    def _pay(self, server: str) -> None:
        self._account.spending.setdefault(server, Spending()).requests += 1
        self._witness.spent += 1

    async def measured(self, stage: Stage[SimulatedReplica], iteration: int) -> EvaluationResult:
        name = _evaluation(iteration)
        if self._is_evaluated(iteration):
            return EvaluationResult(())
        begun, evaluated = self._beginning.step, self._witness.evaluated
        require(iteration not in evaluated, "I11", f"evaluation {iteration} is made again, after checkpoint {begun}")
        result = await super().measured(stage, iteration)
        write_whole(self._directory.path / name, self.trainer.weights[iteration].encode())
        evaluated.add(iteration)
        return result

    def _is_evaluated(self, iteration: int) -> bool:
        return (self._directory.path / _evaluation(iteration)).exists()

    def struck(self) -> Sequence[str]:
        return [*(super().struck() if hasattr(self, "scene") else ()), *(str(each) for each in self._strikes.values())]

    # What must hold

    def _check_bill(self) -> None:
        witness, known = self._witness, self._account.total.requests
        inside = witness.billed <= known <= witness.spent
        require(
            inside, "I14", f"{known} requests are known, of {witness.spent}, and {witness.billed} were written down"
        )
        witness.spent = witness.billed = known

    def _check_reuse(self, *, all_kept: bool) -> None:
        """Check which finished samples are used again. A power cut and a damaged checkpoint may cost some."""
        resumption, finished = self._resumption, self._witness.finished
        living = [row for row in self._ledger.prompts() if row.state not in ("dead", "in_vain")]
        place = -1
        for ordinal in (row.ordinal for row in living):
            kept = resumption.samples_of(ordinal)
            place += kept is None or is_trained(kept) or self.refill_at_most is None
            if ordinal in resumption.settled:
                continue
            if kept is None:
                samples = self._witness.forget(ordinal)
                still_counts = samples is not None and self._still_counts(samples, place // self.batch_size)
                require(not (all_kept and still_counts), "I13", f"finished prompt {ordinal} is made again")
            elif ordinal not in finished and self._witness.has_lost_power:
                # That they were forgotten was not flushed.
                finished[ordinal] = self._witness.forgotten[ordinal]

    def _still_counts(self, samples: Sequence[Sample], batch: int) -> bool:
        weights = self._witness.line.weights
        for sample in samples:
            if sample.supervision is None:
                continue
            spans = sampled_spans(sample.supervision)
            if any(
                span.version.step < batch - self.max_staleness or span.version.step >= len(weights) for span in spans
            ):
                return False
            if self._is_teacher_gone(sample.supervision, batch):
                return False
            if misnamed(sample.supervision, weights, self._witness.sampled):
                return False
        return True

    def _is_teacher_gone(self, supervision: Supervision, batch: int) -> bool:
        """Return whether the teacher had weights that are too old for the batch, or do not count any more."""
        witness, follows = self._witness, self.follows
        said = witness.sampled.get(b"teacher" + whole_response(supervision), ())
        for version in teacher_versions(supervision) if follows is not None else ():
            is_old = version.step < batch - self.max_staleness - follows.longest_lag
            if is_old or version.step >= len(witness.line.weights):
                return True
            if teachers_weights(follows, witness.line.weights, version.step) not in said:
                return True
        return False

    def check_evaluations(self, made: Sequence[int]) -> None:
        """Check that each evaluation that was due was made once, of weights that count."""
        for iteration in range(1, self.trainer.step + 1):
            path = self._directory.path / _evaluation(iteration)
            require(
                path.exists() == self.evaluation_is_due(iteration), "I11", f"evaluation {iteration}: {path.exists()}"
            )
            if path.exists():
                found = path.read_text()
                require(found == self.trainer.weights[iteration], "I11", f"evaluation {iteration} is of {found}")

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, once it came to its end: it did not run out of money."""
        return self._run is None or self._run.orchestrator.state.spent is None

    def check_end_of_run(self) -> None:
        """Check what a run left that came to its end."""
        witness, step = self._witness, self.trainer.step
        with closing(Ledger.open(self._directory.path)) as ledger:
            rows = list(ledger.prompts())
        require([row.ordinal for row in rows] == list(range(len(rows))), "I10", "prompts are missing in the ledger")
        faults = list(batch_faults(rows, step, self.batch_size))
        require(not faults, "I10", f"verify-run says: {'; '.join(faults)}")
        weights = ""
        for batch in range(step):
            ordinals = [row.ordinal for row in rows if row.batch == batch]
            samples = [sample for ordinal in ordinals for sample in witness.finished[ordinal]]
            trained = [sample.supervision for sample in samples if sample.supervision is not None]
            weights = weights_after(weights, trained)
        require(weights == witness.line.weights[-1], "I10", "the last weights do not follow from the ledger's batches")
        self._check_prompts(rows, step)
        self._check_rows(rows, step)
        self.check_evaluations(())

    def _check_prompts(self, rows: Sequence[PromptRow], step: int) -> None:
        """Check that the prompts before the last one that was trained are in a batch, or dead.

        One that there was no money for comes later, and no batch may be left for it.
        """
        last = max((row.ordinal for row in rows if row.batch is not None), default=-1)
        for row in rows:
            is_in = row.batch is not None and row.batch < step
            untaught = "left_out" if self.refill_at_most is None else "in_vain"
            is_used = is_in and row.state == (
                "batched" if is_trained(self._witness.finished[row.ordinal]) else untaught
            )
            may_wait = row.ordinal > last or (row.ordinal in self._witness.unpaid and row.batch is None)
            holds = is_used or row.state == "dead" or may_wait
            require(holds, "I10", f"prompt {row.ordinal} is {row.state}, in batch {row.batch}")

    def _check_rows(self, rows: Sequence[PromptRow], step: int) -> None:
        """Check that each iteration has its rows once."""
        every = list(range(1, step + 1))
        iterations = _iterations(self._directory.path / "metrics.jsonl")
        require(iterations == every, "I12", f"metrics.jsonl has rows of {iterations}")
        made = Counter(_iterations(self._directory.path / "samples.jsonl"))
        for iteration in every:
            due = sum(len(self._witness.finished[row.ordinal]) for row in rows if row.batch == iteration - 1)
            require(made[iteration] == due, "I12", f"samples.jsonl has {made[iteration]} of {due} rows of {iteration}")


class _WitnessedLedger(Ledger):
    """A ledger that shows what it was told."""

    witness: Witness

    def admit(self, ordinal: int, problem_id: str) -> None:
        super().admit(ordinal, problem_id)
        self.witness.made_again += self.witness.forget(ordinal) is not None

    def finish(self, ordinal: int, samples: Sequence[Sample], accuracy: Mapping[str, float]) -> None:
        super().finish(ordinal, samples, accuracy)
        self.witness.finished[ordinal] = samples

    def give_up(self, ordinal: int, state: str, reason: str) -> None:
        super().give_up(ordinal, state, reason)
        self.witness.is_disturbed = True


class _WitnessedCheckpoints(RunCheckpoints):
    """Checkpoints that show what was committed."""

    witness: Witness

    async def commit(self, iteration: int) -> None:
        billed, evaluated = self.witness.billed, set(self.witness.evaluated)
        await super().commit(iteration)
        self.witness.flushed, self.witness.evaluated_for_good = billed, evaluated
        if iteration not in self.witness.damaged:
            self.witness.commits.append(iteration)


class _BilledTeacher(WitnessedTeacher):
    """A teacher whose answers cost something."""

    def __init__(self, server: SimulatedServer, witnessed: Witnessed, pay: Any, *, attaches: bool) -> None:
        super().__init__(server, witnessed, attaches=attaches)
        self._pay = pay

    async def _work(self, tokens: int, rng: Any) -> None:
        await super()._work(tokens, rng)
        self._pay(self.server.name)


class _Row(msgspec.Struct):
    iteration: int


def _iterations(path: Path) -> list[int]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=_Row).iteration for line in lines]


def _evaluation(iteration: int) -> str:
    return f"evaluation-{iteration:06d}.json"
