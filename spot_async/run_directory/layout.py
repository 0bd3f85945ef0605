"""Where a run writes, and in which form. Everything in it is complete up to the last finished iteration.

run.json                 format of this directory, and what wrote it
.lock                    held by the run or evaluation that writes here, with its process id
config.yaml              the resolved configuration; `train` reads it back
metrics.jsonl            one line per iteration
samples.jsonl            one line per trained trajectory: what the policy saw
trace.json               when what ran, for ui.perfetto.dev
spending.jsonl           what endpoints with prices were asked and paid, so far
stall-report.txt         what the run waits for, of one that stalled or was asked
dead_letters.jsonl       prompts given up for good, with the reason
evaluation-*.jsonl       every judged response: before, after, and of each evaluation in between (000020); of one that
                         was stopped the ones there are, as evaluation-*.jsonl.partial
evaluation-*.json        the figures that follow from them
summary.json             figures of the table
weights/step-000012/     published students; `student` points to the newest
weights/best-000010/     the best of those evaluated; `best` points to it
logs/                    the run's own events, and one log per child process
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from spot_async.base.processes.cores import usable_cores
from spot_async.base.text import visible
from spot_async.config import Config
from spot_async.config.loading import dump_yaml
from spot_async.errors import ConfigError, DataError, StorageError
from spot_async.models.weight_files import complete_directory, delete_weights

DECIMALS = 6  # of numbers in arrays: what people read
RUN_FORMAT = 1  # of a run directory; raised when its files can no longer be read as before

# What a training run leaves before anything came of it. What paid endpoints were asked (spending.jsonl) is a result.
OF_A_START = {"run.json", "config.yaml", ".lock", "logs", "trainer.json", "weights", "trace.json", "stall-report.txt",
              "dead_letters.jsonl", "tensorboard", "wandb"}  # fmt: skip

# Events of the run's log that say, with a `reason`, why it does not come to its end.
ENDS_EARLY, STALLED = "ends early", "stalled"

CONFIGS = "configs"
TIME_NAME = re.compile(r"\d{8}-\d{6}")  # of `TIME_FORMAT`
TIME_FORMAT = "%Y%m%d-%H%M%S"

Purpose = Literal["train", "eval"]


def name_of(config: Path) -> str:
    """What a configuration's runs are called: its file's name, below a directory `configs` with the folders between.

    Recipes of several tables are called alike: `configs/paper/table2/full.yaml` is `paper-table2-full`. The resolved
    configuration in a run directory keeps the name of its run.
    """
    if config.name == "config.yaml" and (config.parent / "run.json").exists():
        return name_of_run(config.parent)
    parts = (*config.parent.resolve().parts, config.stem)
    below = [number for number, part in enumerate(parts[:-1], start=1) if part == CONFIGS]
    return "-".join(parts[below[-1] :]) if below else parts[-1]


def name_of_run(directory: Path) -> str:
    """What the configuration of a run was called: `my` of `runs/my/<time>`, else the directory's own name."""
    path = directory.resolve()
    return path.parent.name if TIME_NAME.fullmatch(path.name) else path.name


class _RunFile(msgspec.Struct):
    """Contents of `run.json`."""

    format: int
    spot_async: str = msgspec.field(default_factory=lambda: importlib.metadata.version("spot-async"))
    command: Purpose | None = None  # whose directory it is; None of one that does not say
    cores: int | None = None  # that the command could use, which the report's advice depends on


def refuse_newer(path: Path) -> None:
    """For what reads a single file of a run. Raises DataError where `run.json` beside it names a newer format.

    A file without one is read: people copy figures elsewhere.
    """
    if (path / "run.json").exists():
        RunDirectory.open(path)


