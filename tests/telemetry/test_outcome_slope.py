"""Whether the teacher points to right answers: figures against all outcomes, errors against redraws, words in a run."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from iterations import finished_iteration
from only_teacher import only
from rich.console import Console

from spot_async import SamplingConfig
from spot_async.cli.runs import show_outcome
from spot_async.policies.opd import OpdPolicy
from spot_async.run_directory.layout import NO_ADVICE, RunDirectory, row_bytes
from spot_async.run_directory.reading import RunFiles
from spot_async.running.summary import TrainOutcome
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.failures import IterationWarning
from spot_async.telemetry.outcome_slope import OutcomeHistory, opinion, outcome_metrics, outcome_words, ratio_sums
from spot_async.telemetry.run_log import RunLog
from spot_async.testing.services import SimulatedStudent, SimulatedTeacher, SimulatedVerifier
from spot_async.testing.simulation import make_policy, make_run, simulated_prompts
from spot_async.tools.inspect.report import learning_section, read_report
from spot_async.types import Sample, Verdict

VOCAB, TOKENS = 3, 2
RESPONSES = list(itertools.product(range(VOCAB), repeat=TOKENS))
Array = np.ndarray[Any, Any]


class TinyProblem:
    """A problem whose few possible responses have known probabilities under student and teacher, and verdicts."""

    def __init__(self, seed: int, *, shift: float = 0.0, tier: str = "t", category: str | None = None) -> None:
        """`shift` moves the teacher towards right answers."""
        self.name, self.tier, self.category = f"p{seed}", tier, category
        rng = np.random.default_rng(seed)
        self.right = rng.random(len(RESPONSES)) < 0.4
        self.right[0] = not self.right.all()
        first = rng.normal(size=VOCAB)
        second = rng.normal(size=(VOCAB, VOCAB))
        gain = np.array([self.right[VOCAB * v : VOCAB * v + VOCAB] for v in range(VOCAB)]) * shift
        self.student = (_log_softmax(first), _log_softmax(second))
        moved = first + gain.mean(1) + rng.normal(scale=0.3, size=VOCAB)
        self.teacher = (_log_softmax(moved), _log_softmax(second + gain))

    def logprobs(self, model: tuple[Array, Array], response: tuple[int, ...]) -> Array:
        a, b = response
        return np.array([model[0][a], model[1][a, b]])

    @property
    def chances(self) -> Array:
        return np.array([np.exp(self.logprobs(self.student, each).sum()) for each in RESPONSES])

    @property
    def ratios(self) -> Array:
        """log p_T / p_S of each token of each response, (9, 2)."""
        return np.array([self.logprobs(self.teacher, r) - self.logprobs(self.student, r) for r in RESPONSES])

    def covariance(self, opinions: Array) -> float:
        p, r = self.chances, self.right
        return float(p @ (r * opinions) - (p @ r) * (p @ opinions))

    @property
    def slope(self) -> float:
        return self.covariance(self.ratios.sum(1))

    @property
    def gain(self) -> float:
        """sum_t sum_v (p_T - p_S) V, from the values of all prefixes."""
        right = self.right.reshape(VOCAB, VOCAB)
        first, second = (np.exp(each) for each in self.student)
        of_teacher, then = (np.exp(each) for each in self.teacher)
        values = (second * right).sum(1)
        return float((of_teacher - first) @ values + first @ ((then - second) * right).sum(1))

    def sample(self, index: int) -> Sample:
        response = RESPONSES[index]
        record = {
            "problem_id": self.name,
            "tier": self.tier,
            "category": self.category,
            "verdict": "correct" if self.right[index] else "wrong",
            "teacher_logprobs": self.logprobs(self.teacher, response),
            "behavior_logprobs": self.logprobs(self.student, response),
        }
        return Sample(supervision=None, metrics={}, record=record)

    def draw(self, rng: np.random.Generator, count: int = 1) -> list[Sample]:
        return [self.sample(index) for index in rng.choice(len(RESPONSES), count, p=self.chances)]

    def nucleus(self, top_p: float) -> Array:
        """The chances of responses (9,) whose tokens are sampled from the nuclei of the student's distributions."""

        def cut(logprobs: Array) -> Array:
            first = np.argsort(-logprobs)
            chances = np.exp(logprobs)
            chances[first[1:][np.cumsum(chances[first])[:-1] >= top_p]] = 0.0
            return chances / chances.sum()

        first, second = cut(self.student[0]), np.array([cut(row) for row in self.student[1]])
        return np.array([first[a] * second[a, b] for a, b in RESPONSES])


