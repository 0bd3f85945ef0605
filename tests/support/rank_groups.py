"""Trains runs on ranks of real processes: one group after another, each of forks that have imported everything once.

A rank trains the runs of its group. The second of two nodes has another disk, and torch counts it first.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - the student's
from transformers.utils.logging import disable_progress_bar

from spot_async.base import wire
from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import process_group, rank_place, strategy_of, this_rank
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.settings import ResumePoint, TrainerSettings

SAVED_AT = 2  # the step at which runs are resumed


class Job(msgspec.Struct):
    """A run, which trains until a step. It checkpoints to `tensors` at another one; `is_full` is the disk of rank 1."""

    run: str
    until: int
    saves_at: int | None = None
    is_full: bool = False


class Group(msgspec.Struct):
    ranks: int
    jobs: Sequence[Job]
    nodes: int = 1


def job(
    settings: TrainerSettings, *, until: int, saves_at: int | None = None, resumes: str = "", is_full: bool = False
) -> Job:
    """Write the settings of a run for its ranks. It may go on from the checkpoint of a run beside it."""
    run = Path(settings.run_directory)
    if resumes:
        point = ResumePoint(directory=str(run.parent / resumes / "tensors"), step=SAVED_AT)
        settings = settings.model_copy(update={"resume": point})
    settings.save()
    return Job(str(run), until, saves_at, is_full)


def save(trainer: StudentTrainer, directory: Path) -> str:
    """Write a checkpoint, and wait until it is there. Return why it failed; empty if it did not."""
    failures: list[str] = []
    trainer.begin_to_save(directory, lambda seconds, failure: failures.append(failure))
    trainer._saver.wait()
    return failures[0]


def train_in_groups(directory: Path, batches: Sequence[Batch], groups: Sequence[Group]) -> None:
    """Train all of them, on these batches. What is relative is below the directory."""
    (directory / "plan").write_bytes(wire.encode(groups))
    for batch in batches:
        (directory / f"batch-{batch.iteration}").write_bytes(wire.encode(batch))
    subprocess.run([sys.executable, __file__], check=True, timeout=300, cwd=directory)


def _train(job: Job) -> None:
    run, place, said = Path(job.run), rank_place(), []
    settings = TrainerSettings.load(str(run / "trainer.json"))
    checkpoint = run / "tensors"
    if place.rank * place.nodes >= place.ranks:  # on the second node
        checkpoint = Path("no such directory")
        if settings.resume is not None:
            nowhere = settings.resume.model_copy(update={"directory": str(checkpoint)})
            settings = settings.model_copy(update={"resume": nowhere})
    trainer = StudentTrainer(settings, strategy_of(settings.training), torch.device("cpu"))
    for iteration in range(trainer.step, job.until):
        batch = wire.decode(Path(f"batch-{iteration}").read_bytes(), Batch)
        said.append(trainer.train(batch).metrics)
        if iteration + 1 == job.saves_at:
            _save(trainer, checkpoint, job)
    trainer._saver.wait()
    if this_rank() == 0:
        (run / "metrics.json").write_text(json.dumps(said))


def _save(trainer: StudentTrainer, checkpoint: Path, job: Job) -> None:
    """The next iteration is trained while this is written, unless the disk is full."""
    if not job.is_full:
        trainer.begin_to_save(checkpoint, lambda seconds, failure: None)
        return
    if this_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    failure = save(trainer, checkpoint)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (Path(job.run) / f"error-{this_rank()}").write_text(failure)


def _fork(group: Group, channel: Path) -> None:
    channel.mkdir()
    settings = [TrainerSettings.load(f"{each.run}/trainer.json") for each in group.jobs]
    sharding = "fsdp2" if any(each.training.sharding == "fsdp2" for each in settings) else "none"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pids = []
    for rank in range(group.ranks):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(group.ranks))
            if group.nodes > 1:
                os.environ.update(SPOT_ASYNC_NODES=str(group.nodes), SPOT_ASYNC_STORE_PORT=str(port))
            try:
                with process_group(str(channel), torch.device("cpu"), sharding):
                    for each in group.jobs:
                        _train(each)
                os._exit(0)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        pids.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    if any(ends):
        sys.exit(f"{channel.name} failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    gc.freeze()
    for number, group in enumerate(wire.decode(Path("plan").read_bytes(), list[Group])):
        _fork(group, Path(f"group-{number}").absolute())