class RunDirectory:
    """Made by `create`, or found by `open`; append-only but for the links `student` and `best`."""

    def __init__(self, path: Path, purpose: Purpose | None = None, cores: int | None = None) -> None:
        self.path = path
        self.purpose = purpose
        self.cores = cores

    @classmethod
    def choose_path(cls, config: Config, config_name: str) -> Path:
        """The configured directory, or a new one named after the configuration and the time."""
        if config.run.directory is not None:
            return Path(config.run.directory)
        return Path("runs") / config_name / time.strftime(TIME_FORMAT)

    @classmethod
    def create(cls, path: Path, config: Config, purpose: Purpose = "train") -> RunDirectory:
        """Raises ConfigError when it exists with something in it, or cannot be made."""
        cores = usable_cores()
        with _to_be_used(path):
            cls.check_unused(path, purpose)
            (path / "logs").mkdir(parents=True)  # of two starts at once, one makes it; the other is refused
            (path / "run.json").write_bytes(_json(_RunFile(RUN_FORMAT, command=purpose, cores=cores)))
            (path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        return cls(path.resolve(), purpose, cores)

    @classmethod
    def check_usable(cls, path: Path, purpose: Purpose = "train") -> None:
        """Raises ConfigError when `create` would. Leaves nothing behind."""
        with _to_be_used(path):
            cls.check_unused(path, purpose)
            missing = [each for each in (path, *path.parents) if not each.exists()]
            try:
                path.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryDirectory(dir=path).cleanup()
            finally:
                for each in missing:  # the innermost first
                    with contextlib.suppress(OSError):
                        each.rmdir()

    @classmethod
    def check_unused(cls, path: Path, purpose: Purpose = "train") -> None:
        """Raises ConfigError when there is something in it already, with what can be done about it."""
        if not path.is_dir() or not any(path.iterdir()):
            return
        advice = ""
        with contextlib.suppress(DataError):  # no run's, or a newer program's
            earlier = cls.open(path)
            if earlier.is_in_use():
                raise ConfigError(
                    f"run.directory: {path} is in use by {earlier._last_user() or 'another process'}; give another, or "
                    "null for a new one"
                )
            if earlier.purpose == purpose == "eval":
                advice = f"go on with the evaluation in it by --resume {path}, "
            elif earlier.purpose == "train" and earlier._came_to_nothing():
                advice = f"nothing was trained in it: delete it if {earlier._last_user() or 'that run'} is over, "
            elif earlier.purpose == purpose == "train":
                advice = "it holds a run, and runs cannot be resumed: "
        raise ConfigError(f"run.directory: {path} is not empty; {advice}give another, or null for a new one")

    def _came_to_nothing(self) -> bool:
        """Whether a training run trained, evaluated and sampled nothing, so far: it may still go on."""
        weights = self.path / "weights"
        return {each.name for each in self.path.iterdir()} <= OF_A_START and not (
            weights.is_dir() and any(weights.iterdir())
        )

    def is_there(self) -> bool:
        """Whether it still is: nobody moved or removed it."""
        return self.path.is_dir()

    def is_in_use(self) -> bool:
        """Whether a living process writes here. False proves nothing: a start on another machine may see it free."""
        try:
            with (self.path / ".lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _last_user(self) -> str:
        """The process that has the lock, or had it last; empty where nobody can say."""
        try:
            return (self.path / ".lock").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """A run that was made before. Raises DataError when it is none, or newer than this program."""
        try:
            found = msgspec.json.decode((path / "run.json").read_bytes(), type=_RunFile)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            raise DataError(f"{path} is no run directory: it has no readable run.json") from None
        if found.format > RUN_FORMAT:
            raise DataError(
                f"{path} has format {found.format}, newer than this spot-async can read ({RUN_FORMAT}): install a "
                "newer one"
            )
        return cls(path.resolve(), found.command, found.cores)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes here while inside; the kernel ends that with the process, however it dies.

        Raises DataError with the process that has it, StorageError where the file system has no locks.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context((self.path / ".lock").open("a+", encoding="utf-8"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}\n")
                file.flush()
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise DataError(f"{self.path} is in use by {holder}: wait for its end, or stop it first") from None
            except OSError as error:
                raise StorageError(f"cannot lock {self.path / '.lock'}: {error.strerror}") from None
            yield

    def append(self, name: str, rows: list[Any]) -> None:
        """Append rows to a JSONL file: all of them, or on a full disk none (StorageError)."""
        encoder = msgspec.json.Encoder(enc_hook=_plain)
        data = b"".join(encoder.encode(row) + b"\n" for row in rows)
        path = self.path / name
        try:
            with path.open("ab", buffering=0) as file:
                append_whole(file, data)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from None

    def write_summary(self, summary: dict[str, Any]) -> None:
        path, new = self.path / "summary.json", self.path / ".summary.json.new"
        try:
            new.write_bytes(_json(summary))
            new.replace(path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from None

    def weights_after(self, iteration: int) -> Path:
        """Where the trainer publishes the student of an iteration."""
        return self.path / "weights" / f"step-{iteration:06d}"

    def point_student_to(self, directory: Path) -> None:
        """Let `student` name the newest published weights; the switch is atomic."""
        self._point("student", directory)

    def keep_best(self, weights: Path) -> None:
        """Let `best` name a copy of published weights that the trainer does not prune.

        The trainer owns the `step-*` directories; the copy has a name of its own beside them and costs no space
        while the original is there, since its files are hard links. The copy before it goes.
        """
        kept = weights.with_name(weights.name.replace("step-", "best-"))
        if not kept.exists():
            try:
                with complete_directory(kept) as partial:
                    shutil.copytree(weights, partial, copy_function=_link_or_copy, dirs_exist_ok=True)
            except OSError as error:
                raise StorageError(f"cannot keep {weights} as {kept}: {error.strerror or error}") from None
        self._point("best", kept)
        for each in weights.parent.glob("best-*"):
            if each != kept:
                delete_weights(each)

    def _point(self, name: str, directory: Path) -> None:
        new = self.path / f".{name}.new"
        try:
            new.unlink(missing_ok=True)
            new.symlink_to(os.path.relpath(directory, self.path))
            new.replace(self.path / name)
        except OSError as error:
            raise StorageError(f"cannot write {self.path / name}: {error.strerror}") from None


@contextlib.contextmanager
def _to_be_used(path: Path) -> Iterator[None]:
    """What the system refuses inside is said of the setting. A path with a zero byte is a ValueError to Python."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"run.directory: cannot use {visible(str(path))}: {reason}") from None


def append_whole(file: FileIO, data: bytes) -> None:
    """Write all of it at the file's end, or nothing of it: then raises OSError with the system's reason."""
    end, rest = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while rest:  # a nearly full disk takes a part, and says why once it is offered the rest
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # half of it at the end is a blemish; the reason is what counts
            file.truncate(end)
        raise


def _link_or_copy(source: str, destination: str) -> None:
    """A hard link, or a copy where the file system has none."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _plain(value: object) -> object:
    """Arrays as lists of numbers."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float64).round(DECIMALS).tolist() if value.dtype.kind == "f" else value.tolist()
    raise NotImplementedError(f"no JSON form for {type(value).__name__}")