def _log_softmax(logits: Array) -> Array:
    found: Array = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return found


def expected(name: str, *problems: TinyProblem) -> float:
    """Return what a figure is on average over all outcomes of a response for each of these problems, which may be one
    problem several times. Where all verdicts are equal it counts as 0.
    """
    total = 0.0
    for indices in itertools.product(range(len(RESPONSES)), repeat=len(problems)):
        chance = np.prod([each.chances[i] for each, i in zip(problems, indices, strict=True)])
        found = outcome_metrics([each.sample(i) for each, i in zip(problems, indices, strict=True)])
        total += chance * found.get(f"teacher/{name}", 0.0)
    return total


def test_figures_of_a_problems_responses_are_those_of_all_its_outcomes():
    problem = TinyProblem(1, shift=1.0)
    assert expected("outcome_slope", problem, problem) == pytest.approx(problem.slope, abs=1e-5)
    assert expected("opd_gain", problem, problem, problem) == pytest.approx(problem.gain, abs=1e-5)
    # What they promise: the accuracy gained by a small step.
    steps = problem.chances * np.exp(1e-6 * problem.ratios.sum(1))
    moved = (steps / steps.sum()) @ problem.right - problem.chances @ problem.right
    assert problem.slope == pytest.approx(moved / 1e-6, rel=1e-4)


def test_of_single_responses_the_gain_is_unbiased_and_the_slope_has_differences_between_problems():
    one, other = TinyProblem(1, shift=1.0), TinyProblem(2, shift=0.3)
    assert expected("opd_gain", one, other) == pytest.approx((one.gain + other.gain) / 2, abs=1e-5)
    accuracy = [each.chances @ each.right for each in (one, other)]
    distance = [each.chances @ each.ratios.sum(1) for each in (one, other)]
    between = (accuracy[0] - accuracy[1]) * (distance[0] - distance[1]) / 2
    assert abs(between) > 1e-3
    assert expected("outcome_slope", one, other) == pytest.approx((one.slope + other.slope) / 2 + between, abs=1e-5)


def test_of_a_nucleus_no_gain_is_said_and_the_slope_is_what_a_step_from_that_nucleus_gains():
    problem = TinyProblem(2, shift=1.0)
    chances = problem.nucleus(0.8)
    assert 1 < (chances > 0).sum() < len(RESPONSES)
    slope = 0.0
    for one, other in itertools.product(np.flatnonzero(chances).tolist(), repeat=2):
        samples = [problem.sample(one), problem.sample(other)]
        for sample in samples:
            sample.record["top_p"] = 0.8
        found = outcome_metrics(samples)
        assert not any("opd_gain" in name for name in found)
        slope += chances[one] * chances[other] * found.get("teacher/outcome_slope", 0.0)
    steps = chances * np.exp(1e-6 * problem.ratios.sum(1))
    moved = ((steps / steps.sum()) - chances) @ problem.right
    assert slope == pytest.approx(moved / 1e-6, abs=1e-5)


def nucleus_batch(rng: np.random.Generator, responses: int) -> list[Sample]:
    samples = []
    for seed in range(100):
        problem = TinyProblem(seed, shift=1.0)
        for index in rng.choice(len(RESPONSES), responses, p=problem.nucleus(0.8)):
            samples.append(problem.sample(index))
            samples[-1].record["top_p"] = 0.8
    return samples


