"""Reads a run directory in any state: finished, still running, or killed in the middle of a line.

Files grow with the run, so they are read one line at a time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from spot_async.base.files import MAX_LINE_BYTES, decode_json, decoded_lines, lines_of, read_json, reading, whole_lines
from spot_async.config import ROLES, leaves
from spot_async.config.loading import read_plain
from spot_async.errors import ConfigError, DataError
from spot_async.models.hub import local_path
from spot_async.run_directory.dead_letters import FILE_NAME, DeadLetter
from spot_async.run_directory.layout import (
    ATTEMPTS_FAILED,
    ENDS_EARLY,
    FELL,
    MISMATCHED,
    NO_ADVICE,
    RESTARTED,
    RESUMED,
    STALLED,
    RunDirectory,
)
from spot_async.run_directory.samples import SAMPLES, SampleRecord, SampleTable
from spot_async.spending.account import Spending
from spot_async.stages.services import STAGE_SERVERS

if TYPE_CHECKING:
    from spot_async.models.vocabulary import Vocabulary

T = TypeVar("T")

# Of what is held as a whole: metrics, spending and dead letters. 10,000 iterations have about 1.5 million values.
MAX_BYTES_OF_ROWS, MAX_VALUES_OF_ROWS = 128 << 20, 2_000_000
# Keys of a configuration that may be anybody's, which no schema checks: of what is read as a section or as a number.
SECTIONS = re.compile(
    rf"data|environment|evaluation|policy|prompt|run|sampling|stages(\.({'|'.join(STAGE_SERVERS)}))?|teachers|training|"
    rf"({'|'.join(ROLES)}|teachers\.[^.]+)(\.backend)?|teachers\..+\.backend"
)
NUMBERS = re.compile(
    r"(max_staleness|policy\.(probes|baseline)|run\.samples_every|sampling\.(temperature|top_p)|"
    r"stages\.\w+\.concurrency|training\.(batch_size|iterations|ranks|threads)|"
    r".*backend\.(replicas|slots|threads)|.*environment\.workers)(?![^.])"  # a key below one makes it none, too
)
MOST_NUMBER = 1e12
MAX_FAILED = 100_000  # lines of the log about attempts that failed

EVALUATION = "evaluation/"  # what the names of held-out figures in metrics.jsonl begin with
EVALUATION_ITERATION = f"{EVALUATION}iteration"  # absent where it is the row's own


class _Change(msgspec.Struct):
    avg: float
    avg_standard_error: float | None = None


class _Row(_Change, kw_only=True):
    """The held-out figures of a tier or benchmark in `summary.json`."""

    problems: int
    pass_share: float = msgspec.field(name="pass")
    pass_standard_error: float | None = None
    pass_k: int | msgspec.UnsetType = msgspec.UNSET


class _Evaluated(msgspec.Struct):
    samples: int
    tiers: dict[str, _Row]


class _Spent(Spending):
    currency: str = ""
    budget: float | None = None


class _Best(msgspec.Struct):
    iteration: int
    value: float
    standard_error: float | None = None


class _Summary(msgspec.Struct):
    """The part of `summary.json` that is shown. The rest may be anything."""

    before: _Evaluated | None = None
    after: _Evaluated | None = None
    change: dict[str, _Change] | None = None
    best: _Best | None = None
    prompts: dict[str, int] = {}
    problems: dict[str, Any] | None = None
    spending: dict[str, _Spent] = {}
    iterations: int = 0
    ended_early: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless a table can be made: each evaluation has the tiers of the others."""
        tables = (self.before and self.before.tiers, self.after and self.after.tiers, self.change)
        if len({frozenset(table) for table in tables if table}) > 1:
            raise ValueError("before, after and change have other tiers")


class FailedAttempts(msgspec.Struct, kw_only=True):
    """Attempts of one stage that failed in the same way, in or before one iteration."""

    iteration: int = 0
    stage: str = ""
    failure: str = ""  # their class
    brief: str = ""  # what happened: `HTTP 502`, `reset`
    count: int = 0
    lost_s: float = 0.0
    reason: str = ""  # of the newest; a part may be a server's words


