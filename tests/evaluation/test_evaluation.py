"""Evaluation: which responses are asked for, and what the table shows."""

from __future__ import annotations

import asyncio
import io
import re
from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console, Group
from rich.text import Text

from spot_async.base.seeds import derive_seed
from spot_async.base.tasks import root_cause
from spot_async.config import EvaluationConfig
from spot_async.errors import BudgetSpentError, ConfigError
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.evaluation.metrics import EvaluationFigures
from spot_async.evaluation.response_log import JudgedResponse
from spot_async.evaluation.results import BenchmarkResult, EvaluationResult, majority_is_right, paired_change
from spot_async.evaluation.runner import ResponseSampler, collected, evaluate
from spot_async.running.summary import change_summary, evaluation_summary
from spot_async.telemetry.evaluations import figures_table
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.tools.inspect.held_out import result_table
from spot_async.types import Generation, Judgement, Problem, PromptSource, Verdict
from spot_async.verification import BoxedMatch, MathMatch

BOXED = BoxedMatch.Settings()


def test_the_majority_counts_right_answers_as_one_and_a_tie_by_its_share():
    def row(*cells):  # "+" is right, however it is spelled; another text is a wrong answer, None no answer
        return [
            JudgedResponse(
                problem_id="p", sample=i, tokens=10 * (i + 1), finish_reason="stop", response="",
                verdict=Verdict.NO_ANSWER if cell is None else Verdict.CORRECT if cell[0] == "+" else Verdict.WRONG,
                extracted=cell,
            )
            for i, cell in enumerate(cells)
        ]  # fmt: skip

    votes = [
        (["+1/2", "+0.5", "3", None], 1.0),
        (["3", "3.0", r"\text{3}", "+1"], 0.0),  # by their normalised texts these wrong ones are one
        (["+1", "7", None, None], 0.5),
        (["+1", "7", "8", None], 1 / 3),
        ([None, None, None, None], 0.0),
    ]
    for cells, expected in votes:
        assert majority_is_right(row(*cells)) == pytest.approx(expected), cells
    found = BenchmarkResult(tiers=(None,) * 5, responses=tuple(tuple(row(*cells)) for cells, _ in votes))
    figures = evaluation_file(EvaluationResult((found,))).benchmarks["problems"]
    assert figures.maj.value == pytest.approx(sum(expected for _, expected in votes) / 5)
    assert re.search(r"Avg@4 +Pass@4 +maj@4", printed(figures_table(evaluation_file(EvaluationResult((found,))))))
    tokens = [each.tokens for responses in found.responses for each in responses if each.verdict is Verdict.CORRECT]
    assert figures.lengths["correct"] == np.quantile(tokens, [0.1, 0.25, 0.5, 0.75, 0.9]).tolist()
    assert figures.lengths.keys() == {"all", "correct", "wrong", "no_answer"}


def test_what_stands_from_a_stop_text_on_is_cut_and_servers_get_the_sampling_keys():
    asked = []

    class Generator:
        async def generate(self, prompt_ids, sampling, **rest):
            asked.append(sampling.further)
            ids = np.arange(3, dtype=np.int32)
            return Generation(token_ids=ids, logprobs=np.zeros(3, np.float32), finish_reason="stop", version_spans=())

    config = EvaluationConfig(
        problems={"path": ""}, samples=1, top_k=20, min_p=0.05, presence_penalty=1.5, stop=["Problem:", "Question:"]
    )
    source = PromptSource(problem=Problem(id="a", text="", answer="7"), token_ids=np.array([1], np.int32))
    text = "\\boxed{7}\n\nQuestion: what? \\boxed{8}\n\nProblem: \\boxed{9}"
    sampler = ResponseSampler(
        [Benchmark("one", [source], samples=1, max_response_tokens=7, verifier=BOXED)],
        config,
        generator=Generator(),
        verifiers={"one": BoxedMatch(BOXED)},
        vocabulary=SimpleNamespace(end_token_ids=(1,), decode=lambda ids: text),
    )
    (response,) = run_on_virtual_time(evaluate(sampler)).responses
    assert (response.response, response.extracted, response.verdict) == ("\\boxed{7}\n\n", "7", Verdict.CORRECT)
    assert asked == [(("top_k", 20), ("min_p", 0.05), ("presence_penalty", 1.5))]


