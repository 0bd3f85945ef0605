"""`spot-async check` of problems: overlaps, golds that cannot be right, repeated rows, and what it shows of them."""

from __future__ import annotations

import pytest
from problem_files import CANONICAL, INSTRUCTION, needs_data, read, write
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.data.problem_set import count_identical, find_overlaps
from spot_async.tools.check.problems import check_golds, is_prose
from spot_async.types import Problem, Verdict
from spot_async.verification import BoxedMatch, math_verify


def numbered(words, answer="1", name="e"):
    return Problem(id=name, text=" ".join(words), answer=answer)


def test_half_of_an_evaluation_problem_inside_one_training_problem_is_an_overlap():
    words = [f"w{i}" for i in range(32)]  # 20 runs of 13
    evaluation = [numbered(words)]
    first_half, second_half = words[:22], words[10:]  # 10 runs each
    assert not find_overlaps([numbered(words[:21])], evaluation)  # 9 of 20
    (overlap,) = find_overlaps([numbered(first_half, "1.0", "t")], evaluation)
    assert (overlap.share, overlap.training.id, overlap.has_equal_answer) == (0.5, "t", True)
    (overlap,) = find_overlaps([numbered(["X,", *words[1:], "y"], "7")], evaluation)
    assert (overlap.share, overlap.has_equal_answer) == (0.95, False)
    # two problems with 9 runs each do not make one that holds 18
    assert not find_overlaps([numbered(first_half[:21]), numbered(second_half[1:])], evaluation)
    assert find_overlaps([numbered(["W0!", *(w.upper() + "," for w in words[1:])])], evaluation)  # words, not spelling
    assert not find_overlaps([numbered([*words[:11], "x"])], [numbered(words[:12])])  # too short to tell


def test_identical_problems_are_found_whatever_their_length():
    training = [
        numbered(["What", "is", "1+1?"], "2", "t"),
        Problem(id="c", text="Which?", answer="A", choices=("x", "y")),
    ]
    evaluation = [
        numbered(["1", "+", "1"], name="other"),
        Problem(id="short", text="What  is\n1+1?", answer="3"),
        Problem(id="other choices", text="Which?", answer="A", choices=("x", "z")),
        Problem(id="same choices", text="Which?", answer="B", choices=("x", "y")),
    ]
    found = find_overlaps(training, evaluation)
    assert [(each.evaluation.id, each.training.id) for each in found] == [("short", "t"), ("same choices", "c")]
    assert all(each.is_identical and each.share == 1 and not each.has_equal_answer for each in found)
    assert count_identical(training, evaluation) == 2
    assert count_identical([], evaluation) == 0


def test_a_sentence_is_told_apart_from_names_and_mathematics():
    names = (r"\text{Sunday}", r"\text{Softball, Kickball, Picnic}", "New York City")
    mathematics = ("-1,234", r"\frac{3}{4}", "(1, 2)", r"2\sqrt{3}", "-(ab + ac + bc)", r"6 \text{ or } 7", "")
    sentences = (
        "The answer is 12",
        "She sold 48/2 = 24 clips in May, and 72 in all.",
        "the sum of two of them is the third",
        r"\text{It is not a prime number}",
    )
    assert [answer for answer in (*names, *mathematics, *sentences) if is_prose(answer)] == list(sentences)


async def test_golds_that_cannot_be_right_are_found():
    golds = {"fine": "1", "empty after tidying": r"\,", "long": "9" * 600, "no answer": ""}
    problems = [Problem(id=name, text="", answer=answer) for name, answer in golds.items()]
    problems.append(Problem(id="choice", text="", answer="A", choices=("x", "y")))
    problems.append(Problem(id="same", text="", answer="A", choices=("x", "x ")))
    problems.append(Problem(id="no letter", text="", answer="AB", choices=("x", "y")))
    async with BoxedMatch(BoxedMatch.Settings()) as verifier:
        found = await check_golds(problems, verifier)
    assert (found.tried, found.have_choices, [p.id for p in found.unclear_choices]) == (6, 3, ["same"])
    assert [(p.id, v) for p, v in found.unverifiable] == [
        ("empty after tidying", Verdict.NO_ANSWER),
        ("no letter", Verdict.WRONG),
    ]


BY_BOX = ["--verifier", "boxed_match"]  # which starts no process
SMALL = ["training.batch_size=1", "training.mini_batch_size=1", "training.iterations=4"]


def check(*arguments, columns=200):
    result = CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


def test_names_of_evaluation_sets_and_tiers_are_legible_at_80_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, [{"problem": f"{i} + 2", "answer": 3, "tier": f"Level {i}"} for i in (1, 2)], "train.jsonl")
    write(tmp_path, [{"problem": "1 + 1", "answer": 2}], "evaluation.benchmarks.AIME.jsonl")
    words = ["train.jsonl", "--against", "evaluation.benchmarks.AIME.jsonl", *BY_BOX]
    code, output = check(*words, columns=80)
    assert code == 0, output
    assert "evaluation.benchmarks.AIME.jsonl " in output
    assert "Level 1: 1, Level 2: 1" in output


