"""Knows where a run keeps its students, and moves the links `student` and `best`."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from spot_async.base.files import all_numbered, numbered, writing
from spot_async.errors import StorageError
from spot_async.models.weight_files import (
    complete_directory,
    delete_weights,
    flush_directory,
    has_weights,
    in_use,
)


class RunWeights:
    """The published weights of the run in a directory. The trainer writes and prunes them.

    Where it publishes to a directory that ends with the run (`training.weights_directory`), `weights/` has copies of
    what must outlive the run: the student of the newest checkpoint, and the best one.
    """

    def __init__(self, run: Path, published: Path | None = None) -> None:
        """`published` is where the trainer publishes; default: `weights/`."""
        self._run = run
        self._kept = run / "weights"
        self.published = published or self._kept

    @property
    def are_kept(self) -> bool:
        """Whether what the trainer publishes outlives the run."""
        return self.published == self._kept

    def after(self, iteration: int, teacher: str | None = None) -> Path:
        """Return where the student of an iteration is: the copy that is kept, or where the trainer publishes it.

        `teacher` is the role of one that follows the student, and has weights of its own.
        """
        if teacher is not None:
            return numbered(self.published / teacher, "step", iteration)
        kept = numbered(self._kept, "step", iteration)
        return kept if kept.exists() else numbered(self.published, "step", iteration)

    def best_after(self, iteration: int) -> Path:
        """Return where `keep_best` keeps the student of an iteration."""
        return numbered(self._kept, "best", iteration)

    def forget_after(self, iteration: int) -> None:
        """Delete what the trainer published of later iterations, unless it outlives the run.

        What teachers had is deleted always: the trainer publishes it again.
        """
        teachers = [each for each in self.published.glob("teacher*") if each.is_dir()]
        for directory in teachers if self.are_kept else [self.published, *teachers]:
            for each in all_numbered(directory, "step", above=iteration):
                shutil.rmtree(each, ignore_errors=True)

    def keep(self, iteration: int) -> None:
        """Let the published weights of a checkpoint outlive the run and a power cut, and `student` point to them.

        Raises StorageError.
        """
        weights = self.after(iteration)
        if self.are_kept:
            self.flush()
        else:
            weights = self._copy(weights, numbered(self._kept, "step", iteration))
        self._advance(weights)
        if not self.are_kept:
            for each in all_numbered(self._kept, "step"):
                if each != weights:
                    delete_weights(each)

    def flush(self) -> None:
        """Return once all weights in `weights/` would outlive a power cut. Raises StorageError."""
        with writing(self._kept):
            for each in all_numbered(self._kept, "step"):
                with contextlib.suppress(FileNotFoundError):  # the trainer deletes it meanwhile
                    flush_directory(each)

    def advance_student_to(self, directory: Path) -> None:
        """Let the link `student` point to published weights, if they are whole, newer than those, and outlive the run.

        With LoRA most iterations may publish the adapter alone.
        """
        if self.are_kept:
            self._advance(directory)

    def copy_best(self, weights: Path) -> Path:
        """Return a copy of published weights under a name of its own, which outlives a power cut. Raises StorageError.

        The trainer owns the `step-*` directories and deletes old ones. A copy costs no space while the original is
        there, since its files are hard links, unless that is elsewhere.
        """
        return self._copy(weights, self._kept / weights.name.replace("step-", "best-"))

    def keep_best(self, weights: Path) -> None:
        """Let the link `best` point to a copy of published weights, and delete the copy before."""
        kept = self.copy_best(weights)
        self._point("best", kept)
        for each in all_numbered(self._kept, "best"):
            if each != kept:
                delete_weights(each)

    def _advance(self, directory: Path) -> None:
        link = self._run / "student"
        if has_weights(directory) and not (link.exists() and link.resolve().name > directory.name):
            self._point("student", directory)

    def _copy(self, weights: Path, kept: Path) -> Path:
        try:
            if not kept.exists():
                kept.parent.mkdir(exist_ok=True)
                with in_use(weights), complete_directory(kept) as partial:
                    shutil.copytree(weights, partial, copy_function=_link_or_copy, dirs_exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot keep {weights} as {kept}: {error.strerror or error}") from None
        return kept

    def _point(self, name: str, directory: Path) -> None:
        new = self._run / f".{name}.new"
        with writing(self._run / name):
            new.unlink(missing_ok=True)
            new.symlink_to(os.path.relpath(directory, self._run))
            new.replace(self._run / name)


def _link_or_copy(source: str, destination: str) -> None:
    """Make a hard link, or a copy if the file system has no links."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
