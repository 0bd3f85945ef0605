"""Creates, locks and writes a run directory. Its files are complete up to the last finished iteration.

run.json                 format of this directory, and what wrote it
.lock                    held by the run or evaluation that writes here, with its process id
config.yaml              the resolved configuration; `train` reads it back
metrics.jsonl            one line per iteration
samples.jsonl            one line per trained trajectory: what the policy saw
trace.json               when what ran, for ui.perfetto.dev
spending.jsonl           what was sent to endpoints with prices, and what that cost so far
stall-report.txt         what the run waits for; written when it stalls, or when a person asks
dead_letters.jsonl       prompts given up for good, with the reason
evaluation-*.jsonl       every judged response of an evaluation: before, after, and in between (000020)
evaluation-*.jsonl.partial  those of an evaluation that was stopped
evaluation-*.json        the figures that follow from them
summary.json             the figures of the table at the run's end
ledger.sqlite            what became of each prompt, so that the run can be resumed
checkpoints/step-000010/ what a resumed run continues from: the trainer's state, and manifest.json
rolled-back/             weights and evaluations of iterations that a resumed run made again
weights/step-000012/     published students; `student` points to the newest. With `training.weights_directory` those of
                         checkpoints alone
weights/best-000010/     the best student of those evaluated; `best` points to it
logs/                    the run's own events, and one log per child process

Names that are not the run's, such as `step-000010-good`, are someone's, and are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from spot_async.base.files import (
    as_json,
    check_format,
    decode_json,
    flush_to_disk,
    lines_of,
    numbered,
    open_regular,
    read_bounded,
    write_whole,
    writing,
)
from spot_async.base.processes.resources import usable_cores
from spot_async.base.text import visible
from spot_async.base.writers import refuse_foreign_writers
from spot_async.config import Config
from spot_async.config.loading import dump_yaml
from spot_async.errors import ConfigError, DataError, StorageError
from spot_async.run_directory.run_weights import RunWeights

DECIMALS = 6  # of numbers in arrays, which people read
MAX_HOLDER_BYTES = 1024  # of the line that names who has the lock
RUN_FORMAT = 4  # raised when a run of before can no longer be continued

# Files of a training run that has no results yet. spending.jsonl is not one: what was paid for counts as a result.
OF_A_START = {"run.json", "config.yaml", ".lock", "logs", "trainer.json", "weights", "trace.json", "stall-report.txt",
              "dead_letters.jsonl", "tensorboard", "wandb", "ledger.sqlite", "ledger.sqlite-wal"}  # fmt: skip

OF_ITERATIONS = ("metrics.jsonl", "samples.jsonl")
APPENDED = (*OF_ITERATIONS, "dead_letters.jsonl", "spending.jsonl")

# Events in the run's log whose `reason` says why the run did not come to its end, and the one after which it continues.
ENDS_EARLY, STALLED, RESUMED = "ends early", "stalled", "resumed"
ATTEMPTS_FAILED = "attempts failed"
RESTARTED = "trainer restarted"  # the run continued from a checkpoint by itself
MISMATCHED = "mismatch"  # trainer and student's server differ by more than rounding
NO_ADVICE = "no advice"  # the teacher does not point to right answers, or no longer does
NO_TURNS = "no turns"  # most responses called nothing, or ran out of turns
FELL = "entropy fell"  # of the student, within an iteration

CONFIGS = "configs"
SUMMARY = "summary.json"
TIME_NAME = re.compile(r"\d{8}-\d{6}")  # matches what `TIME_FORMAT` writes
TIME_FORMAT = "%Y%m%d-%H%M%S"

# Of an evaluation during training (its iteration), before it or after it.
EVALUATION = re.compile(r"evaluation-([0-9]{6}|[1-9][0-9]{6,}|before|after)(\.json|\.jsonl|\.jsonl\.partial)")

Purpose = Literal["train", "eval"]


def name_of(config: Path) -> str:
    """Return what a configuration's runs are called: the name of its file, or of its run for one in a run directory.

    Below a directory `configs` the folders in between are part of the name, since recipes of different tables have
    equal file names: `configs/paper/table2/full.yaml` is `paper-table2-full`.
    """
    if config.name == "config.yaml" and (config.parent / "run.json").exists():
        return name_of_run(config.parent)
    parts = (*config.parent.resolve().parts, config.stem)
    below = [number for number, part in enumerate(parts[:-1], start=1) if part == CONFIGS]
    return "-".join(parts[below[-1] :]) if below else parts[-1]


def name_of_run(directory: Path) -> str:
    """Return the name of a run's configuration: `my` for `runs/my/<time>`, else the directory's own name."""
    path = directory.resolve()
    return path.parent.name if TIME_NAME.fullmatch(path.name) else path.name


def evaluated(run: Path) -> list[str]:
    """Return the evaluations of which a run has files: `before`, `after`, or an iteration's six digits."""
    return sorted({path.name.removeprefix("evaluation-").partition(".")[0] for path in evaluation_files(run, "*")})