def test_the_check_command_shows_counts_samples_overlap_and_exits_by_what_it_found(tmp_path):
    long = "How many ways are there to put seven red balls into four blue boxes in a row?"
    train = write(
        tmp_path, [{"problem": f"{long}\n{INSTRUCTION}", "answer": "120"}, {"problem": "1+1\x1b[2J [/b]", "answer": 2}]
    )
    held = write(tmp_path, [{"problem": long, "answer": "120", "id": "held-1"}], "held.jsonl")
    code, output = check(train, "--against", held)
    assert code == 0, output
    for expected in (
        "instruction in the problem removed",
        "answer: 120",
        "layout: auto, by the usual columns",
        "2 tried, 0 unverifiable",
        "median 12, 95 % 77, longest 77",  # of 12 and 77: what 95 % do not exceed is no less than the median
        "held-1 in row-1",
        "1+1␛[2J [/b]",  # which a terminal would obey, and rich read as its own
    ):
        assert expected in output
    bad = write(tmp_path, [{"problem": "p", "answer": r"\,"}], "bad.jsonl")
    code, output = check(bad, *BY_BOX)
    assert (code, "row-1: '\\\\,' is no_answer" in output) == (1, True), output
    code, output = check(write(tmp_path, [{"quest": "p", "answer": 1}], "other.jsonl"))
    assert (code, "name its column in fields.problem, or another layout" in " ".join(output.split())) == (2, True)
    code, output = check(str(tmp_path))
    assert output == f"error: {tmp_path} is a directory: name the files in it\n"
    code, output = check(train, "layout=maths")
    assert (code, output.startswith("error: layout")) == (2, True), output
    assert check(str(tmp_path / "none.jsonl"))[0] == 2
    prose = write(tmp_path, [{"problem": "p", "answer": "It sold 24 clips in all."}], "prose.jsonl")
    code, output = check(prose, *BY_BOX)
    assert (code, "unverifiable" in output) == (0, False), output
    assert "warning: 1 answer in prose, which a response would have to repeat word for word: row-1; name" in output
    long_prose = write(tmp_path, [{"problem": "p", "answer": "It sold clips. " * 50}], "long.jsonl")
    code, output = check(long_prose, *BY_BOX)
    assert (code, "1 answer in prose" in output) == (0, True), output
    code, output = check(train, "--verifier", "boxd_match")
    assert (code, "--verifier boxd_match: no verifier called 'boxd_match'; did you mean" in output) == (2, True), output


def test_the_check_command_reads_a_runs_configuration(tmp_path):
    few = write(tmp_path, [{"problem": "a1+2b", "answer": 3}, {"problem": "a1" + "+1b" * 30, "answer": 31}])
    train = f"data.train={few}"
    code, output = check("configs/quickstart.yaml", "--no-servers", train, f"evaluation.problems={few}", *SMALL)
    assert code == 0, output
    rows = [{"problem": "a1+2b", "answer": r"\,"}]
    held_out = f"evaluation.problems={write(tmp_path, rows, 'e.jsonl')}"
    code, broken = check("configs/quickstart.yaml", "--no-servers", train, held_out, *SMALL)
    assert (code, "evaluation.problems: answers against themselves, by boxed_match" in broken) == (0, True), broken
    assert "warning: no response to the problems with unverifiable answers" in broken
    assert "warning: no response" not in output
    assert "row-1: '\\\\,' is no_answer" in broken
    assert "filtered by a run" in output
    assert "<|user|>" in output
    assert "evaluation.problems" in output


def test_a_verifier_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(math_verify, "_WORKER", tmp_path / "none.py")
    file = write(tmp_path, [{"problem": "p", "answer": "7"}], "p.jsonl")
    code, output = check(file, "--verifier", "math_verify")
    (line,) = [line for line in output.splitlines() if line.startswith("error")]
    assert (code, "verification workers do not start" in line, "No such file" in line) == (1, True, True), output
    assert "Traceback" not in output
    code, output = check("configs/quickstart.yaml", "--no-servers", f"data.train={file}", "verifier=math_verify",
                         "prompt.instruction=", "sampling.max_prompt_tokens=64", *SMALL, "evaluation=null")  # fmt: skip
    assert (code, "verification workers do not start" in output, "Traceback" in output) == (1, True, False), output


def canonical(name, layout="auto"):
    return read(CANONICAL / f"{name}.jsonl.gz", layout=layout).problems


@pytest.mark.long
@needs_data
def test_real_overlaps_are_those_that_are_known():
    dapo = canonical("dapo_en", "dapo")
    in_amc = find_overlaps(dapo, canonical("amc23"))
    known = [3, 4, 5, 7, 8, 10, 11, 13, 14, 15, 16, 19, 22, 25, 26, 28, 30, 32, 44, 46, 47, 48]
    assert [each.evaluation.id for each in in_amc] == [f"amc23/{number}" for number in known]
    in_math = find_overlaps(dapo, canonical("math500"))
    assert (len(in_math), sum(each.has_equal_answer for each in in_math)) == (18, 10)
