"""Checks what must hold at every moment of a training run, whatever befalls its servers.

    I1  served <= trained <= served + n + 1, where n is `max_staleness`
    I2  every token of batch b was sampled by weights of steps b - n to b, and by those that its span names
    I3  every prompt that runs, is queued or is in a batch has a place in the queue, and no other has one; if batches
        refill, those that taught nothing have none
    I4  a prompt is in one batch, and batches are in the order of admission; a prompt that an earlier part of the run
        had no money for is admitted once more, behind later ones
    I5  a role's servers get one weight update at a time
    I6  no prompt is admitted early, and none that no iteration is left for
    I7  weights that are served, sent or newest are on the disk
    I8  in the end nothing runs: no prompt, no request, no lease, no task
    I9  with n = 0 all tokens of a batch are of the weights that it updates, and no prompt runs beside an evaluation
    I15 what a teacher that follows the student says for batch b is of what it had with the student's weights of one of
        steps b - n to b, and of what its version names
    I16 an environment is told what it has answered, and its answers are in no term

It knows no fault. It listens to a run's events, and looks at the book and the servers whenever one comes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from spot_async.base import wire
from spot_async.base.events import Event
from spot_async.config import FollowsConfig
from spot_async.loop.admission import PromptState
from spot_async.loop.events import IterationFinished, PhaseBegan, PhaseEnded, WeightsServed
from spot_async.models.responses import counted_tokens
from spot_async.protocols import WeightSink
from spot_async.testing.services import any_lineage
from spot_async.trainer.feed_check import sampled_spans, teacher_versions
from spot_async.types import IntArray, ScoreRequest, Supervision, WeightSnapshot

if TYPE_CHECKING:
    from faults.stateful_trainer import StatefulTrainer
    from spot_async.loop.orchestrator import Orchestrator

PLACED = (PromptState.RUNNING, PromptState.QUEUED, PromptState.BATCHED)
Batches = Sequence[Sequence[Supervision]]
# Which weights sampled a token in truth, by a digest of all tokens up to it.
Witnessed = dict[bytes, set[str]]


class InvariantError(AssertionError):
    """What must always hold did not hold."""


def weights_after(weights: str, batch: Iterable[Supervision]) -> str:
    """Return the weights that a batch makes of `weights`: a digest. A batch without samples makes no step.

    A resumed run has the same weights as before under the name of another lineage, so lineages do not count.
    """
    samples = [wire.encode(_of_any_lineage(each)) for each in batch]
    digest = hashlib.blake2b(weights.encode(), digest_size=8)
    for sample in samples:
        digest.update(sample)
    return digest.hexdigest() if samples else weights


def _of_any_lineage(supervision: Supervision) -> Supervision:
    def plain(named: Any) -> Any:
        return msgspec.structs.replace(named, version=named.version and any_lineage(named.version))

    return msgspec.structs.replace(
        plain(supervision),
        version_spans=tuple(map(plain, supervision.version_spans)),
        pulls=tuple(map(plain, supervision.pulls)),
        soft_targets=tuple(map(plain, supervision.soft_targets)),
    )


def teachers_weights(follows: FollowsConfig, weights: Sequence[str], step: int) -> str:
    """Return what a teacher has when the student has the weights of a step: those, or a digest of all before."""
    had = follows.step_at(step)
    if follows.decay is None or not had:
        return weights[had]
    earlier = teachers_weights(follows, weights, had - 1)
    return hashlib.blake2b(f"average {earlier} {weights[had]}".encode(), digest_size=8).hexdigest()


def whole_response(supervision: Supervision | ScoreRequest) -> bytes:
    """Return a digest of a prompt and response."""
    return [*prefixes(supervision.prompt_ids, supervision.response_ids)][-1]


def prefixes(context_ids: IntArray, token_ids: IntArray) -> Iterator[bytes]:
    """Yield a digest of all tokens up to each one of `token_ids`, which follow `context_ids`."""
    digest = hashlib.blake2b(np.asarray(context_ids, np.int32).tobytes(), digest_size=8)
    for token_id in np.asarray(token_ids, np.int32):
        digest.update(token_id.tobytes())
        yield digest.digest()


def misnamed(supervision: Supervision, weights: Sequence[str], witnessed: Witnessed) -> list[int]:
    """Return the response tokens that were not sampled by the weights that their spans name."""
    keys = list(prefixes(supervision.prompt_ids, supervision.response_ids))
    return [
        position
        for span in sampled_spans(supervision)
        for position in range(span.start, span.end)
        if weights[span.version.step] not in witnessed.get(keys[position], ())
    ]


def require(holds: bool, invariant: str, otherwise: str) -> None:
    if not holds:
        raise InvariantError(f"{invariant}: {otherwise}")


class Invariants:
    """A listener that raises `InvariantError` at the first event after an invariant was broken."""

    def __init__(
        self,
        *,
        batch_size: int,
        iterations: int,
        max_staleness: int,
        prompts: int | None,
        batches: Batches = (),
        unpaid: Set[int] = frozenset(),
        witnessed: Witnessed | None = None,
        follows: FollowsConfig | None = None,
        refills: bool = False,
    ) -> None:
        """`prompts` is how many there are; None: as many as it takes. A resumed run has trained `batches` before.

        `unpaid` are ordinals of prompts that it had no money for. `follows`: how its teacher follows the student.
        """
        self._follows, self._refills = follows, refills
        self.witnessed: Witnessed = {} if witnessed is None else witnessed
        self.finished = len(batches)  # iterations
        self._batch_size = batch_size
        self._iterations = iterations
        self._prompts = sys.maxsize if prompts is None else prompts
        self._max_staleness = max_staleness
        self._last_ordinal = max((each.prompt_ordinal for batch in batches for each in batch), default=-1)
        self._unpaid = unpaid
        self._phases: dict[str, PhaseBegan] = {}  # by pump
        self._run: tuple[Orchestrator, StatefulTrainer] | None = None

    def watch(self, orchestrator: Orchestrator, trainer: StatefulTrainer) -> None:
        """Listen to a run that has not begun."""
        self._run = orchestrator, trainer
        orchestrator.stages.events.subscribe(self)

    # During the run

    def on(self, event: Event) -> None:
        assert self._run is not None
        orchestrator, trainer = self._run
        self._check_book(orchestrator)
        if isinstance(event, PhaseBegan | PhaseEnded) and (event.pump, event.name) == ("publish", "evaluate"):
            self._check_evaluation(orchestrator)
        match event:
            case PhaseBegan(pump=pump):
                require(pump not in self._phases, "I5", f"{event} while {self._phases.get(pump)} continues")
                self._phases[pump] = event
                self._check_weights(orchestrator, trainer)
            case PhaseEnded(pump=pump, name=name):
                began = self._phases.pop(pump, None)
                require(began is not None and began.name == name, "I5", f"{event} ends {began}")
                self._check_weights(orchestrator, trainer)
            case WeightsServed(version=version):
                require(version == orchestrator.served, "I1", f"{version} are said to be served")
            case IterationFinished(iteration=iteration):
                self.finished += 1
                require(iteration == self.finished, "I4", f"iteration {iteration} is the {self.finished}. to finish")
                batch = [each.supervision for each in event.samples if each.supervision is not None]
                due = weights_after(trainer.weights[iteration - 1], batch)
                require(trainer.weights[iteration] == due, "I4", f"iteration {iteration} was trained on other samples")

    def _check_evaluation(self, orchestrator: Orchestrator) -> None:
        running = orchestrator.book.count(PromptState.RUNNING)
        require(self._max_staleness > 0 or not running, "I9", f"{running} prompts run beside an evaluation")

    def _check_book(self, orchestrator: Orchestrator) -> None:
        count = orchestrator.book.count
        placed, held = sum(map(count, PLACED)), orchestrator.book.held_prompts
        as_many = count(PromptState.RUNNING) <= held <= placed if self._refills else held == placed
        require(as_many, "I3", f"{held} places are held by {placed} prompts")
        living = held + count(PromptState.TRAINED) + count(PromptState.LEFT_OUT)
        served = orchestrator.served.step
        most = min(self._max_staleness + served + 1, self._iterations) * self._batch_size
        require(living <= most, "I6", f"{living} prompts were admitted, not {most}, with weights {served} served")

    def _check_weights(self, orchestrator: Orchestrator, trainer: StatefulTrainer) -> None:
        served, trained = orchestrator.served.step, trainer.step
        inside = served <= trained <= served + self._max_staleness + 1
        require(inside, "I1", f"weights {trained} are trained and {served} served")
        for step in range(served, trainer.written + 1):
            require(trainer.path(step).is_dir(), "I7", f"weights {step} are gone: {served} to {trained} may be needed")

    def check_batch(self, step: int, batch: Sequence[Supervision]) -> None:
        """Check what the trainer gets, before it is trained on."""
        assert self._run is not None
        weights = self._run[1].weights
        ordinals = [each.prompt_ordinal for each in batch]
        earlier = {ordinal for ordinal in ordinals if ordinal <= self._last_ordinal}
        in_order = ordinals == sorted(ordinals) and earlier <= self._unpaid
        require(in_order, "I4", f"batch {step} has prompts {ordinals} after prompt {self._last_ordinal}")
        self._last_ordinal = max(ordinals, default=self._last_ordinal)
        for each in batch:
            spans = sampled_spans(each)
            for span in spans:
                fresh = step - self._max_staleness <= span.version.step <= step
                require(fresh, "I2", f"prompt {each.prompt_ordinal} of batch {step} has tokens of weights {span}")
            wrong = misnamed(each, weights, self.witnessed)
            require(not wrong, "I2", f"prompt {each.prompt_ordinal}: tokens {wrong} are of others than {spans}")
            if self._max_staleness == 0 and spans:
                is_live = {span.version.step for span in spans} == {step}
                require(is_live, "I9", f"prompt {each.prompt_ordinal} of batch {step} has {spans}")
            self._check_teacher(step, each, weights)
            self._check_read(each)

    def _check_read(self, each: Supervision) -> None:
        read = np.flatnonzero(~counted_tokens(each))
        if not len(read):
            return
        keys, who = [*prefixes(each.prompt_ids, each.response_ids)], f"prompt {each.prompt_ordinal}"
        sampled = [position for position in read if keys[position] in self.witnessed]
        require(not sampled, "I16", f"{who}: tokens {sampled} are said to be read, and the student sampled them")
        taught = [targets.positions for targets in each.soft_targets]
        if each.has_policy_term:
            taught.append(read if each.policy_mask is None else np.flatnonzero(each.policy_mask))
        wrong = np.intersect1d(read, np.concatenate(taught)) if taught else read[:0]
        require(not len(wrong), "I16", f"{who}: tokens {wrong} are taught, and were only read")

    def _check_teacher(self, step: int, each: Supervision, weights: Sequence[str]) -> None:
        versions, follows = teacher_versions(each), self._follows
        require(bool(versions) <= (follows is not None), "I15", f"prompt {each.prompt_ordinal} names {versions}")
        for version in versions if follows is not None else ():
            allowed = {follows.step_at(max(0, each)) for each in range(step - self._max_staleness, step + 1)}
            require(version.step in allowed, "I15", f"a teacher of {version} in batch {step}, not of {allowed}")
            said = self.witnessed.get(b"teacher" + whole_response(each), ())
            had = teachers_weights(follows, weights, version.step)
            require(had in said, "I15", f"a teacher of {said} is said to have been of {version}, {had}")

    # In the end

    def check_end(self, pools: Mapping[str, Any], *, is_early: bool) -> None:
        """Check a run that is over. One that ended early may have prompts in any state, but no request and no lease."""
        assert self._run is not None
        orchestrator, trainer = self._run
        self._check_book(orchestrator)
        for role, pool in pools.items():
            leased = {each.name: each.in_flight for each in pool.replicas if each.in_flight}
            require(not leased, "I8", f"{role}: requests are in flight: {leased}")
            require(not pool.waiting, "I8", f"{role}: {pool.waiting} requests wait for a lease")
        opened = [stage.name for stage in orchestrator.stages.all if stage.open or stage.prompts]
        require(not opened, "I8", f"requests are open: {opened}")
        if is_early:
            return
        book = orchestrator.book
        placed = {state.value: book.count(state) for state in PLACED if book.count(state)}
        require(not placed and not book.held_prompts, "I8", f"prompts are left: {placed}")
        require(trainer.step == self.finished, "I4", f"{trainer.step} steps, {self.finished} iterations finished")
        require(orchestrator.served.step == trainer.step, "I1", f"{orchestrator.served} are served in the end")
        left_over = book.count(PromptState.LEFT_OVER)
        most = 0 if self.finished == self._iterations else self._batch_size - 1
        many = self._refills and most  # without prompts for the last batch, those that taught nothing wait for it too
        require(many or left_over <= most, "I6", f"{left_over} finished prompts are left over")
        trained = {each.prompt_ordinal for batch in trainer.batches for each in batch}
        require(trained == set(book.ordinals(PromptState.TRAINED)), "I4", "others were trained than the book says")
        used = trained | set(book.ordinals(PromptState.LEFT_OUT))
        require(len(used) == self.finished * self._batch_size, "I4", f"{len(used)} prompts are in batches")
        ended = (PromptState.DEAD, PromptState.UNPAID, *([PromptState.IN_VAIN] if self._refills else []))
        given_up = {ordinal for state in ended for ordinal in book.ordinals(state)}
        late = self._unpaid & set(book.ordinals(PromptState.LEFT_OVER))  # paid for at last, and no batch was left
        skipped = set(range(max(used, default=-1) + 1)) - used - given_up - late
        require(not skipped, "I4", f"prompts {sorted(skipped)} were passed over")
        admitted = sum(book.counts.values())
        could_go_on = orchestrator.state.spent is None and admitted < self._prompts
        require(self.finished == self._iterations or not could_go_on, "I8", f"it ended after {self.finished}")


class OneUpdateAtATime:
    """A weight sink that raises `InvariantError` if it gets weights while it sends others (I5)."""

    def __init__(self, sink: WeightSink) -> None:
        self._sink = sink
        self._sending: WeightSnapshot | None = None

    async def update_weights(self, snapshot: WeightSnapshot, *, deadline: float) -> None:
        require(self._sending is None, "I5", f"{snapshot.version} are sent while {self._sending} are")
        self._sending = snapshot
        try:
            await self._sink.update_weights(snapshot, deadline=deadline)
        finally:
            self._sending = None
