"""Problem sets: every format gives the same rows, every layout mends what its files get wrong, and all is counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.config import ProblemSetConfig
from spot_async.config_loading import apply_override, validate_as
from spot_async.data import load_problem_set
from spot_async.data.check import answer_type, check_golds, find_repeated
from spot_async.data.layouts import remove_instruction
from spot_async.data.overlap import find_overlaps
from spot_async.data.parts import Draft
from spot_async.errors import ConfigError, DataError
from spot_async.types import Problem, Verdict
from spot_async.verification import BoxedMatch

DATA = Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="real problem files are not here")
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def write(tmp_path, rows, name="problems.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tmp_path, rows, **more):
    return load_problem_set(ProblemSetConfig(path=write(tmp_path, rows), **more), "data.train")


def chat(text, **more):
    """A row as reinforcement-learning trainers store it."""
    return {"prompt": [{"role": "user", "content": text}], "extra_info": {"index": 7, "split": "train"}, **more}


# Formats


ROWS = [{"problem": 'one, "1"', "answer": "1", "id": "a"}, {"problem": "two\nlines", "answer": "2", "id": "b"}]


def as_csv(path):
    path.write_text('problem,answer,id\n"one, ""1""",1,a\n"two\nlines",2,b\n')


def as_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


FORMATS = {
    "p.jsonl": lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in ROWS)),
    "p.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "p.csv": as_csv,
    "p.parquet": as_parquet,
    "p.jsonl.gz": lambda path: path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode())),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_problems(tmp_path, name):
    FORMATS[name](tmp_path / name)
    found = load_problem_set(ProblemSetConfig(path=str(tmp_path / name)), "data.train")
    assert [(p.id, p.text, p.answer) for p in found.problems] == [("a", 'one, "1"', "1"), ("b", "two\nlines", "2")]
    assert found.counts == {"read": 2, "problems": 2}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("p.json", b'{"a": 1}', "expected a list of objects"),
        ("p.json", b"[1]", "item 1 is no object, but int"),
        ("p.csv", b"problem,answer\none,1,2\n", "row 1 has not as many cells as the header"),
        ("p.csv", b"problem,answer\n\xff,1\n", "not valid CSV"),
        ("p.jsonl.gz", b"no gzip", "cannot read"),
        (
            "p.txt",
            b"",
            "neither a file that ends in .jsonl, .json, .csv, .parquet (or .gz) nor `owner/name` on the hub",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        load_problem_set(ProblemSetConfig(path=str(tmp_path / name)), "data.train")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_what_only_the_hub_has_is_refused_for_a_file(tmp_path):
    with pytest.raises(DataError, match=r"data\.train\.split: .* is a file"):
        load(tmp_path, ROWS, split="train")


def test_a_data_set_of_the_hub_is_read_with_its_subset_split_and_revision(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*positional, **named):
        asked.append((positional, named))
        return (
            {"test": datasets.Dataset.from_list(ROWS)} if named["split"] is None else datasets.Dataset.from_list(ROWS)
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    chosen = ProblemSetConfig(path="owner/name", subset="main", split="train", revision="abc")
    assert len(load_problem_set(chosen, "data.train").problems) == 2
    assert asked[0][0] == ("owner/name",)
    assert asked[0][1].items() >= {"name": "main", "split": "train", "revision": "abc"}.items()
    assert len(load_problem_set(ProblemSetConfig(path="owner/name"), "data.train").problems) == 2  # its only split


# Columns


def test_columns_may_have_other_names_and_stand_inside_others(tmp_path):
    rows = [{"q": "1+1", "meta": {"gold": {"value": 2}, "kind": "sum"}, "number": 5}]
    fields = {"problem": "q", "answer": "meta.gold.value", "tier": "meta.kind", "id": "number"}
    (problem,) = load(tmp_path, rows, fields=fields).problems
    assert problem == Problem(id="5", text="1+1", answer="2", tier="sum")


@pytest.mark.parametrize(
    ("row", "more", "complaint"),
    [
        (
            {"q": "1+1", "answer": 2},
            {},
            "no `problem`; name its column in data.train.fields.problem; the row has q, ans",
        ),
        ({"problem": "1"}, {"fields": {"answer": "gold"}}, "no column 'gold', which data.train.fields.answer names"),
        ({"problem": "1+1", "answer": None}, {}, "no `answer`"),
        ({"problem": "1+1", "answer": {"x": 1}}, {}, "$.answer"),
    ],
)
def test_a_part_that_is_missing_is_named_with_the_key_to_set(tmp_path, row, more, complaint):
    with pytest.raises(DataError) as raised:
        load(tmp_path, [row], **more)
    assert complaint in str(raised.value)
    assert "problems.jsonl:1" in str(raised.value)


def test_a_path_is_short_for_a_section_also_when_overridden():
    tree = {"train": "a.jsonl"}
    apply_override(tree, "train.layout=math")
    assert tree == {"train": {"path": "a.jsonl", "layout": "math"}}
    assert validate_as(ProblemSetConfig, tree["train"]).paths == ["a.jsonl"]
    with pytest.raises(ConfigError, match="layout"):
        validate_as(ProblemSetConfig, {"path": "a.jsonl", "layout": "maths"})


def test_several_files_are_one_set_whose_ids_cannot_meet(tmp_path):
    paths = [
        write(tmp_path, [{"id": 1, "problem": month, "answer": "1"}], f"{month}.jsonl") for month in ("feb", "nov")
    ]
    found = load_problem_set(ProblemSetConfig(path=paths, layout="hmmt"), "data.train")
    assert [problem.id for problem in found.problems] == ["1/1", "2/1"]


# Layouts: small rows in the shapes of the real files


def test_math_takes_the_last_box_of_the_solution(tmp_path):
    shape = {"type": "Algebra", "problem": "p"}
    rows = [
        {
            **shape,
            "problem": "p1",
            "level": "Level 3",
            "solution": r"First \boxed{1}. Then $\boxed{-80\le g(x)\le 82}$.",
        },
        {**shape, "problem": "p2", "level": "Level ?", "solution": r"So $\boxed {17}.$"},
        {**shape, "problem": "p3", "level": "Level 5", "solution": r"There are $\boxed{}$ primes."},
        {**shape, "problem": "p4", "level": "Level 1", "solution": r"$\boxed 2$"},
    ]
    found = load(tmp_path, rows)
    assert found.layouts == ["math"]  # by its columns
    assert [p.answer for p in found.problems] == [r"-80\le g(x)\le 82", "17", "0", "2"]
    assert [p.tier for p in found.problems] == ["level 3", None, "level 5", "level 1"]
    assert {p.category for p in found.problems} == {"Algebra"}
    assert found.mended == {"level unknown": 1, "answer 0 put into an empty box": 1}


@pytest.mark.parametrize("solution", ["It is 12.", r"It is $\boxed{12"])
def test_a_solution_of_math_without_a_box_has_no_answer_made_up_for_it(tmp_path, solution):
    rows = [{"type": "Algebra", "problem": "p", "level": "Level 3", "solution": solution}]
    rows.append({"type": "Algebra", "problem": "q", "level": "Level 3", "solution": r"It is $\boxed{7}$."})
    found = load(tmp_path, rows)
    assert [problem.answer for problem in found.problems] == ["7"]
    assert sum(found.dropped.values()) == 1


def test_one_stem_with_other_choices_is_another_problem(tmp_path):
    rows = [
        {"problem": "Which is true?", "answer": "A", "choices": ["one", "two"]},
        {"problem": "Which is true?", "answer": "B", "choices": ["three", "four"]},
    ]
    found = load(tmp_path, rows, fields={"choices": "choices"})
    assert len(found.problems) == 2


def test_math_trusts_no_answer_that_differs_from_its_solution(tmp_path):
    gold = {"target": r"-80\leqg(x)\leq82", "solution": r"so $\boxed{-80\leq g(x)\leq 82}$", "question": "p"}
    rows = [chat("p", reward_model={"ground_truth": gold}, level="Level 2", data_source="somebody/MATH")]
    rows += [chat("q", reward_model={"ground_truth": "{17}."}, level="Level 2", data_source="x/MATH-lighteval")]
    rows[1]["extra_info"]["index"] = 8
    found = load(tmp_path, rows)
    assert [p.answer for p in found.problems] == [r"-80\leq g(x)\leq 82", "17"]
    assert found.mended["answer column differs from the solution's box"] == 1
    assert found.mended["braces or full stop around the answer removed"] == 1


def test_dapo_drops_chinese_and_repeated_prompts_and_counts_them(tmp_path):
    dapo = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    texts = ["one，two", "one，two", "求两数之和", "three", "three", " three"]  # a full-width comma is not Chinese
    answers = ["１２", "12", "3", "4", "5", "22099999999999998951424"]
    rows = [
        chat(dapo.format(text), reward_model={"ground_truth": answer}, data_source="math_dapo")
        for text, answer in zip(texts, answers, strict=True)
    ]
    for number, row in enumerate(rows):
        row["extra_info"]["index"] = number
    found = load(tmp_path, rows)
    assert found.layouts == ["dapo"]
    assert [(p.text, p.answer) for p in found.problems] == [("one，two", "12"), (" three", "22099999999999998951424")]
    assert found.dropped == {"Chinese": 1, "duplicate": 1, "conflicting answers": 2}
    assert found.mended["instruction in the problem removed"] == 6
    assert found.mended["full-width characters in the answer"] == 1
    assert found.mended["answer of more than 15 digits, perhaps a damaged float"] == 1
    assert found.counts["read"] == 6


def test_rows_that_repeat_others_stay_unless_asked_and_those_that_contradict_go(tmp_path):
    rows = [{"problem": "a", "answer": r"\frac12"}, {"problem": "b", "answer": 1}, {"problem": "a", "answer": "1/2"}]
    assert [p.id for p in load(tmp_path, rows).problems] == ["line-1", "line-2", "line-3"]
    assert load(tmp_path, rows, duplicates="exact").counts == {"read": 3, "problems": 2, "dropped: duplicate": 1}
    rows.append({"problem": "a", "answer": 2})
    for duplicates in (None, "conflicting", "exact"):
        assert load(tmp_path, rows, duplicates=duplicates).dropped == {"conflicting answers": 3}
    assert len(load(tmp_path, rows, duplicates="keep").problems) == 4


def test_duplicates_may_be_meant_up_to_white_space(tmp_path):
    rows = [{"problem": "a b", "answer": 1}, {"problem": "a  b ", "answer": 1}, {"problem": "c", "answer": 1}]
    assert load(tmp_path, rows, duplicates="exact").dropped == {}
    assert load(tmp_path, rows, duplicates="spacing").dropped == {"duplicate": 1}
    rows[1]["answer"] = 2
    assert load(tmp_path, rows, duplicates="spacing").dropped == {"conflicting answers": 2}


def test_competitions_have_whole_numbers(tmp_path):
    amc = [{"id": 3, "problem": "p", "question": "p", "answer": 27.0, "url": "u"}]
    assert load(tmp_path, amc, layout="amc23").problems == [Problem(id="3", text="p", answer="27")]
    aime = [{"id": i, "problem": f"p{i}", "answer": answer} for i, answer in enumerate(["025", "204", "000", 73])]
    found = load(tmp_path, aime, layout="aime")
    assert [p.answer for p in found.problems] == ["25", "204", "0", "73"]
    assert found.mended == {"leading zeros removed from the answer": 2}


def test_minerva_finds_its_answers_in_the_solutions(tmp_path):
    rows = [{"idx": 0, "problem": "p", "type": "Ecology", "solution": "so \\boxed{I(0) e^{-\\frac{t}{R C}}\n} J"}]
    (problem,) = load(tmp_path, rows).problems
    assert (problem.id, problem.answer, problem.category) == ("0", r"I(0) e^{-\frac{t}{R C}}", "Ecology")
    (problem,) = load(tmp_path, [{"problem": "p", "answer": "4.5e33\n"}], layout="minerva").problems
    assert problem.answer == "4.5e33"


def test_math500_names_levels_and_keeps_its_ids(tmp_path):
    row = {
        "problem": "p",
        "answer": "1",
        "solution": "s",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/a/1.json",
    }
    (problem,) = load(tmp_path, [row]).problems
    assert problem == Problem(id="test/a/1.json", text="p", answer="1", tier="level 2", category="Algebra")


def test_gpqa_has_choices_the_right_one_first(tmp_path):
    row = {"Question": "Which?", "Correct Answer": " red\n", "High-level domain": "Physics", "Record ID": "rec1"}
    row |= {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    (problem,) = load(tmp_path, [row]).problems
    assert (problem.answer, problem.choices) == ("A", ("red", "wrong 1", "wrong 2", "wrong 3"))
    assert (problem.id, problem.category) == ("rec1", "Physics")


def test_mmlu_pro_keeps_letters_and_worked_solutions_and_drops_fillers(tmp_path):
    row = {"question_id": 70, "question": "Which?", "answer_index": 1, "cot_content": "A: because", "category": "law"}
    rows = [
        {**row, "options": ["x", "y", "z", "N/A", "N/A"], "answer": "B"},
        {**row, "options": ["x", "y", "w"], "answer": "C", "question_id": 71},  # the same question is no duplicate
        {**row, "options": ["x", "y"], "answer": "I", "question_id": 72},
    ]
    found = load(tmp_path, rows)
    assert found.layouts == ["mmlu_pro"]
    assert [(p.answer, p.choices) for p in found.problems] == [("B", ("x", "y", "z")), ("C", ("x", "y", "w"))]
    assert found.problems[0].solution == "A: because"
    assert found.problems[0].category == "law"
    assert found.dropped == {"answer is none of the choices": 1}


def test_alpaca_eval_needs_no_answers_and_keeps_every_row(tmp_path):
    rows = [{"instruction": "Hi", "output": "x", "generator": "g", "dataset": "koala"}] * 2
    found = load(tmp_path, rows)
    assert [(p.id, p.answer, p.category) for p in found.problems] == [("line-1", "", "koala"), ("line-2", "", "koala")]


def test_plain_rows_are_taken_as_they_stand(tmp_path):
    (problem,) = load(tmp_path, [{"problem": f"p\n{INSTRUCTION}", "answer": "{007}."}], layout="plain").problems
    assert (problem.text, problem.answer) == (f"p\n{INSTRUCTION}", "{007}.")


@pytest.mark.parametrize(
    "instruction",
    [
        INSTRUCTION,
        "Please reason step by step and output the final answer within \\boxed{}.",
        "Let's think step by step and output the final answer within \\boxed{}.",
        "Please put your final answer within $\\boxed{}$",
    ],
)
@settings(max_examples=25, derandomize=True, deadline=None)
@given(text=st.text(min_size=1).filter(str.strip))
def test_an_instruction_is_removed_and_nothing_else(instruction, text):
    for row in (f"{instruction}\n\n{text}", f"{text}\n{instruction}", f"{text} {instruction}\n"):
        draft = Draft(problem=row)
        assert remove_instruction(draft) == "instruction in the problem removed"
        assert draft.problem == text
    draft = Draft(problem=text)
    assert remove_instruction(draft) is None


# Checks


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
    assert not find_overlaps([numbered(words[:12])], [numbered(words[:12])])  # too short to tell


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("-1,234", "integer"),
        ("27.0", "integer"),
        ("4.5e-3", "decimal"),
        (r"\frac{3}{4}", "fraction"),
        ("3/4", "fraction"),
        (r"\text{Sunday}", "text"),
        ("(1, 2)", "list or interval"),
        (r"2\sqrt{3}", "expression"),
        ("", "none"),
    ],
)
def test_answers_are_told_apart_by_their_form(answer, kind):
    assert answer_type(Problem(id="p", text="", answer=answer)) == kind


async def test_golds_that_cannot_be_right_are_found():
    golds = {"fine": "1", "empty after tidying": r"\,", "long": "9" * 600, "no answer": ""}
    problems = [Problem(id=name, text="", answer=answer) for name, answer in golds.items()]
    problems.append(Problem(id="choice", text="", answer="A", choices=("x", "y")))
    async with BoxedMatch(BoxedMatch.Settings()) as verifier:
        found = await check_golds(problems, verifier)
    assert found.tried == 3
    assert [(p.id, v) for p, v in found.unverifiable] == [
        ("empty after tidying", Verdict.NO_ANSWER),
        ("long", Verdict.WRONG),
    ]


def test_rows_repeated_but_for_white_space_are_counted():
    texts = {"a": ("x y", "1"), "b": ("x  y", "1.0"), "c": ("z", "1"), "d": ("z ", "2"), "e": ("w", "1")}
    problems = [Problem(id=name, text=text, answer=answer) for name, (text, answer) in texts.items()]
    repeated = find_repeated(problems)
    assert (repeated.groups, repeated.rows, repeated.conflicting) == (2, 2, 1)


def check(*arguments):
    result = CliRunner().invoke(app, ["data", "check", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_check_command_shows_counts_samples_overlap_and_exits_by_what_it_found(tmp_path):
    long = "How many ways are there to put seven red balls into four blue boxes in a row?"
    train = write(tmp_path, [{"problem": f"{long}\n{INSTRUCTION}", "answer": "120"}, {"problem": "1+1", "answer": 2}])
    held = write(tmp_path, [{"problem": long, "answer": "120", "id": "held-1"}], "held.jsonl")
    code, output = check(train, "--against", held)
    assert code == 0, output
    for expected in (
        "instruction in the problem removed",
        "answer: 120",
        "2 tried, 0 unverifiable",
        "held-1 in line-1",
    ):
        assert expected in output
    bad = write(tmp_path, [{"problem": "p", "answer": r"\,"}], "bad.jsonl")
    code, output = check(bad)
    assert (code, "line-1: '\\\\,' is no_answer" in output) == (1, True), output
    code, output = check(train, "--layout", "maths")
    assert (code, output.startswith("error: layout")) == (2, True), output
    assert check(str(tmp_path / "none.jsonl"))[0] == 2


def test_the_check_command_reads_a_runs_configuration(tmp_path):
    few = write(tmp_path, [{"problem": "a1+2b", "answer": 3}, {"problem": "a1" + "+1b" * 30, "answer": 31}])
    code, output = check("configs/quickstart.yaml", f"data.train={few}", f"evaluation.problems={few}")
    assert code == 0, output
    assert "filtered by a run" in output
    assert "<|user|>" in output
    assert "evaluation.problems" in output


# Real files


@needs_data
@pytest.mark.parametrize(
    ("layout", "names", "count"),
    [
        ("math", ["math_train"], 7500),
        ("dapo", ["dapo_en"], 14116),
        ("math500", ["math500"], 500),
        ("amc23", ["amc23"], 40),
        ("minerva", ["minerva_math"], 272),
        ("hmmt", ["hmmt25"], 60),
        ("aime", ["aime24"], 30),
        ("aime", ["aime25"], 30),
    ],
)
def test_real_sets_have_the_counts_of_the_paper(layout, names, count):
    paths = [str(DATA / "canonical" / f"{name}.jsonl.gz") for name in names]
    found = load_problem_set(ProblemSetConfig(path=paths, layout=layout), "data.train")
    assert len(found.problems) == found.read == count
    assert all(problem.answer for problem in found.problems)


def canonical(name, layout="auto"):
    return load_problem_set(
        ProblemSetConfig(path=str(DATA / "canonical" / f"{name}.jsonl.gz"), layout=layout), "x"
    ).problems


@needs_data
def test_real_overlaps_are_those_that_are_known():
    dapo = canonical("dapo_en", "dapo")
    in_amc = find_overlaps(dapo, canonical("amc23"))
    known = [3, 4, 5, 7, 8, 10, 11, 13, 14, 15, 16, 19, 22, 25, 26, 28, 30, 32, 44, 46, 47, 48]
    assert [each.evaluation.id for each in in_amc] == [f"amc23/{number}" for number in known]
    in_math = find_overlaps(dapo, canonical("math500"))
    assert (len(in_math), sum(each.has_equal_answer for each in in_math)) == (18, 10)
