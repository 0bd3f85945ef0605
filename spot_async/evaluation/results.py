"""Computes the figures of an evaluation from all its responses. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from spot_async.config.evaluation import ALL_TIERS, MACRO
from spot_async.evaluation.metrics import (
    LENGTH_QUANTILES,
    BenchmarkFigures,
    Estimate,
    EvaluationFigures,
    Figures,
    MacroFigures,
    avg_at_k_per_problem,
    figure_rows,
    mean_of_independent,
    pass_at_k_per_problem,
)
from spot_async.evaluation.response_log import JudgedResponse
from spot_async.run_directory.layout import software_versions
from spot_async.types import BoolArray, Verdict
from spot_async.verification.normalization import normalize_answer


@dataclass(frozen=True)
class BenchmarkResult:
    """The responses to one benchmark's problems."""

    tiers: tuple[str | None, ...] = field(repr=False)  # (problems,)
    responses: tuple[tuple[JudgedResponse, ...], ...] = field(repr=False)  # (problems, samples)
    name: str = "problems"
    pass_k: tuple[int, ...] = ()  # the k of Pass@k to report, besides the number of samples
    is_judged: bool = True
    in_macro: bool = True
    note: str | None = None  # what people must know who compare its figures

    @property
    def correct(self) -> BoolArray:
        """Whether each response is correct, (problems, samples)."""
        return np.array([[r.verdict is Verdict.CORRECT for r in row] for row in self.responses], dtype=np.bool_)

    @property
    def samples(self) -> int:
        return len(self.responses[0])

    def in_tier(self, tier: str) -> BoolArray:
        """Return whether each problem is in a tier, (problems,)."""
        return np.array([tier in (ALL_TIERS, each) for each in self.tiers], dtype=np.bool_)

    def figures(self, tier: str = ALL_TIERS) -> Figures:
        """Return the figures of the problems of a tier."""
        rows = [row for row, is_in in zip(self.responses, self.in_tier(tier), strict=True) if is_in]
        responses = [response for row in rows for response in row]
        common = Figures(
            problems=len(rows),
            samples=self.samples,
            tokens=sum(response.tokens for response in responses),
            mean_tokens=Estimate.over_problems([sum(r.tokens for r in row) / len(row) for row in rows]),
            truncated=truncated_share(responses),
            verdicts=verdict_counts(responses),
            lengths=length_quantiles(responses),
        )
        return common if not self.is_judged else self._with_accuracy(common, rows, self.correct[self.in_tier(tier)])

    def _with_accuracy(self, common: Figures, rows: Sequence[Sequence[JudgedResponse]], correct: BoolArray) -> Figures:
        votes = self.samples > 1 and any(each.extracted is not None for row in rows for each in row)
        return msgspec.structs.replace(
            common,
            maj=Estimate.over_problems([majority_is_right(row) for row in rows]) if votes else None,
            avg=Estimate.over_problems(avg_at_k_per_problem(correct)),
            math_verify=avg_by_math_verify(rows),
            pass_at={
                k: Estimate.over_problems(pass_at_k_per_problem(correct, k))
                for k in reported(self.pass_k, self.samples)
            },
        )

    def benchmark_figures(self) -> BenchmarkFigures:
        """Return everything that `evaluation.json` says of the benchmark."""
        whole = self.figures()
        counts = self.correct.sum(axis=1).tolist() if self.is_judged else []
        return BenchmarkFigures(
            **{name: getattr(whole, name) for name in Figures.__struct_fields__},
            note=self.note,
            tiers={tier: self.figures(tier) for tier in dict.fromkeys(self.tiers) if tier is not None},
            correct={row[0].problem_id: count for row, count in zip(self.responses, counts, strict=False)},
        )