def test_of_nuclei_words_and_warnings_rest_on_several_responses_a_prompt_or_say_that_nothing_is_known():
    rng = np.random.default_rng(3)
    one, four = ([nucleus_batch(rng, responses) for _ in range(4)] for responses in (1, 4))
    single, several = (
        outcome_words([{"iteration": i, **outcome_metrics(batch)} for i, batch in enumerate(batches)])
        for batches in (one, four)
    )
    assert single == (
        "whether the teacher points to right answers is not known: with sampling.top_p below 1 that takes several "
        "responses a prompt"
    )
    assert several.startswith("the teacher points to right answers: +")
    assert "OPD gains" not in several
    assert warnings(OutcomeHistory([]), *one * 5) == []
    # A run that was begun by a version which said a gain has said it of some iterations only.
    rows = [{"iteration": 0, **outcome_metrics(batches([1.0], 4)[0])}, {"iteration": 1, **outcome_metrics(four[0])}]
    assert "OPD gains" not in outcome_words(rows)


@pytest.mark.parametrize(("top_p", "said"), [(1.0, True), (0.8, False)])
def test_a_run_knows_how_it_samples(tmp_path, top_p, said):
    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "command": "train"}))
    sampling = SamplingConfig(top_p=top_p, temperature=0.7, max_response_tokens=64)
    run = make_run(make_policy(OpdPolicy), prompts=simulated_prompts(problems=200), iterations=2, sampling=sampling)
    run.stages.events.subscribe(RunLog(RunDirectory(tmp_path), run.stages))
    run.finish()
    for row in RunFiles(tmp_path).metrics():
        assert "teacher/outcome_slope" in row
        assert ("teacher/opd_gain" in row) == said
    assert {each.record.get("top_p", 1.0) for each in run.samples} == {top_p}


def test_single_responses_of_different_tiers_are_not_compared():
    rng = np.random.default_rng(0)
    easy = [TinyProblem(seed, tier="easy") for seed in range(8)]
    hard = [TinyProblem(seed, tier="hard") for seed in range(8, 16)]
    samples = [sample for each in (*easy, *hard) for sample in each.draw(rng)]
    before = outcome_metrics(samples)
    for sample in samples:
        if sample.record["tier"] == "hard":  # the teacher is far from the student there, whatever the verdict
            sample.record["teacher_logprobs"] -= 5.0
    assert outcome_metrics(samples)["teacher/outcome_slope"] == pytest.approx(before["teacher/outcome_slope"])
    lonely = outcome_metrics([easy[0].sample(0), hard[0].sample(0)])
    assert lonely["teacher/right_responses"] + lonely["teacher/wrong_responses"] == 0
    assert "teacher/outcome_slope" not in lonely