@pytest.mark.parametrize(
    ("writes", "response", "asked"),
    [
        # Thinking that has not ended is ended, and the answer has what is left of the response's tokens.
        (["5 6 7", "8 2"], "5 6 7 3 8 2", [("", 3), ("5 6 7 3", 4)]),
        # It ended in time, but the response has not: it is continued as it is.
        (["5 3 7", "8 9 10 11 12"], "5 3 7 8 9 10 11 12", [("", 3), ("5 3 7", 5)]),
        (["5 3 2"], "5 3 2", [("", 3)]),
    ],
)
def test_thinking_is_ended_after_so_many_tokens(writes, response, asked):
    """Token 2 ends a response, and 3 is `</think>`."""
    found, texts, seeds = [], iter(writes), []

    class Generator:
        async def generate(self, prompt_ids, sampling, **rest):
            found.append((" ".join(map(str, prompt_ids[1:])), sampling.max_tokens))
            seeds.append(sampling.seed)
            ids = np.array(next(texts).split()[: sampling.max_tokens], np.int32)
            reason = "stop" if ids[-1] == 2 else "length"
            return Generation(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), finish_reason=reason,
                              version_spans=())  # fmt: skip

    def text(ids):
        return " ".join("</think>" if i == 3 else str(i) for i in ids)

    source = PromptSource(problem=Problem(id="a", text="", answer="7"), token_ids=np.array([1], np.int32))
    sampler = ResponseSampler(
        [Benchmark("one", [source], samples=1, max_response_tokens=8, verifier=BOXED)],
        EvaluationConfig(problems={"path": ""}, samples=1, thinking=True, thinking_tokens=3, max_response_tokens=8),
        generator=Generator(),
        verifiers={"one": BoxedMatch(BOXED)},
        vocabulary=SimpleNamespace(
            end_token_ids=(2,), decode=text, whole_text=text,
            encode=lambda text: np.array([3] if "</think>" in text else [], np.int32),
        ),
    )  # fmt: skip
    (judged,) = run_on_virtual_time(evaluate(sampler)).responses
    assert (judged.response, judged.tokens) == (response.replace("3", "</think>"), len(response.split()))
    assert judged.finish_reason == ("stop" if response.endswith(" 2") else "length")
    assert found == asked
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"thinking_tokens": 5}, "thinking_tokens=5: thinking is false"),
        ({"thinking_tokens": 9, "thinking": None, "max_response_tokens": 9}, "leaves nothing of max_response_tokens=9"),
        ({"thinking_tokens": 5, "thinking": True, "presence_penalty": 1.0}, "thinking_tokens makes two of one"),
        ({"template": "teacher"}, "give student, plain or a path that ends in .jinja"),
    ],
)
def test_a_thinking_budget_and_a_template_that_cannot_be_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        EvaluationConfig(problems={"path": ""}, **keys)


async def test_math_verifys_own_figure_is_shown_where_its_verdicts_are_others():
    """Of the same responses: `math` takes a relation for a set, and no value for another base's."""
    responses = {"(3,4]": r"\boxed{3<x\le4}", "43_5": r"\boxed{43_7}", "7": r"\boxed{7.0}", "8": r"\boxed{9}"}
    settings = MathMatch.Settings(workers=1, timeout_s=30.0)
    sources = [
        PromptSource(problem=Problem(id=str(i), text=text, answer=gold), token_ids=np.array([i], np.int32))
        for i, (gold, text) in enumerate(responses.items())
    ]

    class Generator:
        async def generate(self, prompt_ids, sampling, **rest):
            none = np.zeros(1, np.float32)
            return Generation(token_ids=prompt_ids, logprobs=none, finish_reason="stop", version_spans=())

    async with MathMatch(settings) as verifier:
        sampler = ResponseSampler(
            [Benchmark("one", sources, samples=1, max_response_tokens=7, verifier=settings)],
            EvaluationConfig(problems={"path": ""}, samples=1),
            generator=Generator(),
            verifiers={"one": verifier},
            vocabulary=SimpleNamespace(end_token_ids=(1,), decode=lambda ids: list(responses.values())[ids[0]]),
        )
        result = await evaluate(sampler)
    assert [each.verdict is Verdict.CORRECT for each in result.responses] == [True, False, True, False]
    others = [each.math_verify for each in result.responses]
    assert others == [Verdict.WRONG, Verdict.CORRECT, msgspec.UNSET, msgspec.UNSET]
    lines = [msgspec.json.encode(each) for each in result.responses]
    assert [b'"math_verify"' in line for line in lines] == [True, True, False, False]
    assert [msgspec.json.decode(line, type=JudgedResponse) for line in lines] == list(result.responses)
    figures = evaluation_file(result)
    assert figures.benchmarks["one"].math_verify == figures.benchmarks["one"].avg  # here they happen to be equal
    assert "one: 50.0" in printed(figures_table(figures))
    assert "by math_verify, which is other people's figure, and 50.0" in printed(figures_table(figures))
    assert figures.versions["latex2sympy2_extended"] == "1.11.0"
    assert benchmark_result([[1, 0]]).figures().math_verify is None