def evaluation_files(run: Path, when: str) -> list[Path]:
    """Return the files of an evaluation that are there. Copies with names of their own are none of them."""
    named = {path: EVALUATION.fullmatch(path.name) for path in run.glob(f"evaluation-{when}.*")}
    return sorted(path for path, found in named.items() if found is not None and path.is_file())


_version = functools.cache(importlib.metadata.version)  # it stays while a process lives
# What verdicts, weights and prompts depend on.
_SOFTWARE = ("math-verify", "latex2sympy2_extended", "sympy", "antlr4-python3-runtime", "torch", "transformers")


def software_versions() -> dict[str, str]:
    return {name: _version(name) for name in _SOFTWARE}


class _RunFile(msgspec.Struct):
    """Contents of `run.json`."""

    format: int
    spot_async: str = msgspec.field(default_factory=lambda: _version("spot-async"))
    command: Purpose | None = None  # that made the directory
    versions: dict[str, str] = msgspec.field(default_factory=software_versions)
    cores: int | None = None  # how many the command could use; the report's advice depends on it
    cpu: str | None = None  # that the trainer computed on last; None on GPUs


class _RowOfIteration(msgspec.Struct):
    iteration: int


class RunDirectory:
    """A run directory, made by `create` or found by `open`. Nothing in it is overwritten but links and the summary."""

    def __init__(
        self, path: Path, purpose: Purpose | None = None, cores: int | None = None, version: str | None = None
    ) -> None:
        self.path = path
        self.purpose = purpose
        self.cores = cores
        self.version = version  # of the program that made it
        self.weights = RunWeights(path)

    @classmethod
    def choose_path(cls, config: Config, config_name: str) -> Path:
        """Return the configured directory, or a new one named after the configuration and the time."""
        if config.run.directory is not None:
            return Path(config.run.directory)
        return Path("runs") / config_name / time.strftime(TIME_FORMAT)

    @classmethod
    def create(cls, path: Path, config: Config, purpose: Purpose = "train") -> RunDirectory:
        """Make a run directory. Raises ConfigError if it holds something already, or cannot be made."""
        cores = usable_cores()
        with _to_be_used(path):
            cls.check_unused(path, purpose)
            new = [each for each in (path, *path.parents) if not each.exists()]
            (path / "logs").mkdir(parents=True)  # fails for the second of two runs that start at once
            (path / "run.json").write_bytes(as_json(_RunFile(RUN_FORMAT, command=purpose, cores=cores)))
            (path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
            # What a run keeps later is of no use without these.
            for each in (path / "run.json", path / "config.yaml", path, *(made.parent for made in new)):
                flush_to_disk(each)
        return cls(path.resolve(), purpose, cores)

    @classmethod
    def check_usable(cls, path: Path, purpose: Purpose = "train") -> None:
        """Raise ConfigError if `create` would. Leaves nothing behind."""
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
        """Raise ConfigError if the directory holds something already; it says what can be done about that."""
        if not path.is_dir() or not any(path.iterdir()):
            return
        advice = ""
        with contextlib.suppress(DataError):  # it is no run's directory, or a newer program's
            earlier = cls.open(path)
            if earlier.is_in_use():
                raise ConfigError(
                    f"run.directory: {path} is in use by {earlier._last_user() or 'another process'}; give another, or "
                    "null for a new one"
                )
            if earlier.purpose == purpose == "eval":
                advice = f"continue the evaluation in it by --resume {path}, "
            elif earlier.purpose == "train" and earlier._came_to_nothing():
                advice = f"nothing was trained in it: delete it if {earlier._last_user() or 'that run'} is over, "
            elif earlier.purpose == purpose == "train":
                advice = f"continue the run in it by --resume {path}, "
        raise ConfigError(f"run.directory: {path} is not empty; {advice}give another, or null for a new one")

    def _came_to_nothing(self) -> bool:
        """Whether a training run has trained, evaluated and sampled nothing so far. It may still be under way."""
        weights = self.path / "weights"
        untrained = numbered(weights, "step", 0).name  # the trainer may write these before a server fails to start
        return {each.name for each in self.path.iterdir()} <= OF_A_START and not (
            weights.is_dir() and any(untrained not in each.name for each in weights.iterdir())
        )

    def is_in_use(self) -> bool:
        """Whether a living process writes here.

        False proves nothing: on a shared disk, a lock held by another machine may not be seen.
        """
        try:
            with open_regular(self.path / ".lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _last_user(self) -> str:
        """Return the process that has the lock, or had it last; empty if that cannot be read."""
        try:
            return read_bounded(self.path / ".lock", MAX_HOLDER_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError):
            return ""

    @classmethod
    def open(cls, path: Path, *, continues: bool = False) -> RunDirectory:
        """Return the run directory at `path`. Raises DataError if it is none, or newer than this program.

        One whose run `continues` must be of this format.
        """
        try:
            found = decode_json(read_bounded(path / "run.json"), _RunFile, "run.json")
        except (OSError, DataError):
            raise DataError(f"{path} is no run directory: it has no readable run.json") from None
        check_format(path, found.format, RUN_FORMAT, continues=continues)
        return cls(path.resolve(), found.command, found.cores, found.spot_async)

    @classmethod
    def open_own(cls, path: Path) -> RunDirectory:
        """Return the run directory at `path` to continue in it: its configuration is run, and its state is trusted.

        Raises DataError too if another user could change it, or files in it that decide.
        """
        names = {*OF_A_START, *APPENDED, "checkpoints", "student", "best"}
        refuse_foreign_writers([path, *(path / name for name in names), *path.glob("evaluation*")])
        return cls.open(path, continues=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock while inside, so that nobody else writes here. The kernel frees it if this process dies.

        Raises DataError, which names the process that has the lock, and StorageError if the file system has no locks.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context((self.path / ".lock").open("a+", encoding="utf-8"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}\n")
                file.flush()
            except BlockingIOError:
                holder = self._last_user() or "another process"
                raise DataError(f"{self.path} is in use by {holder}: wait for its end, or stop it first") from None
            except OSError as error:
                raise StorageError(f"cannot lock {self.path / '.lock'}: {error.strerror}") from None
            yield

    def append(self, name: str, rows: list[Any]) -> None:
        """Append rows to a JSONL file. Raises StorageError, such as on a full disk, and then appends none of them."""
        data = b"".join(row_bytes(row) + b"\n" for row in rows)
        path = self.path / name
        with writing(path), path.open("ab", buffering=0) as file:
            append_whole(file, data)

    def flush_rows(self) -> None:
        """Return once the rows that were appended, and the names of all files, would outlive a power cut.

        Raises StorageError.
        """
        with writing(self.path):
            for name in APPENDED:
                if (self.path / name).exists():
                    flush_to_disk(self.path / name)
            flush_to_disk(self.path)

    def cut_after(self, iteration: int) -> None:
        """Cut the files that have rows of each iteration behind this one, and a row that a kill tore.

        Raises StorageError.
        """
        for name in OF_ITERATIONS:
            path = self.path / name
            try:
                if path.exists():
                    os.truncate(path, _end_of(path, iteration))
            except OSError as error:
                raise StorageError(f"cannot cut {path}: {error.strerror}") from None

    def note_cpu(self, cpu: str) -> str | None:
        """Write down what the trainer computes on from now on; return what it computed on before, if that is known.

        Raises DataError or StorageError.
        """
        path = self.path / "run.json"
        with writing(path):
            data = read_bounded(path)
        before = decode_json(data, _RunFile, path.name).cpu
        if before != cpu:
            write_whole(path, as_json(decode_json(data, dict[str, Any], path.name) | {"cpu": cpu}))
        return before

    @property
    def has_summary(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / SUMMARY).exists()

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_whole(self.path / SUMMARY, as_json(summary))


def _end_of(path: Path, iteration: int) -> int:
    """Return where the rows of later iterations begin. Rows are in the order of iterations."""
    end = 0
    for line in lines_of(path):
        try:
            found = msgspec.json.decode(line, type=_RowOfIteration).iteration
        except (msgspec.MsgspecError, RecursionError):
            break
        if found > iteration or not line.endswith(b"\n"):
            break
        end += len(line)
    return end


@contextlib.contextmanager
def _to_be_used(path: Path) -> Iterator[None]:
    """Raise what the system refuses inside as a ConfigError that names `run.directory`."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"run.directory: cannot use {visible(str(path))}: {reason}") from None


def append_whole(file: FileIO, data: bytes) -> None:
    """Write all of `data` at the file's end. Raises OSError, and then writes nothing of it."""
    end, rest = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while rest:  # a nearly full disk first takes a part, and gives its reason only when offered the rest
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # a torn line is harmless; the first error is what people must see
            file.truncate(end)
        raise


def row_bytes(row: Any) -> bytes:
    """Return a row as JSON. Arrays become lists of rounded numbers, and NaN becomes null."""
    return _rows.encode(row)


def _plain(value: object) -> object:
    """Return an array as lists of numbers."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float64).round(DECIMALS).tolist() if value.dtype.kind == "f" else value.tolist()
    raise NotImplementedError(f"no JSON form for {type(value).__name__}")


_rows = msgspec.json.Encoder(enc_hook=_plain)