@pytest.mark.parametrize("responses", [1, pytest.param(4, marks=pytest.mark.long)])
def test_errors_are_those_of_redrawn_batches(responses):
    rng, held, errors, values = np.random.default_rng(7), {}, [], []
    problems = [TinyProblem(seed, shift=0.8, tier="ab"[seed % 2]) for seed in range(2000)]
    names = ("opd_gain",) if responses == 1 else ("outcome_slope", "opd_gain", "agreement")
    true = {
        "outcome_slope": np.mean([each.slope for each in problems]),
        "opd_gain": np.mean([each.gain for each in problems]),
        "agreement": np.mean([each.chances @ (np.abs(each.ratios) < 0.1).mean(1) for each in problems]),
    }
    for _ in range(300):
        batch = rng.choice(problems, 64 // responses, replace=False)
        found = outcome_metrics([sample for each in batch for sample in each.draw(rng, responses)])
        for name in names:
            value, error = found[f"teacher/{name}"], found[f"teacher/{name}_standard_error"]
            held.setdefault(name, []).append(abs(value - true[name]) < 2 * error)
        values.append(found["teacher/outcome_slope"])
        errors.append(found["teacher/outcome_slope_standard_error"])
    assert {name: 0.9 < np.mean(each) < 0.99 for name, each in held.items()} == dict.fromkeys(names, True)
    assert np.mean(np.square(errors)) == pytest.approx(np.var(values), rel=0.25)


def test_a_sample_whose_record_has_chunks_is_counted_by_them():
    record = {"problem_id": "p", "verdict": "correct", "behavior_logprobs": [-1.0, -1.0, -2.0]}
    said = {"teacher_logprobs": [-0.5, -0.5, -2.0]}
    for chunks, expected in (({}, np.expm1(0.5) * 2), ({"teacher_chunks": [0, 0, 1]}, np.expm1(1.0))):
        found = opinion(record, said | chunks)
        assert found is not None
        assert found.sums.excess == pytest.approx(expected)
    assert opinion(record, said | {"teacher_chunks": [0]}) is None


def test_the_ratio_of_a_chunk_counts_as_that_of_a_token():
    """Its even parts would not: exp(d / 2) twice is not exp(d) once."""
    student, chunks = np.log([0.5, 0.25, 0.5, 0.9, 0.1]), np.array([0, 0, 1, 2, -1], np.int32)
    even = np.array([np.log(0.5) / 2, np.log(0.5) / 2, np.log(0.25), np.log(0.9), np.nan])
    found = ratio_sums(even, student, chunks)
    assert found.tokens == 3
    assert found.excess == pytest.approx((0.5 / 0.125 - 1) + (0.25 / 0.5 - 1))
    assert found.log_ratio == pytest.approx(np.log(4) + np.log(0.5))
    assert found.agreed == 1


def test_ratios_are_summed_over_tokens_that_both_models_know_and_large_ones_count_as_ten():
    teacher = np.array([np.log(0.5), np.log(0.9), np.nan, -np.inf, np.log(0.2)], np.float32)
    student = np.log(np.array([0.25, 0.01, 0.5, 0.5, 0.2], np.float32))
    found = ratio_sums(teacher, student)
    assert (found.tokens, found.agreed) == (3, 1)
    assert found.excess == pytest.approx(2.0 + 10.0 + 1.0 - 3)
    assert found.log_ratio == pytest.approx(np.log(2.0 * 90.0))


def test_agreement_counts_tokens_by_verdict():
    def sample(name: str, verdict: str, ratios: list[float]) -> Sample:
        student = np.full(len(ratios), -1.0)
        record = {
            "problem_id": name,
            "verdict": verdict,
            "behavior_logprobs": student,
            "teacher_logprobs": student + ratios,
        }
        return Sample(supervision=None, metrics={}, record=record)

    found = outcome_metrics(
        [
            sample("a", "correct", [0.0, 0.05, -0.3]),
            sample("b", "wrong", [2.0]),
            sample("c", "no_answer", [0.09, -0.09, 0.11, np.nan]),  # one that the teacher does not know
        ]
    )
    assert found["teacher/agreement"] == pytest.approx(4 / 7)
    assert found["teacher/agreement_right"] == pytest.approx(2 / 3)
    assert found["teacher/agreement_wrong"] == pytest.approx(2 / 4)
    assert "teacher/agreement_right_standard_error" not in found  # of one problem
    assert (found["teacher/right_responses"], found["teacher/wrong_responses"]) == (1, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "timeout"},
        {"verdict": "unjudged"},
        {"behavior_logprobs": np.full(2, np.nan)},  # written by others
        {"behavior_logprobs": None},
        {"teacher_logprobs": np.full(2, np.nan)},
        {"teacher_logprobs": None},
        {"teacher_logprobs": np.zeros(3)},  # of a third party, as the next one
        {"teacher_logprobs": [[-1.0], [-1.0, -2.0]], "verdict": ["right"]},
    ],
)
def test_what_has_no_verdict_or_is_not_the_students_is_left_out(changes):
    batch = TinyProblem(3).draw(np.random.default_rng(0), 8)
    other = Sample(supervision=None, metrics={}, record=TinyProblem(4).sample(0).record | changes)
    assert outcome_metrics([*batch, other]) == outcome_metrics(batch)
    assert outcome_metrics([other]) == {}
    assert outcome_metrics([Sample(supervision=None, metrics={}, record={})]) == {}