@dataclass(frozen=True)
class EvaluationResult:
    """The responses to all benchmarks of one evaluation."""

    benchmarks: tuple[BenchmarkResult, ...]

    @cached_property
    def figures(self) -> Mapping[str, BenchmarkFigures]:
        return {each.name: each.benchmark_figures() for each in self.benchmarks}

    @cached_property
    def rows(self) -> Mapping[str, Figures]:
        return figure_rows(self.figures, self.macro())

    def macro(self) -> MacroFigures | None:
        """Return the unweighted means over the benchmarks with `in_macro` that are judged; None if there is none."""
        members = [self.figures[each.name] for each in self._in_macro]
        if not members:
            return None
        ks = set(members[0].pass_at).intersection(*(each.pass_at for each in members))
        return MacroFigures(
            benchmarks=[each.name for each in self._in_macro],
            avg=mean_of_independent([each.avg for each in members if each.avg is not None]),
            pass_at={k: mean_of_independent([each.pass_at[k] for each in members]) for k in sorted(ks)},
        )

    @property
    def _in_macro(self) -> list[BenchmarkResult]:
        return [benchmark for benchmark in self.benchmarks if benchmark.is_judged and benchmark.in_macro]

    @property
    def responses(self) -> tuple[JudgedResponse, ...]:
        """All responses, in the order of benchmarks, problems and samples."""
        return tuple(response for each in self.benchmarks for row in each.responses for response in row)

    @property
    def tokens(self) -> int:
        return sum(response.tokens for response in self.responses)

    def evaluation_figures(self, **of_it: Any) -> EvaluationFigures:
        """Return the contents of `evaluation.json`; `of_it` are those that its responses do not tell."""
        return EvaluationFigures(
            **of_it,
            versions=software_versions(),
            benchmarks=dict(self.figures),
            macro=self.macro(),
            tokens=self.tokens,
            truncated=truncated_share(self.responses),
            verdicts=verdict_counts(self.responses),
        )


def avg_by_math_verify(rows: Sequence[Sequence[JudgedResponse]]) -> Estimate | None:
    """Return Avg@n of the problems (rows) by Math-Verify's own verdicts; None where none of them is another."""
    if all(each.math_verify is msgspec.UNSET for row in rows for each in row):
        return None
    own = [[each.verdict if each.math_verify is msgspec.UNSET else each.math_verify for each in row] for row in rows]
    correct = [[verdict is Verdict.CORRECT for verdict in row] for row in own]
    return Estimate.over_problems(avg_at_k_per_problem(correct))


def paired_change(before: EvaluationResult, after: EvaluationResult, row: str) -> tuple[float, float]:
    """Return the change of Avg@n in one row of the table, and its standard error.

    The change is paired: it is taken problem by problem, on the same problems. For the mean over benchmarks it is their
    mean change.
    """
    pairs, tier = list(zip(before.benchmarks, after.benchmarks, strict=True)), row
    if len(before.benchmarks) > 1:  # benchmarks count alike, however many problems they have
        names, tier = ([each.name for each in before._in_macro] if row == MACRO else [row]), ALL_TIERS
        pairs = [(one, other) for one, other in pairs if one.name in names]
    mean = mean_of_independent([_change(one, other, tier) for one, other in pairs])
    return mean.value, math.nan if mean.standard_error is None else mean.standard_error


def _change(before: BenchmarkResult, after: BenchmarkResult, tier: str) -> Estimate:
    chosen = before.in_tier(tier)
    change = avg_at_k_per_problem(after.correct[chosen]) - avg_at_k_per_problem(before.correct[chosen])
    return Estimate.over_problems(change)


def reported(pass_k: Sequence[int], samples: int) -> list[int]:
    """Return the k of Pass@k that so many samples allow. The number of samples itself is always one of them."""
    return sorted({k for k in pass_k if k <= samples} | {samples})


def majority_is_right(responses: Sequence[JudgedResponse]) -> float:
    """Return whether the answer that most samples of a problem give is right: 1 or 0, between them for a tie.

    All right answers are one answer. Wrong ones are equal if their normalised texts are. Samples without an answer have
    no vote. A tie is drawn at random, and this is the expectation.
    """
    votes = Counter(
        True if each.verdict is Verdict.CORRECT else normalize_answer(each.extracted)
        for each in responses
        if each.extracted is not None
    )
    tied = [answer for answer, count in votes.items() if count == max(votes.values())]
    return tied.count(True) / len(tied) if tied else 0.0


def length_quantiles(responses: Sequence[JudgedResponse]) -> dict[str, list[float]]:
    """Return the tokens of responses at `LENGTH_QUANTILES`: of all, and by verdict."""
    lengths = {"all": [each.tokens for each in responses]}
    for each in responses:
        if each.verdict is not None:
            lengths.setdefault(each.verdict.value, []).append(each.tokens)
    return {name: np.quantile(tokens, LENGTH_QUANTILES).tolist() for name, tokens in lengths.items()}


def verdict_counts(responses: Sequence[JudgedResponse]) -> dict[str, int]:
    """Return how often each verdict was given, including those never given; empty if nothing was judged."""
    counts = Counter(response.verdict for response in responses if response.verdict is not None)
    return {verdict.value: counts[verdict] for verdict in Verdict if verdict is not Verdict.UNJUDGED} if counts else {}


def truncated_share(responses: Sequence[JudgedResponse]) -> float:
    """Return the share of responses that were cut off at the longest length."""
    return sum(response.finish_reason == "length" for response in responses) / len(responses)
