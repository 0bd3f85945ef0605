"""Offers spot-async as a library: whole runs from a program, and stages for supervising prompts by oneself.

Nothing is printed unless asked for, and what goes wrong is raised as one of `spot_async.errors`.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from spot_async.base.tasks import in_thread, root_cause
from spot_async.checks.machine import check_room
from spot_async.checks.plan import TrainPlan, plan_training
from spot_async.config import Config
from spot_async.config.loading import config_from, load_config
from spot_async.errors import ConfigError, SpotError
from spot_async.models.hub import with_downloads
from spot_async.run_directory.layout import RunDirectory, name_of
from spot_async.run_directory.manifest import Checkpoint
from spot_async.running import training as runtime
from spot_async.running.rehearsal import rehearse
from spot_async.running.resuming import open_run
from spot_async.running.summary import TrainOutcome
from spot_async.telemetry.screen import Screen, show_nearest_characters

_one_run = threading.Lock()

ConfigSource = Config | Mapping[str, Any] | str | os.PathLike[str]


def run(config: ConfigSource, overrides: Sequence[str] = (), *, progress: bool = False) -> TrainOutcome:
    """Train as `spot-async train` does, and return what it came to.

    `config` is the path of a YAML file, the same tree as a mapping, or a `Config`; `overrides` are
    `section.key=value` strings. With `progress` the console's display is shown.

    Raise a `SpotError`: `ConfigError` and `DataError` before anything was started, others from the run.
    Ctrl-C stops the run in order and raises KeyboardInterrupt. Inside a running event loop use `run_async`.
    """
    return _in_new_loop("run_async", lambda: run_async(config, overrides, progress=progress))


def resume(directory: str | os.PathLike[str], overrides: Sequence[str] = (), *, progress: bool = False) -> TrainOutcome:
    """Go on with a run that ended early, as `spot-async train --resume` does, and return what it came to.

    `directory` is the run's. `overrides` may change what decides no number. Otherwise it is as `run`.
    """
    return _in_new_loop("resume_async", lambda: resume_async(directory, overrides, progress=progress))


async def run_async(config: ConfigSource, overrides: Sequence[str] = (), *, progress: bool = False) -> TrainOutcome:
    """Train as `run` does, in a program that has an event loop. Cancelling it stops the run and all of its processes.

    One run at a time: a second one in the same process is refused (`SpotError`), since log files belong to the process.
    """
    with _alone():
        return await _run(config, overrides, progress)


async def resume_async(
    directory: str | os.PathLike[str], overrides: Sequence[str] = (), *, progress: bool = False
) -> TrainOutcome:
    """Go on as `resume` does, in a program that has an event loop. Cancelling it stops the run and all processes."""
    with _alone():
        _check_overrides(overrides)
        found = await asyncio.to_thread(open_run, Path(directory), overrides, print if progress else None)
        await asyncio.to_thread(_check, found.directory.path, found.config, found.plan, print if progress else None)
        return await _train(found.config, found.plan, found.directory, found.checkpoint, progress=progress)


def _in_new_loop(otherwise: str, start: Callable[[], Coroutine[Any, Any, TrainOutcome]]) -> TrainOutcome:
    """Return the outcome of a run in an event loop of its own. Inside one, `otherwise` is what to await."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start())
    raise SpotError(f"an event loop is running here (a notebook?): use `await spot_async.{otherwise}(...)`")


@contextmanager
def _alone() -> Iterator[None]:
    if not _one_run.acquire(blocking=False):
        raise SpotError("a run is under way in this process: start another after it, or in a process of its own")
    try:
        yield
    finally:
        _one_run.release()


async def _run(config: ConfigSource, overrides: Sequence[str], progress: bool) -> TrainOutcome:
    settings, name = await asyncio.to_thread(_resolve, config, overrides)  # imports plug-ins
    settings = await asyncio.to_thread(with_downloads, settings, print if progress else None)
    plan = await asyncio.to_thread(plan_training, settings)  # reads models and problems
    path = RunDirectory.choose_path(settings, name)
    await asyncio.to_thread(_check, path, settings, plan, print if progress else None)
    directory = await in_thread(RunDirectory.create, path, settings)
    return await _train(settings, plan, directory, progress=progress)


def _check(path: Path, config: Config, plan: TrainPlan, say: Callable[[str], None] | None) -> None:
    check_room(path, config, plan)
    for line in rehearse(config, plan):
        if say is not None:
            say(line)


async def _train(
    config: Config, plan: TrainPlan, directory: RunDirectory, checkpoint: Checkpoint | None = None, *, progress: bool
) -> TrainOutcome:
    if (config.cluster.nodes or 1) > 1:
        raise ConfigError(f"cluster.nodes={config.cluster.nodes}: only the command spot-async train spans machines")
    if progress:
        show_nearest_characters()
    console = Screen() if progress else Console(quiet=True, force_terminal=False)
    try:
        return await runtime.train(config, plan, directory, console, runtime.Start(checkpoint=checkpoint))
    except ExceptionGroup as failures:
        raise root_cause(failures) from failures


def _resolve(source: ConfigSource, overrides: Sequence[str]) -> tuple[Config, str]:
    """Return the configuration, and a name for its run directory."""
    _check_overrides(overrides)
    match source:
        case Config():
            config = config_from(source.model_dump(mode="json"), overrides) if overrides else source
        case Mapping():
            config = config_from(source, overrides)
        case _:
            return load_config(Path(source), overrides), name_of(Path(source))
    return config, config.policy.kind.rpartition(":")[2]


def _check_overrides(overrides: Sequence[str]) -> None:
    match overrides:
        case str():  # its letters would be taken for overrides
            meant = [overrides]
        case Mapping():
            meant = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
        case list() | tuple() if all(isinstance(each, str) for each in overrides):
            return
        case _:
            meant = ["section.key=value"]
    raise ConfigError(f"overrides is a list of strings: give {meant} in place of {overrides!r}")