def test_each_category_has_its_own_figures_where_there_are_several():
    rng = np.random.default_rng(0)
    algebra, logic = (
        [TinyProblem(seed, category=name) for seed in range(s, s + 9)] for name, s in (("algebra", 0), ("logic", 9))
    )
    first, second = ([sample for each in problems for sample in each.draw(rng, 4)] for problems in (algebra, logic))
    both, only = outcome_metrics([*first, *second]), outcome_metrics(first)
    assert not any("algebra" in name for name in only)
    assert {name.replace("teacher/", "teacher/algebra/"): value for name, value in only.items()}.items() <= both.items()
    assert "teacher/logic/outcome_slope_standard_error" in both


def test_a_resumed_run_finds_the_same():
    """Samples that waited in the ledger come back rounded, as lists with null."""
    batch = TinyProblem(5).draw(np.random.default_rng(0), 8)
    for sample in batch:
        sample.record["teacher_logprobs"][0] = np.nan
    kept = [msgspec.structs.replace(each, record=msgspec.json.decode(row_bytes(each.record))) for each in batch]
    assert kept[0].record["teacher_logprobs"][0] is None
    assert outcome_metrics(kept) == outcome_metrics(batch)


def warnings(history: OutcomeHistory, *batches: list[Sample]) -> list[str]:
    said: list[str] = []
    listener = IterationWarning(NO_ADVICE, history.warning, said.append)
    for iteration, batch in enumerate(batches, start=1):
        listener.on(finished_iteration(iteration, batch))
    return said


def batches(shifts: list[float], responses: int = 1) -> list[list[Sample]]:
    rng = np.random.default_rng(11)
    problems = {shift: [TinyProblem(seed, shift=shift) for seed in range(200)] for shift in set(shifts)}
    return [
        [sample for each in rng.choice(problems[shift], 64) for sample in each.draw(rng, responses)] for shift in shifts
    ]


@pytest.mark.parametrize("responses", [1, 4])
def test_a_teacher_that_does_not_help_is_warned_of_once_and_one_that_helps_never(responses):
    assert warnings(OutcomeHistory([]), *batches([0.5] * 40, responses)) == []
    (line,) = warnings(OutcomeHistory([]), *batches([-0.2] * 20, responses))
    number, _, words = line.partition(": this teacher's advice does not point to right answers: ")
    assert int(number.removeprefix("iteration ")) > 6 // responses  # a few responses show nothing
    assert "points a response" in words


def test_a_teacher_that_has_nothing_left_to_teach_is_said_to_have_once():
    (line,) = warnings(OutcomeHistory([]), *batches([1.0] * 20 + [0.0] * 30, 2))
    assert "the teacher has nothing left to teach: it no longer points to right answers" in line
    assert int(line.split()[1].rstrip(":")) > 21


def test_a_resumed_run_knows_the_iterations_before_and_forgets_those_that_it_makes_again():
    before = batches([1.0] * 20 + [0.0] * 30, 2)
    rows = [{"iteration": float(i), **outcome_metrics(batch)} for i, batch in enumerate(before, start=1)]
    assert OutcomeHistory(rows[:-1]).warning(finished_iteration(50, before[-1]))
    assert not OutcomeHistory(rows).warning(finished_iteration(10, before[9]))


def test_too_few_responses_say_how_many_they_are():
    problem = TinyProblem(1)
    right, wrong = int(np.argmax(problem.right)), int(np.argmin(problem.right))
    row = outcome_metrics([problem.sample(right)] * 3 + [problem.sample(wrong)] * 5)
    assert outcome_words([{"iteration": 1, **row}] * 2) == (
        "whether the teacher points to right answers is not known: 6 right and 10 wrong responses could be compared, "
        "and 10 of each are needed"
    )
    assert outcome_words([{"iteration": 1, "rollout/accuracy": 0.5}]) == ""  # a policy without a teacher


