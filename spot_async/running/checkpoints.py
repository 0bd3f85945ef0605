"""Makes a run's checkpoints count, and finds where a run that ended early continues."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from spot_async.base.files import all_numbered, flush_to_disk, write_whole
from spot_async.base.tasks import in_thread
from spot_async.checks.machine import shortage
from spot_async.config import TrainingConfig
from spot_async.errors import StorageError
from spot_async.loop.admission import FED, PromptState, is_trained
from spot_async.loop.orchestrator import OrchestratorSettings
from spot_async.loop.resuming import Resumption
from spot_async.run_directory import manifest
from spot_async.run_directory.dead_letters import DeadLetter, settle_letters
from spot_async.run_directory.layout import SUMMARY, RunDirectory, evaluated, evaluation_files
from spot_async.run_directory.ledger import Ledger, PromptRow
from spot_async.run_directory.manifest import Manifest
from spot_async.trainer.feed_check import sampled_spans, teacher_versions
from spot_async.types import Pull, Sample, SoftTargets, Supervision, VersionSpan, WeightVersion

# By their states in the ledger, of prompts that are neither supervised once more nor used again.
ENDS = {
    "dead": PromptState.DEAD,
    "left_out": PromptState.LEFT_OUT,
    "in_vain": PromptState.IN_VAIN,
    "batched": PromptState.TRAINED,
}
ROLLED_BACK = "rolled-back"
POLICY_FILE = "policy.json"  # of a checkpoint: what the policy made of reports

Named = TypeVar("Named", Supervision, VersionSpan, Pull, SoftTargets)


@dataclass(eq=False)
class RunCheckpoints:
    """The `Checkpoints` of a run directory: every so many iterations, and after the last."""

    run: RunDirectory
    training: TrainingConfig
    _: KW_ONLY
    iterations: int
    beginning: Manifest  # where this part of the run began: its step, lineages and digests
    ledger: Ledger
    expected_bytes: int  # what the next checkpoint takes
    policy_state: Callable[[], bytes | None] = lambda: None  # of a policy that observes
    _state: bytes | None = field(default=None, init=False)  # as it was when the trainer's began to be saved

    def is_due(self, iteration: int) -> bool:
        return iteration % self.training.checkpoint_every == 0 or iteration == self.iterations

    def directory(self, iteration: int) -> str:
        if (words := shortage(self.run.path, self.expected_bytes)) is not None:
            raise StorageError(
                f"no room for the checkpoint of iteration {iteration}: {words}: make room, or keep fewer by "
                "training.keep_checkpoints, and continue it with --resume; the checkpoints before are whole"
            )
        self._state = self.policy_state()
        return str(manifest.checkpoint_directory(self.run.path, iteration))

    async def commit(self, iteration: int) -> None:
        directory, keep = manifest.checkpoint_directory(self.run.path, iteration), self.training.keep_checkpoints
        written = msgspec.structs.replace(self.beginning, step=iteration)
        await in_thread(self.run.flush_rows)  # a resumed run does not write them again
        await in_thread(self.run.weights.keep, iteration)  # it serves them
        if self._state is not None:
            await in_thread(write_whole, directory / POLICY_FILE, self._state)
        files = await in_thread(manifest.commit, directory, written)  # reads all of the tensors
        self.expected_bytes = sum(each.bytes for each in files)
        self.ledger.forget_samples(iteration)
        await in_thread(manifest.prune, self.run.path, keep=keep.last, keep_every=keep.every)


def go_back(directory: RunDirectory, beginning: Manifest, ledger: Ledger, settings: OrchestratorSettings) -> Resumption:
    """Undo what a run did after the step at which it begins once more, and return what an orchestrator continues from.

    Weights that were published since are moved aside. Doing this twice does no more than doing it once, so a kill in
    between does no harm.
    """
    step = beginning.step
    (directory.path / SUMMARY).unlink(missing_ok=True)
    _move_aside(directory.path, step)  # first, so that whoever comes next begins at no later step than the ledger does
    directory.weights.forget_after(step)
    ledger.roll_back(step)
    directory.cut_after(step)
    manifest.remove_unfinished(directory.path)
    rows = list(ledger.prompts())
    dead = [row for row in rows if row.state == "dead"]
    settle_letters(
        directory.path, [DeadLetter(ordinal=r.ordinal, problem_id=r.problem_id, reason=r.reason or "") for r in dead]
    )
    settled = {row.ordinal: ENDS[row.state] for row in rows if row.state in ENDS}
    kept = _reusable(rows, ledger, beginning, settings)
    # Otherwise a later part of the run might take their weights for its own, whose lineage may have the same number.
    ledger.drop_samples(row.ordinal for row in rows if row.state == "queued" and row.ordinal not in kept)
    return Resumption(WeightVersion(beginning.lineage, step), settled, kept.get, ledger.accuracy)


def _reusable(
    rows: Sequence[PromptRow], ledger: Ledger, beginning: Manifest, settings: OrchestratorSettings
) -> dict[int, Sequence[Sample]]:
    """Return the samples that were finished and not trained on, of prompts whose weights still count.

    A prompt goes into the batch that its place among the living prompts says, of which those that taught nothing take
    none if batches refill. Where its tokens would be too old by then, it is supervised once more.
    """
    found: dict[int, Sequence[Sample]] = {}
    place = sum(ENDS.get(row.state) in FED for row in rows)
    for row in rows:
        if row.state in ENDS:
            continue
        samples = ledger.samples(row.ordinal) if row.state == "queued" else None
        fills = samples is None or settings.refill_at_most is None or is_trained(samples)
        batch, place = place // settings.batch_size, place + fills
        if samples is None:
            continue
        oldest = batch - settings.max_staleness
        renamed = [_renamed(each, beginning.lineages, oldest, oldest - settings.teacher_lag) for each in samples]
        if None not in renamed:
            found[row.ordinal] = [each for each in renamed if each is not None]
    return found


def _renamed(sample: Sample, lineages: Sequence[int], oldest: int, teachers_oldest: int) -> Sample | None:
    """Return a sample whose weights are named as those of the newest lineage.

    Up to the step at which it began, a lineage has the weights of the one before. Return None for weights that are not
    part of it, or are of a step before `oldest`, or before `teachers_oldest` those of a teacher that follows.
    """
    supervision = sample.supervision
    if supervision is None:
        return sample
    sampled, teachers = {span.version for span in sampled_spans(supervision)}, teacher_versions(supervision)
    is_old = any(each.step < oldest for each in sampled) or any(each.step < teachers_oldest for each in teachers)
    if is_old or not all(_is_ancestor(each, lineages) for each in sampled | teachers):
        return None
    return msgspec.structs.replace(sample, supervision=_in_lineage(supervision, len(lineages) - 1))


def _is_ancestor(version: WeightVersion, lineages: Sequence[int]) -> bool:
    """Return whether these weights are some that the newest lineage came from.

    A part of the run that was cut off may have had the same number as the one that begins now, which has no weights of
    its own yet.
    """
    return all(version.step <= began for began in (*lineages[version.lineage + 1 :], lineages[-1]))


def _in_lineage(supervision: Supervision, lineage: int) -> Supervision:
    def renamed(named: Named) -> Named:
        version = named.version
        return (
            named if version is None else msgspec.structs.replace(named, version=WeightVersion(lineage, version.step))
        )

    return msgspec.structs.replace(
        renamed(supervision),
        version_spans=tuple(map(renamed, supervision.version_spans)),
        pulls=tuple(map(renamed, supervision.pulls)),
        soft_targets=tuple(map(renamed, supervision.soft_targets)),
    )


def _move_aside(run: Path, step: int) -> None:
    """Move weights and checkpoints of later steps to `rolled-back/`, in place of those that are there."""
    later = [when for when in evaluated(run) if when.isdigit() and int(when) > step]
    found = [
        *all_numbered(run / "weights", "step", above=step),
        *all_numbered(run / "weights", "best", above=step),
        *all_numbered(run / manifest.DIRECTORY, "step", above=step),
        *(path for when in later for path in evaluation_files(run, when)),
    ]
    put_aside(run, found)
    for half in all_numbered(run / "weights", ".best"):  # a kill cut its copying short
        shutil.rmtree(half, ignore_errors=True)
    for link in (run / "best", run / "student"):
        if link.is_symlink() and not link.exists():
            link.unlink()


def put_aside(run: Path, paths: Iterable[Path]) -> None:
    """Move files and directories of a run to `rolled-back/`, for good. Raise StorageError where the disk refuses."""
    for each in sorted(paths):
        target = run / ROLLED_BACK / each.relative_to(run)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.is_dir():
                shutil.rmtree(target)
            each.replace(target)
            flush_to_disk(each.parent)
        except OSError as error:
            raise StorageError(f"cannot move {each} to {target}: {error.strerror}") from None