def benchmark_result(table, tiers=None, name="problems", **rest):
    """From a table of 1 (correct), 0 (wrong) and None (could not be judged)."""
    verdicts = {1: Verdict.CORRECT, 0: Verdict.WRONG, None: Verdict.TIMEOUT}
    responses = tuple(
        tuple(
            JudgedResponse(
                benchmark=name,
                problem_id=str(j),
                sample=i,
                verdict=verdicts[cell],
                tokens=3 + j,
                finish_reason="length" if cell is None else "stop",
                response="",
            )
            for i, cell in enumerate(row)
        )
        for j, row in enumerate(table)
    )
    return BenchmarkResult(tiers=tuple(tiers or [None] * len(table)), responses=responses, name=name, **rest)


def result(table, tiers=None):
    return EvaluationResult((benchmark_result(table, tiers),))


def evaluation_file(found):
    """`found` as `evaluation.json` gives it back."""
    figures = found.evaluation_figures(model="m", model_fingerprint="1", settings={"a": 1}, settings_fingerprint="2")
    return msgspec.json.decode(msgspec.json.encode(figures), type=EvaluationFigures)


def end_table(before, after=None):
    """What `train` prints at its end."""
    summary = {"before": evaluation_summary(before), "after": evaluation_summary(after)}
    summary["change"] = change_summary(before, after)
    found = result_table(summary, {}, evaluation_file(after or before))
    return Group(found.for_terminal(), Text(found.note))


def printed(table, width=140):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_figures_and_errors_are_over_problems_and_missing_evidence_is_incorrect_and_said():
    before = result([[1, 0], [0, 0], [1, 1], [None, 0]], ["easy", "easy", "hard", "hard"])
    figures = before.rows["all"]
    assert (figures.problems, figures.avg.value, figures.pass_at[2].value) == (4, 0.375, 0.5)
    assert figures.avg.standard_error == pytest.approx(np.std([0.5, 0, 1, 0], ddof=1) / 2)
    assert (figures.tokens, figures.mean_tokens.value, figures.truncated) == (36, 4.5, 1 / 8)
    assert figures.verdicts == {"correct": 3, "wrong": 4, "no_answer": 0, "timeout": 1, "error": 0}
    assert before.rows["easy"].avg.value == 0.25
    for table in (figures_table(evaluation_file(before)), end_table(before)):
        text = printed(table)
        assert "1 responses could not be judged" in text
        assert re.search(r"^ ?tier +n", text, re.M)
        assert "benchmark" not in text
    assert "could not be judged" not in printed(end_table(result([[1, 0]], ["easy"])))


@settings(max_examples=40)
@given(
    table=st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    data=st.data(),
)
def test_every_pass_at_k_is_the_share_of_subsets_with_a_correct_response(table, data):
    n = len(table[0])
    ks = data.draw(st.lists(st.integers(1, n), max_size=4))
    cells = [[int(cell) for cell in row] for row in table]
    found = benchmark_result(cells, pass_k=tuple(ks)).figures().pass_at
    assert list(found) == sorted({*ks, n})
    for k, estimate in found.items():
        subsets = [[any(subset) for subset in combinations(row, k)] for row in table]
        expected = [sum(each) / len(each) for each in subsets]
        assert estimate.value == pytest.approx(sum(expected) / len(expected))
        spread = np.std(expected, ddof=1) / np.sqrt(len(table)) if len(table) > 1 else None
        assert estimate.standard_error == (None if spread is None else pytest.approx(spread))


