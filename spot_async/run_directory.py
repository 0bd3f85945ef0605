"""Where a run writes, and in which form. Everything in it is complete up to the last finished iteration.

config.yaml              the resolved configuration; `train` reads it back
metrics.jsonl            one line per iteration
samples.jsonl            one line per trained trajectory: what the policy saw
dead_letters.jsonl       prompts given up for good, with the reason
evaluation-*.jsonl       every judged response, before and after
summary.json             figures of the table
weights/step-000012/     published students; `student` points to the newest
logs/                    the run's own events, and one log per child process
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from spot_async.config import Config
from spot_async.config_loading import dump_yaml
from spot_async.errors import ConfigError, StorageError


class RunDirectory:
    """Made by `create`; append-only but for the `student` link."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def choose_path(cls, config: Config, config_name: str) -> Path:
        """The configured directory, or a new one named after the configuration and the time."""
        if config.run.directory is not None:
            return Path(config.run.directory)
        return Path("runs") / config_name / time.strftime("%Y%m%d-%H%M%S")

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """Raises ConfigError when it exists with something in it, or cannot be made."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise ConfigError(f"run.directory: {path} is not empty; give another or leave the key out")
            (path / "logs").mkdir()
            (path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run.directory: cannot use {path}: {error.strerror}") from None
        return cls(path.resolve())

    def append(self, name: str, rows: list[Any]) -> None:
        """Append rows to a JSONL file: all of them, or on a full disk none (StorageError)."""
        encoder = msgspec.json.Encoder()
        data = b"".join(encoder.encode(row) + b"\n" for row in rows)
        path = self.path / name
        try:
            with path.open("ab", buffering=0) as file:
                size = file.tell()
                try:
                    if file.write(data) < len(data):  # what a nearly full disk still takes
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from None

    def write_summary(self, summary: dict[str, Any]) -> None:
        path, new = self.path / "summary.json", self.path / ".summary.json.new"
        try:
            new.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
            new.replace(path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from None

    def point_student_to(self, directory: Path) -> None:
        """Let `student` name the newest published weights; the switch is atomic."""
        new = self.path / ".student.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(os.path.relpath(directory, self.path))
            new.replace(self.path / "student")
        except OSError as error:
            raise StorageError(f"cannot write {self.path / 'student'}: {error.strerror}") from None
