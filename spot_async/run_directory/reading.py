"""Reads a run directory in any state: finished, still running, or killed in the middle of a line.

Files grow with the run, so samples are read one line at a time. Every field that a policy may leave out has a default;
whoever renders it decides what to do without it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from spot_async.base.files import MAX_LINE_BYTES, decode_json, lines_of, open_regular, read_json, reading
from spot_async.config import ROLES
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
    STALE,
    STALLED,
    RunDirectory,
)
from spot_async.spending.account import Spending
from spot_async.stages.services import STAGE_SERVERS

if TYPE_CHECKING:
    from spot_async.models.vocabulary import Vocabulary

T = TypeVar("T")

# Of what is held as a whole: metrics, spending and dead letters. 10,000 iterations have about 1.5 million values.
MAX_BYTES_OF_ROWS, MAX_VALUES_OF_ROWS = 128 << 20, 2_000_000
SECTIONS = {*ROLES, "teachers", "data", "evaluation", "policy", "prompt", "run", "sampling", "stages", "training"}
MAX_FAILED = 100_000  # lines of the log about attempts that failed

EVALUATION = "evaluation/"  # what the names of held-out figures in metrics.jsonl begin with
EVALUATION_ITERATION = f"{EVALUATION}iteration"  # absent where it is the row's own


class Candidate(msgspec.Struct, kw_only=True):
    """One teacher candidate of a probed position, and what probing it showed."""

    token_id: int
    token: str = ""
    prior: float | None = None  # the teacher's probability, normalised over the candidates
    value: float | None = None  # mean reward of its branches; None without evidence
    target: float | None = None  # the prior after the tilt by the values
    verdicts: list[str] = []
    continuations: list[str] = []
    teacher: float | None = None  # the teacher's probability in the whole vocabulary
    student: float | None = None  # the student's, likewise


class BranchSummary(msgspec.Struct, kw_only=True):
    """What tables and statistics need of a probed position."""

    position: int
    sampled: str = ""
    retained: bool = False


class Branch(BranchSummary, kw_only=True):
    """One probed position."""

    certain: bool = True  # False: the position was chosen by the midpoint of an interval
    candidates: list[Candidate] = []
    score_parts: dict[str, float | None] = {}


class SampleSummary(msgspec.Struct, kw_only=True):
    """What tables and statistics need of a sample. The rest of the line is skipped, not decoded."""

    iteration: int
    problem_id: str = ""
    verdict: str = ""
    finish_reason: str = ""
    response_ids: list[int] = []
    acquisition_score: list[float | None] | None = None
    branches: Sequence[BranchSummary] = ()


class SampleRecord(SampleSummary, kw_only=True):
    """One line of `samples.jsonl`. NaN and infinities were written as null, in arrays as well."""

    problem: str = ""
    answer: str = ""
    tier: str | None = None
    teacher: str = ""  # the name of the one of several that its prompt asked
    teacher_prompt: str = ""  # what the teacher read; empty where it read the student's prompt
    response: str = ""
    version: str | None = None  # of the weights that sampled it; None if it is not the student's response
    writers: list[tuple[int, int, str | None]] = []  # where others wrote a part: start, end, weights or None
    behavior_logprobs: list[float | None] | None = None
    teacher_logprobs: list[float | None] | None = None
    teacher_entropy_nats: list[float | None] | None = None
    advantage: float | None = None  # the whole response's, where the policy gives it one
    reward: float | None = None  # where it is not the verdict's, or the policy compares it with those of its group
    feedback: str = ""  # the verifier's
    group_rewards: list[float | None] | None = None  # those of all the prompt's responses, in their order
    left_out: str | None = None  # why it was not trained; None if it was
    gated_positions: list[int] = []
    branches: Sequence[Branch] = ()


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

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration as plain values, since the schema may have changed since the run."""
        try:
            loaded = read_plain(self.path / "config.yaml")
        except ConfigError as error:
            raise DataError(str(error)) from None
        if not isinstance(loaded, dict):
            return {}
        stages = loaded.get("stages")
        inner = {f"stages.{name}": stages.get(name) for name in STAGE_SERVERS} if isinstance(stages, dict) else {}
        teachers = loaded.get("teachers")
        several = {f"teachers.{name}": each for name, each in teachers.items()} if isinstance(teachers, dict) else {}
        for role, section in ({role: loaded.get(role) for role in ROLES} | several).items():
            if isinstance(section, dict):
                inner[f"{role}.backend"] = section.get("backend")
        for key, value in ({**loaded, **several, **inner}).items():
            if key.partition(".")[0] in SECTIONS and not isinstance(value, dict | None):
                raise DataError(f"{self.path / 'config.yaml'}: {key} is no section")
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
        found = (self.path / "metrics.jsonl", self.path / "samples.jsonl")
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
        warnings = self._events(MISMATCHED, NO_ADVICE, FELL, STALE)
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
        return _rows(self.path / "spending.jsonl", dict[str, Any])

    def dead_letters(self) -> list[DeadLetter]:
        """Return the prompts that were given up, in that order."""
        return _rows(self.path / FILE_NAME, DeadLetter)

    def samples(self) -> Iterator[SampleSummary]:
        """Return all samples, in the order in which they were trained."""
        return self.samples_as(SampleSummary)

    def samples_after(self, start: int) -> Iterator[tuple[int, SampleSummary]]:
        """Return the samples that begin at the byte `start` or later, each with the byte where the next one begins."""
        return (
            (offset + size, sample)
            for offset, size, sample in _lines(self.path / "samples.jsonl", SampleSummary, start)
        )

    def samples_as(self, kind: type[T]) -> Iterator[T]:
        """Return all samples in that order, with the fields that `kind` has. The rest of a line is skipped."""
        return (sample for _, sample in _lines_at(self.path / "samples.jsonl", kind))

    def sample(self, wanted: str) -> tuple[int, SampleRecord]:
        """Return a sample's number and record. `wanted` is a number, or a problem's id for its latest sample.

        Raises DataError if there is none.
        """
        path = self.path / "samples.jsonl"
        by_number: tuple[int, int] | None = None  # number, offset
        by_problem: tuple[int, int] | None = None
        count = 0
        for number, (offset, summary) in enumerate(_lines_at(path, SampleSummary)):
            count = number + 1
            if wanted == str(number):
                by_number = number, offset
            if wanted == summary.problem_id:
                by_problem = number, offset
        found = by_number or by_problem
        if found is None and count == 0:
            raise DataError(f"{path}: no samples: {self.samples_rhythm()}")
        if found is None:
            raise DataError(f"{path}: no sample {wanted!r}: give a number from 0 to {count - 1}, or a problem's id")
        number, offset = found
        with open_regular(path) as file:
            file.seek(offset)
            return number, decode_json(file.readline(), SampleRecord, f"{path}: sample {number}")

    def numbers_of(self, problem_id: str) -> list[int]:
        """Return the numbers of all samples of one problem."""
        return [number for number, sample in enumerate(self.samples()) if sample.problem_id == problem_id]


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
        if not (directory / "tokenizer_config.json").exists():
            continue
        try:
            tokenizer = _vocabulary(directory.resolve()).tokenizer
        except DataError:
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