def test_the_report_shows_each_categorys_slope_and_escapes_its_name():
    rows = [{"iteration": i, "teacher/outcome_slope": 0.1, "teacher/a/<b>\u202e/outcome_slope": 0.2} for i in (1, 2)]
    (plot,) = learning_section(rows, None).plots
    assert "a/&lt;b&gt;\ufffd" in plot.figure


def test_a_batch_of_equal_verdicts_has_no_slope_and_counts_as_0_over_the_run():
    problem = TinyProblem(1)
    wrong = outcome_metrics([problem.sample(int(np.argmin(problem.right)))] * 40)
    assert not any("slope" in name or "gain" in name for name in wrong)
    mixed = outcome_metrics(
        [sample for seed in range(10) for sample in TinyProblem(seed).draw(np.random.default_rng(1), 4)]
    )
    alone, both = (outcome_words(rows) for rows in ([mixed], [mixed, wrong]))
    slope = mixed["teacher/outcome_slope"]
    told = [float(words.partition(" right answers: ")[2].split()[0]) for words in (alone, both)]
    assert told == pytest.approx([slope, slope / 2], abs=0.005)


def test_a_run_says_it_on_the_console_at_its_end_and_in_its_report(tmp_path, capsys):
    class Student(SimulatedStudent):
        async def generate(self, *args: Any, **rest: Any) -> Any:
            found = await super().generate(*args, **rest)
            return msgspec.structs.replace(found, logprobs=np.full(len(found.token_ids), -0.5, np.float32))

    class Teacher(SimulatedTeacher):
        """Prefers responses that end before their limit by an even number of tokens, which are the right ones."""

        async def score(self, request: Any, *, top_k: int) -> Any:
            scores = await super().score(request, top_k=top_k)
            right = len(request.response_ids) % 2 == 0
            total = 2.0 if right else -2.0
            logprobs = np.full(len(request.response_ids), -0.5 + total / len(request.response_ids), np.float32)
            return msgspec.structs.replace(scores, logprobs=np.minimum(logprobs, 0.0))

    class Verifier(SimulatedVerifier):
        async def verify(self, problem: Any, response_text: str, *, deadline: float) -> Verdict:
            return Verdict.CORRECT if len(response_text.split()) % 2 == 0 else Verdict.WRONG

    (tmp_path / "run.json").write_text(json.dumps({"format": 1, "command": "train"}))
    (tmp_path / "config.yaml").write_text("policy: {kind: opd}\n")
    directory, screen = RunDirectory(tmp_path), io.StringIO()
    run = make_run(
        make_policy(OpdPolicy),
        student=Student(),
        teachers=only(Teacher()),
        verifier=Verifier(),
        prompts=simulated_prompts(problems=200),
        batch_size=32,
        iterations=4,
    )
    run.stages.events.subscribe(RunLog(directory, run.stages), RunConsole(Console(file=screen, width=200), 4))
    run.finish()
    rows = RunFiles(tmp_path).metrics()
    for row in rows:
        said = f"teacher to right answers {row['teacher/outcome_slope']:+.2f} ± "
        assert said in screen.getvalue()
    show_outcome(TrainOutcome(tmp_path, len(rows), None, None, None, {}), tmp_path)
    assert f"The {outcome_words(rows)[4:]}" in capsys.readouterr().out.replace("\n", " ")
    report = read_report(RunFiles(tmp_path))
    words = dict(report.facts)["outcome slope"]
    assert words == outcome_words(rows)
    assert words.startswith("the teacher points to right answers: +0.")
    assert "(128 responses); to first order OPD gains +" in words
    learning = next(each for each in report.sections if each.title == "Learning")
    assert {"Does the teacher point to right answers?", "Agreement with the teacher"} <= {
        p.title for p in learning.plots
    }
