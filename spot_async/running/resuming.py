"""Opens a run that ended early (its configuration, newest whole checkpoint, plan), and finds where its parts begin."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from spot_async.base.files import numbered, reading
from spot_async.base.processes.private_directory import remove_abandoned
from spot_async.base.tasks import in_thread
from spot_async.checks.plan import TrainPlan, plan_training
from spot_async.checks.resuming import check_same_numbers, check_same_prompts, digest_of_keys, digest_of_prompts
from spot_async.config import ROLES, Config
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError, TrainerLostError
from spot_async.loop.resuming import Resumption
from spot_async.models.hub import Say, with_downloads
from spot_async.run_directory import manifest
from spot_async.run_directory.layout import RESTARTED, RESUMED, RunDirectory, evaluation_files
from spot_async.run_directory.ledger import Ledger
from spot_async.run_directory.manifest import Checkpoint, Manifest
from spot_async.running.assembly import orchestrator_settings
from spot_async.running.checkpoints import POLICY_FILE, go_back, put_aside
from spot_async.running.run_evaluations import RunEvaluations
from spot_async.stages.plugin_contract import called, is_ours, state_of
from spot_async.trainer.settings import TrainerSettings, progress_words, seam_words


@dataclass(frozen=True)
class ResumedRun:
    """A run that can continue. Nothing of its directory is changed yet."""

    config: Config
    plan: TrainPlan
    directory: RunDirectory
    checkpoint: Checkpoint


def open_run(
    path: Path, overrides: Sequence[str] = (), say: Say | None = None, *, weights: Collection[str] = ROLES
) -> ResumedRun:
    """Return a run that ended early. Raises ConfigError or DataError, in one line, and changes nothing.

    Models of the hub that are no longer in its cache are downloaded: `say` and `weights` are as in `with_downloads`.
    Without `weights` nothing is going to start, and no server has to be installed.
    `say` also gets what happens to the learning rate and to progress, if it continues for other iterations.
    """
    directory = RunDirectory.open_own(path)
    if directory.purpose == "eval":
        raise DataError(f"{path} holds an evaluation: spot-async eval --resume {path}")
    if directory.is_in_use():
        raise DataError(f"{path} is in use: wait for the end of its run, or stop it first")
    before = load_config(path / "config.yaml", ())
    config = load_config(path / "config.yaml", overrides)
    check_same_numbers(before, config)
    checkpoint = manifest.newest(path)
    if checkpoint.manifest.keys != digest_of_keys(config):
        raise ConfigError(f"{path / 'config.yaml'}: was changed since the run began, in a key that decides numbers")
    config = with_downloads(config, say, weights=weights)
    plan = plan_training(config, starts=bool(weights))
    check_same_prompts(checkpoint.manifest.data, plan)
    step, iterations = checkpoint.manifest.step, plan.schedule.iterations
    # One that was stopped during its last evaluations has no summary yet.
    if step > iterations or (step == iterations and directory.has_summary):
        raise DataError(
            f"{path}: all {iterations} iterations are trained: nothing is left to do; to train further give "
            "training.iterations=N"
        )
    if say is not None and (words := _seam(path, before, config, plan, step)):
        say(words)
    return ResumedRun(config, plan, directory, checkpoint)


def _seam(path: Path, before: Config, config: Config, plan: TrainPlan, step: int) -> str:
    """Return what another number of iterations changes where the run continues; empty if the last part planned it so.

    Policies of ours do not go by progress.
    """
    try:
        last = TrainerSettings.load(str(path / "trainer.json"))
        training, iterations = last.training, last.iterations
    except (OSError, ValueError):  # lost or damaged
        training = before.training
        epochs = (training.epochs or 1) * (plan.schedule.per_epoch // training.batch_size)
        iterations = training.iterations or epochs
    now = plan.schedule.iterations
    progress = "" if is_ours(plan.policy) else progress_words(iterations, now, step)
    return "; ".join(filter(None, [seam_words(training, iterations, config.training, now, step), progress]))


@dataclass(frozen=True)
class Beginning:
    """Where a part of a run begins: the first where the command does, each other one where a trainer was lost."""

    manifest: Manifest
    checkpoint: Checkpoint | None = None  # None: it begins with the initial weights
    resumption: Resumption = field(default_factory=Resumption)


class Beginnings:
    """Finds where each part of a run begins, and makes its directory what it was there."""

    def __init__(
        self, config: Config, plan: TrainPlan, directory: RunDirectory, ledger: Ledger, evaluations: RunEvaluations
    ) -> None:
        self._config = config
        self._plan = plan
        self._directory = directory
        self._ledger = ledger
        self._evaluations = evaluations
        self._state = state_of(plan.policy)  # as it begins

    async def first(self, checkpoint: Checkpoint | None, say: Callable[[str], None]) -> Beginning:
        """Return where the first part begins: with the initial weights, or with a checkpoint of an earlier command."""
        keys, data = digest_of_keys(self._config), await in_thread(digest_of_prompts, self._plan)
        begun = manifest.beginning(checkpoint, keys=keys, data=data)
        if checkpoint is None:
            return Beginning(begun)
        with suppress(OSError, ValueError):  # trainer.json is lost or damaged
            earlier = TrainerSettings.load(str(self._directory.path / "trainer.json"))
            remove_abandoned(earlier.weights_directory.parent)  # a killed process may have left some elsewhere
        beginning = self._go_back(begun, checkpoint)
        if begun.step < self._plan.schedule.iterations:
            run = self._directory.path
            put_aside(run, evaluation_files(run, "after"))  # room for another: the run continues behind its earlier end
        published = self._directory.weights.published
        if not numbered(published, "step", begun.step).exists():
            say(f"the weights of iteration {begun.step} are published again, from its checkpoint, to {published}")
        structlog.get_logger().info(RESUMED, step=begun.step, lineage=begun.lineage)
        return beginning

    async def after(self, loss: TrainerLostError, last: Beginning) -> Beginning:
        """Return where a run would be resumed, for another part with another trainer."""
        run = self._directory.path
        try:
            checkpoint = await in_thread(manifest.newest, run) if manifest.committed(run) else None
        except DataError as damaged:
            raise TrainerLostError(f"{loss}; {damaged}") from None
        step = 0 if checkpoint is None else checkpoint.manifest.step
        begun = msgspec.structs.replace(last.manifest, step=step, lineages=(*last.manifest.lineages, step))
        beginning = self._go_back(begun, checkpoint)
        structlog.get_logger().warning(RESTARTED, reason=str(loss), step=step, lineage=begun.lineage)
        return beginning

    def _go_back(self, begun: Manifest, checkpoint: Checkpoint | None) -> Beginning:
        settings = orchestrator_settings(self._config, self._plan)
        resumption = go_back(self._directory, begun, self._ledger, settings)
        self._evaluations.go_back()
        if (state := self._state) is not None:
            if checkpoint is not None:
                with reading(path := checkpoint.directory / POLICY_FILE):
                    state = path.read_bytes()
            called(self._plan.policy, "load_state_dict", json.loads(state))
        return Beginning(begun, checkpoint, resumption)