def test_the_macro_is_the_unweighted_mean_of_what_counts_for_it_with_independent_errors():
    found = EvaluationResult(
        (
            benchmark_result([[1, 1], [0, 0], [0, 0], [0, 0]], name="large", pass_k=(1,)),
            benchmark_result([[1, 0], [1, 1]], name="small", pass_k=(1,)),
            benchmark_result([[1], [1]], name="elsewhere", in_macro=False, note="judged by x, [/as] it is"),
            benchmark_result([[0], [0]], name="outputs", is_judged=False),
        )
    )
    figures = evaluation_file(found)
    large, small = figures.benchmarks["large"], figures.benchmarks["small"]
    assert figures.macro.benchmarks == ["large", "small"]
    assert figures.macro.avg.value == pytest.approx((0.25 + 0.75) / 2)
    errors = [each.avg.standard_error for each in (large, small)]
    assert figures.macro.avg.standard_error == pytest.approx(np.hypot(*errors) / 2)
    assert {k: each.value for k, each in figures.macro.pass_at.items()} == {1: 0.5, 2: (0.25 + 1) / 2}
    assert large.correct == {"0": 2, "1": 0, "2": 0, "3": 0}
    assert (figures.benchmarks["outputs"].avg, figures.benchmarks["outputs"].correct) == (None, {})
    text = printed(figures_table(figures))
    assert re.search(r"macro +50.0", text)
    assert re.search(r"^ benchmark +n", text, re.M)
    assert "elsewhere *" in text
    assert "* elsewhere: judged by x, [/as] it is" in text
    assert [*found.rows] == ["large", "small", "elsewhere", "outputs", "macro"]
    assert paired_change(found, found, "macro") == (0.0, 0.0)
    text = printed(end_table(found, found))
    assert "macro" in text
    assert "elsewhere (Pass@1) *" in text
    assert "* elsewhere: judged by x, [/as] it is" in text


def test_every_benchmark_reports_the_pass_at_k_of_the_mean_and_tables_say_which_k():
    table = {"many": [[1, 0, 0, 0], [0, 0, 0, 0]], "few": [[1, 0], [1, 1]]}
    planned, judged = [], []
    for name, rows in table.items():
        problems = [Problem(id=str(j), text="", answer="1") for j in range(len(rows))]
        sources = [PromptSource(problem=each, token_ids=np.array([1])) for each in problems]
        planned.append(Benchmark(name, sources, samples=len(rows[0]), max_response_tokens=7, verifier=BOXED))
        judged += [each for row in benchmark_result(rows, name=name).responses for each in row]
    found = collected(planned, {each.key: each for each in judged}, ())
    assert list(found.benchmarks[0].figures().pass_at) == [2, 4]
    assert re.search(r"many +2 +12.5.* +25.0.* +50.0", printed(figures_table(evaluation_file(found))))
    text = printed(end_table(found))
    assert re.search(r"benchmark +n +before +before", text)
    assert re.search(r"many \(Pass@4\) +2 +12.5 ±12.5 +50.0 ±50.0", text)
    rows = evaluation_summary(found)["tiers"]
    assert {name: (row["pass_k"], row["pass"]) for name, row in rows.items()} == {
        "many": (4, 0.5), "few": (2, 1.0), "macro": (2, 0.625)
    }  # fmt: skip


def test_the_change_is_paired_on_problems():
    before = result([[1, 0], [0, 0], [1, 1]])
    after = result([[1, 1], [1, 0], [1, 1]])
    change, error = paired_change(before, after, "all")
    assert change == pytest.approx(1 / 3)
    assert error == pytest.approx(np.std([0.5, 0.5, 0], ddof=1) / np.sqrt(3))
    assert change_summary(before, after) == {"all": {"avg": change, "avg_standard_error": error}}
    assert change_summary(None, after) is None


