"""Knows where a run keeps its students, and moves the links `student` and `best`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from spot_async.base.numbered import all_numbered, numbered
from spot_async.errors import StorageError
from spot_async.models.weight_files import complete_directory, delete_weights, has_weights


class RunWeights:
    """The published weights of the run in a directory. The trainer writes and prunes them."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def after(self, iteration: int) -> Path:
        """Return where the trainer publishes the student of an iteration."""
        return numbered(self._run / "weights", "step", iteration)

    def best_after(self, iteration: int) -> Path:
        """Return where `keep_best` keeps the student of an iteration."""
        return numbered(self._run / "weights", "best", iteration)

    def point_student_to(self, directory: Path) -> None:
        """Let the link `student` point to the newest published weights. The switch is atomic."""
        self._point("student", directory)

    def advance_student_to(self, directory: Path) -> None:
        """Let the link `student` point to published weights, if they are whole and newer than those it points to.

        With LoRA most iterations may publish the adapter alone.
        """
        link = self._run / "student"
        if has_weights(directory) and not (link.exists() and link.resolve().name > directory.name):
            self.point_student_to(directory)

    def keep_best(self, weights: Path) -> None:
        """Let the link `best` point to a copy of published weights, and delete the copy before.

        The trainer owns the `step-*` directories and deletes old ones, so the copy has a name of its own. It costs no
        space while the original is there, since its files are hard links.
        """
        kept = weights.with_name(weights.name.replace("step-", "best-"))
        if not kept.exists():
            try:
                with complete_directory(kept) as partial:
                    shutil.copytree(weights, partial, copy_function=_link_or_copy, dirs_exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot keep {weights} as {kept}: {error.strerror or error}") from None
        self._point("best", kept)
        for each in all_numbered(weights.parent, "best"):
            if each != kept:
                delete_weights(each)

    def _point(self, name: str, directory: Path) -> None:
        new = self._run / f".{name}.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(os.path.relpath(directory, self._run))
            new.replace(self._run / name)
        except OSError as error:
            raise StorageError(f"cannot write {self._run / name}: {error.strerror}") from None


def _link_or_copy(source: str, destination: str) -> None:
    """Make a hard link, or a copy if the file system has no links."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
