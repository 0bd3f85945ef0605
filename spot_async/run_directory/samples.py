"""Reads the samples of a run, which may be many: each line once, as a row of what lists and statistics need.

Whoever shows a sample reads its line once more. Every field that a policy may leave out has a default.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from spot_async.base.files import MAX_LINE_BYTES, decode_json, decoded_lines, open_regular, reading

T = TypeVar("T", bound="SampleSummary")

SAMPLES = "samples.jsonl"
RELATIVE_BINS = 20


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

    iteration: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]  # a row has no place for a larger one
    problem_id: str = ""
    verdict: str = ""
    finish_reason: str = ""
    response_ids: list[int] = []
    acquisition_score: list[float | None] | None = None
    branches: Sequence[BranchSummary] = ()
    failed_turns: list[tuple[int, str, str]] = []  # number, kind and text of what was no proper answer


class SampleRecord(SampleSummary, kw_only=True):
    """One line of `samples.jsonl`. NaN and infinities were written as null, in arrays as well."""

    problem: str = ""
    answer: str = ""
    tier: str | None = None
    teacher: str = ""  # the name of the one of several that its prompt asked
    teacher_prompt: str = ""  # what the teacher read; empty where it read the student's prompt
    response: str = ""
    version: str | None = None  # of the weights that sampled it; None if it is not the student's response
    # Where others wrote a part: start, end, and weights, "environment" or None.
    writers: list[tuple[int, int, str | None]] = []
    turns: list[int] = []  # where each turn begins, beside an environment
    ended: str = ""  # why no further turn followed
    behavior_logprobs: list[float | None] | None = None
    teacher_logprobs: list[float | None] | None = None
    teacher_entropy_nats: list[float | None] | None = None
    teacher_chunks: list[int] | None = None  # of a teacher that knows these alone; -1 where it knows nothing
    advantage: float | None = None  # the whole response's, where the policy gives it one
    reward: float | None = None  # where it is not the verdict's, or the policy compares it with those of its group
    feedback: str = ""  # the verifier's
    group_rewards: list[float | None] | None = None  # those of all the prompt's responses, in their order
    left_out: str | None = None  # why it was not trained; None if it was
    gated_positions: list[int] = []
    branches: Sequence[Branch] = ()


class SampleStatistics:
    """Statistics of all samples, which are added one at a time."""

    def __init__(self) -> None:
        self.score_sums = [0.0] * RELATIVE_BINS
        self.score_counts = [0] * RELATIVE_BINS
        self.selected = [0] * RELATIVE_BINS
        self.probed_tokens: Counter[str] = Counter()
        self.retained_tokens: Counter[str] = Counter()
        self.failed_turns: Counter[tuple[str, str]] = Counter()  # by kind and text

    def add(self, sample: SampleSummary) -> None:
        length = len(sample.response_ids)
        for position, score in enumerate((sample.acquisition_score or ())[:length]):
            if score is not None:
                bin_ = position * RELATIVE_BINS // length
                self.score_sums[bin_] += score
                self.score_counts[bin_] += 1
        for branch in sample.branches:
            if 0 <= branch.position < length:
                self.selected[branch.position * RELATIVE_BINS // length] += 1
            self.probed_tokens[branch.sampled] += 1
            self.retained_tokens[branch.sampled] += branch.retained
        self.failed_turns.update((kind, text) for _, kind, text in sample.failed_turns)


class SampleRow(msgspec.Struct, frozen=True, array_like=True):
    """What lists need of a sample, and where its line begins."""

    offset: int
    iteration: int
    problem_id: str
    verdict: str
    tokens: int
    highest_score: float | None
    positions: int  # how many were probed
    retained: int  # how many of them were kept


class SampleRows:
    """Rows as msgpack. A run may have a million of them, and these take 50 MB."""

    def __init__(self) -> None:
        self._packed, self._ends = bytearray(), array("q", [0])

    def append(self, row: SampleRow) -> None:
        self._packed += msgspec.msgpack.encode(row)
        self._ends.append(len(self._packed))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> SampleRow:
        packed = memoryview(self._packed)[self._ends[number] : self._ends[number + 1]]
        return msgspec.msgpack.decode(packed, type=SampleRow)

    def __iter__(self) -> Iterator[SampleRow]:
        return map(self.__getitem__, range(len(self)))


class SampleTable:
    """The samples of a run, in the order in which they were trained."""

    def __init__(self, path: Path) -> None:
        self.statistics = SampleStatistics()
        self._path = path
        self._rows = SampleRows()
        self._read_bytes = 0

    def read(self) -> SampleRows:
        """Return a row of each. Those that were read before are not read again, unless the run went back since."""
        if self._path.exists() and self._path.stat().st_size < self._read_bytes:
            self.statistics, self._rows, self._read_bytes = SampleStatistics(), SampleRows(), 0
        for offset, size, sample in decoded_lines(self._path, SampleSummary, self._read_bytes):
            scores = [score for score in sample.acquisition_score or () if score is not None]
            row = SampleRow(
                offset,
                sample.iteration,
                sample.problem_id,
                sample.verdict,
                len(sample.response_ids),
                max(scores, default=None),
                len(sample.branches),
                sum(branch.retained for branch in sample.branches),
            )
            self._rows.append(row)
            self.statistics.add(sample)
            self._read_bytes = offset + size
        return self._rows

    def record(self, number: int, kind: type[T]) -> T:
        """Return a sample that `read` returned a row of, with the fields that `kind` has."""
        with reading(self._path), open_regular(self._path) as file:
            file.seek(self._rows[number].offset)
            return decode_json(file.readline(), kind, f"{self._path}: sample {number}", MAX_LINE_BYTES)

    def of_problem(self, problem_id: str) -> list[int]:
        """Return the numbers of all samples of one problem."""
        return [number for number, row in enumerate(self._rows) if row.problem_id == problem_id]