class _Event(FailedAttempts, kw_only=True):
    """The part of a line of the run's log that is read. Most events have few of the fields."""

    event: str = ""
    step: int = 0


class RunFiles:
    """The files of one run directory. Raises DataError if it is none, or newer than this program."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._directory = directory = RunDirectory.open(path)
        self.cores = directory.cores  # how many the run could use; None where that is not known
        self.is_evaluation = directory.purpose == "eval"
        self.samples = SampleTable(path / SAMPLES)

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration as plain values, since the schema may have changed since the run."""
        try:
            loaded = read_plain(self.path / "config.yaml")
        except ConfigError as error:
            raise DataError(str(error)) from None
        if not isinstance(loaded, dict):
            return {}
        for key, value in leaves(loaded):
            if SECTIONS.fullmatch(key) and not isinstance(value, dict | None):
                raise DataError(f"{self.path / 'config.yaml'}: {key} is no section")
            is_number = value is None or (isinstance(value, int | float) and abs(value) <= MOST_NUMBER)
            if (number := NUMBERS.match(key)) is not None and (number[0] != key or not is_number):
                raise DataError(f"{self.path / 'config.yaml'}: {number[0]} is no number up to {MOST_NUMBER:g}")
        return {key: value for key, value in loaded.items() if value is not None}

    def samples_rhythm(self) -> str:
        """Return in words when the run writes samples, by its configuration."""
        every = (self.config().get("run") or {}).get("samples_every", 1)
        if every == 0:
            return "the run writes none (run.samples_every is 0)"
        if every == 1:
            return "they are written as each iteration ends"
        return f"they are written every {every} iterations (run.samples_every)"

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each finished iteration, without those that are not numbers (written as null)."""
        path = self.path / "metrics.jsonl"
        rows = [
            {name: value for name, value in row.items() if value is not None}
            for row in _rows(path, dict[str, float | None])
        ]
        if any("iteration" not in row for row in rows):
            raise DataError(f"{path}: a line names no iteration")
        return rows

    def summary(self) -> dict[str, Any] | None:
        """Return the figures at the end of the run; None if it has not come to its end."""
        path = self.path / "summary.json"
        return msgspec.to_builtins(read_json(path, _Summary)) if path.exists() else None

    def is_going_on(self) -> bool:
        """Return whether a process of this machine is at work on the run."""
        return self.summary() is None and self._directory.is_in_use()

    def size_bytes(self) -> int:
        """Return the size of what grows with each iteration."""
        found = (self.path / "metrics.jsonl", self.path / SAMPLES)
        return sum(path.stat().st_size for path in found if path.exists())

    def early_end(self) -> str | None:
        """Return one line that says that the run ended early, and why; None if it came to its end or continues."""
        summary = self.summary()
        if summary is not None:
            return f"The run ended early: {reason}" if (reason := summary.get("ended_early")) else None
        if self._directory.is_in_use():
            return None
        reason = ""
        for each in self._events(ENDS_EARLY, STALLED, RESUMED):
            reason = each.reason  # of a resumed part there is none so far
        if reason:
            return f"The run ended early: {reason}"
        return (
            "The run ended early, or continues on another machine. Its log does not say why it ended: perhaps it was "
            "killed, its disk was full, or its machine went down"
        )

    def interruptions(self) -> list[str]:
        """Return a line for each time that the run continued from a checkpoint."""
        said = {RESUMED: "The run was resumed", RESTARTED: "The trainer was lost, and the run continued"}
        return [
            f"{said[each.event]} after iteration {each.step}{f': {each.reason}' if each.reason else ''}"
            for each in self._events(*said)
        ]

    def mismatches(self) -> list[str]:
        """Return a line for each part of the run that warned of an iteration (`telemetry/failures.py`)."""
        warnings = self._events(MISMATCHED, NO_ADVICE, FELL)
        return [f"After iteration {each.step}, {each.reason}" for each in warnings]

    def failed_attempts(self) -> Sequence[FailedAttempts]:
        """Return the attempts that failed, in that order. A resumed run has those of iterations that it made again."""
        return list(itertools.islice(self._events(ATTEMPTS_FAILED), MAX_FAILED))

    def _events(self, *names: str) -> Iterator[_Event]:
        """Return these events of the log. Lines that cannot be read are left out: pages need not fail for them."""
        path, decoder = self.path / "logs" / "run.jsonl", msgspec.json.Decoder(_Event)
        with contextlib.suppress(OSError):
            for line in lines_of(path):
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    if (found := decoder.decode(line)).event in names:
                        yield found

    def spending(self) -> list[dict[str, Any]]:
        """Return what was spent at endpoints with prices, in the rows that `telemetry/run_log.py` writes."""
        return list(_rows(self.path / "spending.jsonl", dict[str, Any]))

    def dead_letters(self) -> list[DeadLetter]:
        """Return the prompts that were given up, in that order."""
        return list(_rows(self.path / FILE_NAME, DeadLetter))

    def sample(self, wanted: str) -> tuple[int, SampleRecord]:
        """Return a sample's number and record. `wanted` is a number, or a problem's id for its latest sample.

        Raises DataError if there is none.
        """
        path = self.path / SAMPLES
        for number, line in enumerate(whole_lines(path) if wanted.isdecimal() else ()):
            if wanted == str(number):
                return number, decode_json(line, SampleRecord, f"{path}: sample {number}", MAX_LINE_BYTES)
        if not (rows := self.samples.read()):
            raise DataError(f"{path}: no samples: {self.samples_rhythm()}")
        if not (named := self.samples.of_problem(wanted)):
            raise DataError(f"{path}: no sample {wanted!r}: give a number from 0 to {len(rows) - 1}, or a problem's id")
        return named[-1], self.samples.record(named[-1], SampleRecord)


def evaluated_iteration(iteration: int, metrics: Mapping[str, float]) -> int:
    """Return whose weights the figures `evaluation/...` of an iteration's metrics are of.

    An asynchronous run trains on while it evaluates, so they may stand in the row of a later iteration.
    """
    return int(metrics.get(EVALUATION_ITERATION, iteration))


def has_evaluation(metrics: Mapping[str, float]) -> bool:
    return any(name.startswith(EVALUATION) for name in metrics)


def token_texts(run: RunFiles, token_ids: list[int]) -> list[str]:
    """Return the text of each token by itself, or its id in angle brackets if no tokenizer is there any more.

    The tokenizer is that of the trained student, or of the model that it began as.
    """
    begun_as = str(run.config().get("student", {}).get("model", ""))
    for directory in (run.path / "student", Path(local_path(begun_as))):
        try:
            if not (directory / "tokenizer_config.json").exists():
                continue
            tokenizer = _vocabulary(directory.resolve()).tokenizer
        except (DataError, OSError):  # the name of a foreign run's model may be too long for a path
            continue
        texts: list[str] = tokenizer.batch_decode([[token_id] for token_id in token_ids])
        return texts
    return [f"⟨{token_id}⟩" for token_id in token_ids]


@functools.lru_cache(maxsize=1)
def _vocabulary(directory: Path) -> Vocabulary:
    from spot_async.models.vocabulary import Vocabulary  # imports transformers

    return Vocabulary.load(directory)


def name_tokens(run: RunFiles, sample: SampleRecord) -> None:
    """Give candidates without a text (special tokens) the names that their tokenizer has for them."""
    unnamed = [candidate for branch in sample.branches for candidate in branch.candidates if not candidate.token]
    if unnamed:
        texts = token_texts(run, [candidate.token_id for candidate in unnamed])
        for candidate, text in zip(unnamed, texts, strict=True):
            candidate.token = text


def _rows(path: Path, kind: type[T]) -> Iterator[T]:
    """Return all lines of a file that is held as a whole. Raises DataError if it has too many bytes or values."""
    if not path.exists():
        return
    if path.stat().st_size > MAX_BYTES_OF_ROWS:
        raise DataError(f"{path}: has more than {MAX_BYTES_OF_ROWS:,} bytes")
    with reading(path):
        values = sum(line.count(b",") + line.count(b"[") + line.count(b"{") for line in lines_of(path))
    if values > MAX_VALUES_OF_ROWS:
        raise DataError(f"{path}: has more than {MAX_VALUES_OF_ROWS:,} values")
    yield from (row for _, _, row in decoded_lines(path, kind))
