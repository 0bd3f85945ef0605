"""Evaluation: who is asked what, and what the table says of it."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from spot_async.config import EvaluationConfig
from spot_async.evaluation.runner import EvaluationResult, JudgedResponse, evaluate, paired_change
from spot_async.prompts import PromptSource
from spot_async.seeds import derive_seed
from spot_async.simulation.virtual_time import run_on_virtual_time
from spot_async.telemetry.console import evaluation_table, unverified_note
from spot_async.types import Generation, Problem, Verdict


def result(table, tiers):
    """From a table of 1 (correct), 0 (wrong) and None (could not be judged)."""
    verdicts = {1: Verdict.CORRECT, 0: Verdict.WRONG, None: Verdict.TIMEOUT}
    return EvaluationResult(
        tiers=tuple(tiers),
        responses=tuple(
            tuple(
                JudgedResponse(
                    problem_id=str(j), sample=i, verdict=verdicts[cell], tokens=3, finish_reason="stop", response=""
                )
                for i, cell in enumerate(row)
            )
            for j, row in enumerate(table)
        ),
    )


def printed(table):
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    return console.file.getvalue()


def test_figures_and_errors_are_over_problems_and_missing_evidence_is_incorrect_and_said():
    before = result([[1, 0], [0, 0], [1, 1], [None, 0]], ["easy", "easy", "hard", "hard"])
    figures = before.figures("all")
    assert (figures.problems, figures.avg, figures.pass_) == (4, 0.375, 0.5)
    assert figures.avg_error == pytest.approx(np.std([0.5, 0, 1, 0], ddof=1) / 2)
    assert before.figures("easy").avg == 0.25
    assert "1 responses could not be judged" in unverified_note(before)
    assert unverified_note(result([[1, 0]], ["easy"])) is None


def test_the_change_is_paired_on_problems():
    before = result([[1, 0], [0, 0], [1, 1]], [None] * 3)
    after = result([[1, 1], [1, 0], [1, 1]], [None] * 3)
    change, error = paired_change(before, after, "all")
    assert change == pytest.approx(1 / 3)
    assert error == pytest.approx(np.std([0.5, 0.5, 0], ddof=1) / np.sqrt(3))


def test_the_table_shows_every_tier_before_and_after():
    text = printed(
        evaluation_table(result([[1, 0], [0, 0]], ["easy", "hard"]), result([[1, 1], [0, 1]], ["easy", "hard"]))
    )
    for expected in ("easy", "hard", "all", "Avg@2", "Pass@2", "before", "after", "change", "+50.0 ±0.0"):
        assert expected in text
    assert "25.0 ±25.0" in text


def test_each_sample_is_asked_for_with_its_own_seed_and_failures_surface():
    sources = [
        PromptSource(problem=Problem(id=str(j), text="", answer=str(j)), token_ids=np.array([j], np.int32))
        for j in range(5)
    ]
    seeds, peak, running, asked = [], 0, 0, Counter()

    class Student:
        async def generate(self, prompt_ids, sampling, **rest):
            nonlocal peak, running
            running += 1
            peak = max(peak, running)
            seeds.append(sampling.seed)
            assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.9, 0.8, 77)
            assert sampling.stop_token_ids == (1, 6)
            assert sampling.seed == derive_seed(42, int(prompt_ids[0]), asked[int(prompt_ids[0])])
            asked[int(prompt_ids[0])] += 1
            await asyncio.sleep(1 + sampling.seed % 3)
            running -= 1
            ids = np.array([int(prompt_ids[0]) if len(seeds) % 2 else 99], np.int32)
            return Generation(token_ids=ids, logprobs=np.zeros(1, np.float32), finish_reason="stop", version_spans=())

    class Exact:
        hesitated = False

        async def verify(self, problem, text, *, deadline):
            if not self.hesitated:
                self.hesitated = True
                return Verdict.ERROR  # missing evidence: asked once more
            return Verdict.CORRECT if text == problem.answer else Verdict.WRONG

    progress = []
    config = EvaluationConfig(
        problems="",
        samples=4,
        temperature=0.9,
        max_response_tokens=77,
        concurrency=3,
        verifier={"kind": "boxed_match"},
    )
    found = run_on_virtual_time(
        evaluate(
            sources,
            config,
            generator=Student(),
            verifier=Exact(),
            vocabulary=SimpleNamespace(end_token_ids=(1, 6), decode=lambda ids: str(ids[0])),
            on_progress=lambda done, total: progress.append((done, total)),
        )
    )
    assert len(set(seeds)) == 20
    assert peak == 3
    assert progress[-1] == (20, 20)
    assert found.correct.shape == (5, 4)
    assert found.count(Verdict.ERROR) == 0
