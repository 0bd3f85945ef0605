"""Writes new weights to disk, as a Hugging Face directory that has its name only once it is complete.

With LoRA a directory may have the adapter alone, which is all that its servers read. Weights may be written in a
thread, while the next step computes its gradients.

Which weights belong to a resumable state is not decided here. Those are flushed to disk when they do, and others never.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from spot_async.base.files import all_numbered, numbered
from spot_async.base.writers import refuse_foreign_writers
from spot_async.config import LoraConfig
from spot_async.errors import DataError, TrainerError
from spot_async.models.adapter_files import check_adapter
from spot_async.models.small_files import CONFIG_FILE, publish_small_files, read_json
from spot_async.models.weight_files import (
    ADAPTER,
    INDEX_FILE,
    complete_directory,
    delete_weights,
    has_weights,
    weight_file_marks,
)
from spot_async.trainer.loading import has_just
from spot_async.trainer.lora import layer_shapes, whole_adapters, write_adapter
from spot_async.trainer.parallel import idle_group, wait_for_all
from spot_async.trainer.streaming import WeightStream
from spot_async.types import WeightFile

# Called on the rank that writes: the files, and why they could not be written, or "".
Published = Callable[[tuple[WeightFile, ...], str], None]


@dataclass(eq=False)
class WeightWriter:
    """Writes `weights/step-NNNNNN` directories and keeps the newest few. One of the ranks writes."""

    directory: Path
    _: KW_ONLY
    student_directory: Path
    end_token_ids: tuple[int, ...]
    dtype: torch.dtype  # what most weights are published in
    types: Mapping[str, torch.dtype]  # `published_types`
    keep: int
    lora: LoraConfig | None = None
    writes: bool
    written: Callable[[Tensor], Tensor] = lambda live: live  # in place of a live tensor: a teacher's copy of it

    def __post_init__(self) -> None:
        # Ranks that do not write wait here: a disk may take longer than a rank may wait while training.
        self._group = idle_group()
        self._is_writing = False  # beside training, on this rank or another
        self._thread: threading.Thread | None = None
        self._failure: TrainerError | None = None  # of the thread
        self.files: tuple[WeightFile, ...] = ()  # of the last weights that this rank published
        if self.writes:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()

    def path(self, step: int) -> Path:
        return numbered(self.directory, "step", step)

    def try_out(self, model: PreTrainedModel) -> None:
        """Write all but the weights of a student that is not trained yet, and delete it. All ranks must call it.

        What cannot be written would else be found out after the first iteration. Raises `TrainerError`.
        """
        adapters = whole_adapters(model)
        if not self.writes:
            return
        trial = self.directory / ".trial"
        if trial.exists():  # left by a process that was killed
            shutil.rmtree(trial)
        with self._describing_errors(self.directory):
            try:
                trial.mkdir()
                refuse_foreign_writers([trial])
                if not has_just(self.student_directory, model):  # as `WeightStream` lets transformers write it
                    copy.deepcopy(model.config).save_pretrained(trial)
                self._write(model, adapters, trial)
            finally:
                shutil.rmtree(trial, ignore_errors=True)

    def publish(self, model: PreTrainedModel, step: int, *, is_whole: bool = True) -> None:
        """Write `model`'s weights of `step`, or its adapter alone.

        All ranks must call it, since sharded weights are gathered for it. Raises `TrainerError` when writing fails
        (full disk, an adapter that is not whole). Older weights are then untouched, and nothing of the new ones is
        left.
        """
        adapters = whole_adapters(model, self.written)
        if is_whole:
            with WeightStream(model, adapters, self.student_directory, self.types, self.written) as weights:
                if self.writes:
                    self._publish(model, adapters, weights, step)
        elif self.writes:
            self._publish(model, adapters, None, step)

    def begin(
        self, model: PreTrainedModel, step: int, *, is_whole: bool, first: Callable[[], object], done: Published
    ) -> None:
        """Begin to publish in a thread. All ranks must call it, and each holds the whole student.

        `model` must not change until `wait` returns. The rank that writes calls `first` and then `done` in its thread.
        Raises `TrainerError` as `wait` does.
        """
        self.wait()
        self._is_writing = True
        if not self.writes:
            return
        # On the stream of training each copy would wait for all that the next step has queued.
        stream = None
        if next(model.parameters()).is_cuda:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())

        def publish() -> None:
            try:
                with torch.cuda.stream(stream):
                    first()
                    self.publish(model, step, is_whole=is_whole)
            except TrainerError as error:
                self._failure = error
            done(self.files, str(self._failure or ""))

        self._thread = threading.Thread(target=publish, name="publishing", daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Wait until what `begin` began is published; return for how many seconds. All ranks must call it.

        Raises `TrainerError` if it could not be, on the rank that writes. Others then wait until their process ends.
        """
        if not self._is_writing:
            return 0.0
        started = time.perf_counter()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        wait_for_all(self._group)
        self._is_writing = False
        return time.perf_counter() - started

    def complete(self, model: PreTrainedModel, step: int) -> None:
        """Write the whole weights of a published `step` beside its adapter, if they are not there.

        `model` still has the weights of that step. All ranks must call it. Raises `TrainerError`.
        """
        self.wait()
        with WeightStream(model, whole_adapters(model), self.student_directory, self.types) as weights:
            if self.writes and not has_weights(self.path(step)):
                with self._describing_errors(self.path(step)):
                    self._add(weights, self.path(step))

    def _publish(
        self, model: PreTrainedModel, adapters: dict[str, Tensor], weights: WeightStream | None, step: int
    ) -> None:
        final = self.path(step)
        with self._describing_errors(final), complete_directory(final, is_durable=False) as partial:
            if weights is not None:
                weights.write(partial)
            self._write(model, adapters, partial)
            self.files = weight_file_marks(partial)
        self._remove_leftovers()
        published = self._published()
        # The run's link `student` points to one of the last two whole ones until the next checkpoint counts.
        kept = {*published[-self.keep :], *[each for each in published if has_weights(each)][-2:]}
        for old in published:
            if old not in kept:
                delete_weights(old)  # those that a server is still loading stay, and are tried again next time

    def _add(self, weights: WeightStream, directory: Path) -> None:
        """Put whole weights into a published directory. A reader sees all of them or none."""
        partial = directory.with_name(f".{directory.name.replace('step', 'whole')}")
        partial.mkdir()
        try:
            weights.write(partial)
            for file in sorted(partial.glob("model*"), key=lambda file: file.name == INDEX_FILE):  # the index last
                _make_readable(file, like=directory)
                file.rename(directory / file.name)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _write(self, model: PreTrainedModel, adapters: dict[str, Tensor], directory: Path) -> None:
        """Write what is beside whole weights."""
        if self.lora is not None:
            # In a directory of its own: transformers would load one that lies beside model.safetensors on top of it.
            write_adapter(directory / ADAPTER, model, adapters, self.lora, str(self.student_directory.absolute()))
            check_adapter(directory / ADAPTER, layer_shapes(model), self.lora, name=f"of {directory.name[1:]}")
        publish_small_files(
            self.student_directory,
            directory,
            architecture=type(model).__name__,
            dtype=str(self.dtype).removeprefix("torch."),  # of the files, which may differ from that in training
            end_token_ids=self.end_token_ids,
        )
        if model.config.model_type != read_json(self.student_directory / CONFIG_FILE).get("model_type"):
            # The student is the language model of a larger one, which its config.json described.
            config = copy.deepcopy(model.config)
            config.architectures, config.dtype = [type(model).__name__], self.dtype
            config.save_pretrained(directory)
        for file in (each for each in directory.rglob("*") if each.is_file()):
            _make_readable(file, like=directory)

    def _remove_leftovers(self) -> None:
        """Delete what was half written, or half deleted, by a process that was killed or on a busy disk."""
        for leftover in [*all_numbered(self.directory, ".step"), *all_numbered(self.directory, ".whole")]:
            shutil.rmtree(leftover, ignore_errors=True)

    def _published(self) -> list[Path]:
        return all_numbered(self.directory, "step")

    @contextlib.contextmanager
    def _describing_errors(self, final: Path) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            raise TrainerError(f"cannot publish weights to {final}: {error}") from error
        # transformers refuses to write some settings. Its reason stands below its first line.
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
            done = self._published()
            saved = f"complete weights up to {done[-1]} are untouched" if done else "none were published before"
            raise TrainerError(f"cannot publish weights to {final}: {reason}; {saved}") from error


def _make_readable(file: Path, like: Path) -> None:
    """Give a file the rights of the directory's `config.json`: safetensors makes files that others cannot read."""
    file.chmod((like / "config.json").stat().st_mode)