def test_the_table_shows_every_tier_before_and_after():
    text = printed(end_table(result([[1, 0], [0, 0]], ["easy", "hard"]), result([[1, 1], [0, 1]], ["easy", "hard"])))
    for expected in ("easy", "hard", "all", "Avg@2", "Pass@2", "before", "after", "change", "+50.0 ±0.0"):
        assert expected in text
    assert "25.0 ±25.0" in text
    long = result([[1, 0], [0, 0]], ["easy", "a-tier-of-a-very-long-name-2025"])
    for table in (end_table(long, long), figures_table(evaluation_file(long))):
        assert "…" not in printed(table, width=60)
    odd = result([[1, 0], [0, 0]], ["easy", "[/hard]\x1b[2J"])  # a problem file's own words
    assert printed(figures_table(evaluation_file(odd))).count("[/hard]\u241b[2J") == 2
    assert printed(end_table(odd)).count("[/hard]\u241b[2J") == 1


def test_each_sample_is_asked_for_with_its_own_seed_and_failures_surface():
    sources = [
        PromptSource(problem=Problem(id=str(j), text="", answer=str(j)), token_ids=np.array([j], np.int32))
        for j in range(5)
    ]
    benchmarks = [Benchmark("one", sources, samples=4, max_response_tokens=77, verifier=BOXED)]
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
        problems={"path": ""},
        temperature=0.9,
        concurrency=3,
        verifier={"kind": "boxed_match"},
    )
    found = run_on_virtual_time(
        evaluate(
            ResponseSampler(
                benchmarks,
                config,
                generator=Student(),
                verifiers={"one": Exact()},
                vocabulary=SimpleNamespace(end_token_ids=(1, 6), decode=lambda ids: str(ids[0])),
            ),
            on_progress=lambda done, total: progress.append((done, total)),
        )
    )
    assert len(set(seeds)) == 20
    assert peak == 3
    assert progress[-1] == (20, 20)
    assert found.benchmarks[0].correct.shape == (5, 4)
    assert Verdict.ERROR not in [each.verdict for each in found.responses]


def test_a_verifier_that_gives_numbers_alone_is_refused_since_nothing_would_be_counted():
    class Grades:
        async def verify(self, problem, text, *, deadline):
            return Judgement(Verdict.UNJUDGED, 0.9)

    class Student:
        async def generate(self, prompt_ids, sampling, **rest):
            ids = np.zeros(1, np.int32)
            return Generation(token_ids=ids, logprobs=np.zeros(1, np.float32), finish_reason="stop", version_spans=())

    sources = [PromptSource(problem=Problem(id="p", text="", answer=""), token_ids=np.zeros(1, np.int32))]
    sampler = ResponseSampler(
        [Benchmark("poems", sources, samples=1, max_response_tokens=1, verifier=BOXED)],
        EvaluationConfig(problems={"path": ""}),
        generator=Student(),
        verifiers={"poems": Grades()},
        vocabulary=SimpleNamespace(end_token_ids=(1,), decode=str),
    )
    with pytest.raises(ExceptionGroup) as caught:
        run_on_virtual_time(evaluate(sampler))
    refusal = root_cause(caught.value)
    assert isinstance(refusal, ConfigError)
    assert str(refusal).startswith("evaluation.benchmarks.poems: its verifier called a response to problem 'p' neither")


def test_a_budget_that_is_spent_ends_it_once_what_is_under_way_has_been_kept():
    sources = [PromptSource(problem=Problem(id=str(j), text="", answer="1"), token_ids=np.array([j])) for j in range(9)]
    config, kept = EvaluationConfig(problems={"path": ""}, concurrency=4, verifier={"kind": "boxed_match"}), []

    class Student:
        async def generate(self, prompt_ids, sampling, **rest):
            if prompt_ids[0] >= 4:
                raise BudgetSpentError("no money")
            await asyncio.sleep(1 + int(prompt_ids[0]))
            ids = np.array([1], np.int32)
            return Generation(token_ids=ids, logprobs=np.zeros(1, np.float32), finish_reason="stop", version_spans=())

    async def keep(response):
        kept.append(response.problem_id)

    with pytest.raises(BudgetSpentError, match="no money"):
        run_on_virtual_time(
            evaluate(
                ResponseSampler(
                    [Benchmark("one", sources, samples=1, max_response_tokens=7, verifier=BOXED)],
                    config,
                    generator=Student(),
                    verifiers={"one": BoxedMatch(BOXED)},
                    vocabulary=SimpleNamespace(end_token_ids=(1,), decode=str),
                ),
                keep=keep,
            )
        )
    assert kept == ["0", "1", "2", "3"]