def _rows(path: Path, kind: type[T]) -> list[T]:
    """Return all lines of a file that is held as a whole. Raises DataError if it has too many bytes or values."""
    values = 0

    def counted(line: bytes) -> bool:
        nonlocal values
        values += line.count(b",") + line.count(b"[") + line.count(b"{")
        return values <= MAX_VALUES_OF_ROWS

    if path.exists() and path.stat().st_size > MAX_BYTES_OF_ROWS:
        raise DataError(f"{path}: has more than {MAX_BYTES_OF_ROWS:,} bytes")
    rows = [row for _, row in _lines_at(path, kind, counted)]
    if values > MAX_VALUES_OF_ROWS:
        raise DataError(f"{path}: has more than {MAX_VALUES_OF_ROWS:,} values")
    return rows


def _lines_at(
    path: Path, kind: type[T], goes_on: Callable[[bytes], bool] = lambda line: True
) -> Iterator[tuple[int, T]]:
    """Return each line with its offset, as `_lines`."""
    return ((offset, value) for offset, _, value in _lines(path, kind, goes_on=goes_on))


def _lines(
    path: Path, kind: type[T], start: int = 0, goes_on: Callable[[bytes], bool] = lambda line: True
) -> Iterator[tuple[int, int, T]]:
    """Return each line from the byte `start` on with its offset and size; none if there is no file.

    A last line that was cut short is left out. It ends before the first line for which `goes_on` is false.
    """
    if not path.exists():
        return
    offset = start
    with reading(path):
        for number, line in enumerate(itertools.takewhile(goes_on, lines_of(path, start)), start=1):
            where = f"{path}:{number}" if start == 0 else f"{path}, byte {offset}"
            try:
                value = decode_json(line, kind, where, MAX_LINE_BYTES)  # which bounds the values too
            except DataError:
                if line.endswith(b"\n"):
                    raise
            else:
                yield offset, len(line), value
            offset += len(line)
