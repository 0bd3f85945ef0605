"""Every layout mends what its files get wrong, drops what contradicts itself, and counts all of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_files import CANONICAL, INSTRUCTION, doubts, load, needs_data, read, write

from spot_async.config import ProblemSetConfig
from spot_async.data import load_problem_set
from spot_async.data.layouts import remove_instruction
from spot_async.data.parts import Draft
from spot_async.types import Problem


def chat(text, **more):
    """A row as reinforcement-learning trainers store it."""
    return {"prompt": [{"role": "user", "content": text}], "extra_info": {"index": 7, "split": "train"}, **more}


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
    assert [p.id for p in load(tmp_path, rows).problems] == ["row-1", "row-2", "row-3"]
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


def test_of_gsm8k_the_answer_is_what_stands_behind_the_hashes(tmp_path):
    """Its column holds the worked solution; taken as it is, it verifies against itself and no response ever does."""
    rows = [
        {"question": "p", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 72.\n#### 72"},
        {"question": "q", "answer": "So\n#### 1,450"},
        {"question": "r", "answer": "So\n#### (1,450)"},
        {"question": "s", "answer": "#### is a heading\nand this no answer"},
    ]
    found = load(tmp_path, rows)
    assert [p.answer for p in found.problems] == ["72", "1450", "(1,450)", "#### is a heading\nand this no answer"]
    assert found.mended == {"answer taken from behind ####": 3}
    assert load(tmp_path, [{"problem": "p", "answer": "#### 3"}], layout="plain").problems[0].answer == "#### 3"


def test_competitions_have_whole_numbers(tmp_path):
    amc = [{"id": 3, "problem": "p", "question": "p", "answer": 27.0, "url": "u"}]
    assert load(tmp_path, amc, layout="amc23").problems == [Problem(id="3", text="p", answer="27")]
    aime = [{"id": i, "problem": f"p{i}", "answer": answer} for i, answer in enumerate(["025", "204", "000", 73])]
    found = load(tmp_path, aime, layout="aime")
    assert [p.answer for p in found.problems] == ["25", "204", "0", "73"]
    assert found.mended == {"leading zeros removed from the answer": 2}
    dapo = load(tmp_path, [{"problem": "p", "answer": 12.0}, {"problem": "q", "answer": 2e22}], layout="dapo")
    assert dapo.mended == {"answer was a float": 1, "answer of more than 15 digits, perhaps a damaged float": 1}


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


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        (1, "B"),  # from 0 on, as `answer_index`
        (0, "A"),
        (2.0, "C"),  # of a column of floats
        ("1", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B) 5 cm", "B"),
        (r"\boxed{B}", "B"),
        ("5 cm", "B"),
        ("0", None),  # the first one, or the text of the last
        (4, None),
        (-1, None),
        ("AB", None),
        ("x", None),
    ],
)
def test_a_letter_is_found_for_however_the_right_choice_is_named(tmp_path, answer, letter):
    rows = [{"question": "How long?", "options": ["4 cm", "5 cm", "6 cm", "0"], "answer": answer}]
    rows.append({"question": "Where?", "options": ["a", "b"], "answer_index": 1})
    found = load(tmp_path, rows, layout="mmlu_pro")
    assert [p.answer for p in found.problems] == [*([letter] if letter else []), "B"]
    assert found.dropped == ({} if letter else {"answer is none of the choices": 1})
    assert found.mended["answer was the place of a choice, from 0"] == 1 + (answer in (0, 1, 2.0, "1"))
    if letter:
        fields = {"problem": "question", "choices": "options"}
        assert load(tmp_path, rows[:1], fields=fields).problems[0].answer == letter


TEXTS = ["4 cm", "5 cm", "2"]


@pytest.mark.parametrize(
    ("labels", "answer", "letter"),
    [
        (["1", "2", "3"], "1", "A"),  # as in some rows of ARC
        (["1", "2", "3"], 3, "C"),
        (["1", "2", "3"], "2", "B"),  # a label comes before another option's text
        (["0", "1", "2"], "1", "B"),
        (["A", "B", "C"], "C", "C"),
        (["A", "B", "C"], "(b)", "B"),
        (["C", "B", "A"], "C", "A"),
        (["a", "b", "c"], "b", "B"),
        (["1", "2", "3"], "5 cm", "B"),
        (["1", "2", "3"], "4", "4"),
        (["1", "2", "3"], 0, "0"),  # where there are labels no place is meant
        (["1", "2", "3"], "B", "(B)"),  # no letter that a verifier would read
        (["A", "B", "D"], "C", "(C)"),
        (["(A)", "(B)", "(C)"], "B", "B"),
        (["1", "2", "3"], "(1)", "A"),
        (["A", "B", "C"], "AC", "AC"),
        (["A", "B", "C"], 1, "1"),
    ],
)
def test_the_label_of_a_choice_is_no_place(tmp_path, labels, answer, letter):
    for choices, column in (
        ({"label": labels, "text": TEXTS}, "choices"),
        ({"label": labels, "text": TEXTS}, "choices.text"),
        (dict(zip(labels, TEXTS, strict=True)), "choices"),
    ):
        row = {"question": "How long?", "choices": choices, "answerKey": answer}
        (problem,) = load(tmp_path, [row], fields={"choices": column, "answer": "answerKey"}).problems
        assert (problem.choices, problem.answer) == (tuple(TEXTS), letter)


@pytest.mark.parametrize(
    ("choices", "answer", "texts", "letter"),
    [
        (["1. cat", "2. dog", "3. fish"], "2", "cat dog fish", "B"),
        (["1. cat", "2. dog", "3. fish"], 3, "cat dog fish", "C"),
        (["1. cat", "2. dog", "3. fish"], "2. dog", "cat dog fish", "B"),
        (["1. cat", "2. dog", "3. fish"], "dog", "cat dog fish", "B"),
        (["0: cat", "1: dog"], "1", "cat dog", "B"),
        (["B) dog", "A) cat"], "A", "dog cat", "B"),
        (["(C) fish", "(A) cat", "(B) dog"], "(C)", "fish cat dog", "A"),
        (["(C) fish", "(A) cat", "(B) dog"], "(A) cat", "fish cat dog", "B"),
        (["a. cat", "b. dog"], "b", "cat dog", "B"),
        (["A) cat", "B) dog"], 1, "cat dog", "B"),  # places and labels say the same
        (["A) cat", "B) dog"], "B) dog", "cat dog", "B"),
        (["1. cat", "2. dog"], 0, "cat dog", "0"),  # where there are labels no place is meant
        (["1. cat", "2. dog", "fish"], "2", "1. cat,2. dog,fish", "C"),  # not all have one
        (["J. Mill", "K. Marx"], "B", "J. Mill,K. Marx", "B"),
        (["1.5 m", "2.5 m"], 1, "1.5 m,2.5 m", "B"),
        (["1. cat", "1. dog"], "1", "1. cat,1. dog", "B"),
    ],
)
def test_labels_within_the_texts_of_choices_are_their_labels(tmp_path, choices, answer, texts, letter):
    rows = [{"question": "Which?", "options": choices, "answer": answer}]
    fields = {"problem": "question", "choices": "options"}
    for options in ({"fields": fields}, *([{"layout": "mmlu_pro"}] if letter.isalpha() else [])):
        found = load(tmp_path, rows, **options)
        (problem,) = found.problems
        assert (problem.choices, problem.answer) == (tuple(texts.split("," if "," in texts else " ")), letter)
        assert found.mended.get("labels taken off the choices", 0) == ("," not in texts)


def test_naming_the_column_of_a_tier_leaves_the_layout_recognised(tmp_path):
    rows = [{"problem": "p", "type": "Algebra", "level": "Level 3", "solution": r"$\boxed{1}$", "source": "x"}]
    found = load(tmp_path, rows, fields={"category": "source"})
    assert (found.layouts, found.problems[0].category) == (["math"], "x")


def test_alpaca_eval_needs_no_answers_and_keeps_every_row(tmp_path):
    rows = [{"instruction": "Hi", "output": "x", "generator": "g", "dataset": "koala"}] * 2
    found = load(tmp_path, rows)
    assert [(p.id, p.answer, p.category) for p in found.problems] == [("row-1", "", "koala"), ("row-2", "", "koala")]


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
        "Please think step by step and put your final answer within \\boxed{}.",
        "Please, reason step-by-step. Please enclose the final answer in \\boxed{}.",
        "Please solve the following problem step by step,\nand put your final answer within \\boxed{}, please.",
        'Let\'s think step by step and output the final answer after "####".',
    ],
)
@settings(max_examples=25)
@given(text=st.text(min_size=1).filter(lambda text: text.strip() and text[-1] != "\n"))  # two would be one separator
def test_an_instruction_is_removed_and_nothing_else(instruction, text):
    for row in (f"{instruction}\n\n{text}", f"{text}\n{instruction}", f"{text} {instruction}\n"):
        draft = Draft(problem=row)
        assert remove_instruction(draft) == "instruction in the problem removed"
        assert draft.problem == text
    draft = Draft(problem=text)
    assert remove_instruction(draft) is None


@pytest.mark.parametrize(
    "text", ["Put your final answer in \\boxed{} and find 1+1.", "Where do you write the answer in \\boxed{}"]
)
def test_a_sentence_that_goes_on_around_an_instruction_stays_whole(text):
    draft = Draft(problem=text)
    assert remove_instruction(draft) is None


@needs_data
@pytest.mark.parametrize(
    ("layout", "name", "count"),
    [
        ("math", "math_train", 7500),
        ("dapo", "dapo_en", 14116),
        ("math500", "math500", 500),
        ("amc23", "amc23", 40),
        ("minerva", "minerva_math", 272),
        ("hmmt", "hmmt25", 60),
        ("aime", "aime24", 30),
        ("aime", "aime25", 30),
    ],
)
def test_real_sets_have_the_counts_of_the_paper(layout, name, count):
    found = read(CANONICAL / f"{name}.jsonl.gz", layout=layout)
    assert len(found.problems) == found.read == count
    assert all(problem.answer for problem in found.problems)


def test_a_run_that_shows_solutions_to_its_teacher_keeps_them_in_every_layout(tmp_path):
    math = {"problem": "1+1?", "solution": "It is \\boxed{2}.", "type": "Algebra", "level": "Level 1"}
    usual = {"question": "1+1?", "answer": "2", "extra_info": {"solution": "one"}}
    for row, solution in ((math, math["solution"]), (usual, "one")):
        config = ProblemSetConfig(path=write(tmp_path, [row]))
        (plain,) = load_problem_set(config, "data.train").problems
        (kept,) = load_problem_set(config, "data.train", keeps_solutions=True).problems
        assert (plain.solution, kept.solution) == (None, solution)
        assert (plain.answer, kept.answer) == ("2", "2")


@pytest.mark.parametrize(
    ("row", "column", "fields"),
    [
        ({"problem": "<image>How large is it?", "images": [{"bytes": None, "path": "1.png"}]}, "images", {}),
        ({"problem": "How large is it?", "image_1": {"bytes": "x", "path": None}, "image_2": None}, "image_1", {}),
        ({"context": "Tom has 3 apples.", "question": "How many?"}, "context", {}),
        ({"Passage": "Tom has 3 apples.", "question": "How many?"}, "Passage", {}),
        ({"system": "In base 7.", "prompt": "Add 3 and 4."}, "system", {}),
        ({"system": "In base 7.", "messages": [{"role": "user", "content": "Add 3 and 4."}]}, "system", {}),
        ({"instruction": "Add.", "input": "3 and 4", "output": "7"}, "input", {"problem": "instruction"}),
        ({"instruction": "Add.", "input": "3 and 4", "output": "7"}, "input", {}),
        ({"question": "Which?", "choices": {"label": ["A"], "text": ["x"]}}, "choices", {}),
        ({"question": "Which?", "options": ["x", "y"], "gold": "A"}, "options", {}),
    ],
)
def test_a_column_that_belongs_to_the_question_and_is_not_read_is_named(tmp_path, row, column, fields):
    (line,) = doubts(tmp_path, [{**row, column: None}, row, {**row, "id": 3}], fields=fields)
    assert line.startswith(f"data.train: column {column!r} may belong to the question and is not read")
    assert "2 of 3 rows, first " in line
    assert "problems.jsonl:2" in line


def test_columns_that_are_read_empty_or_in_the_question_and_those_of_usual_sets_are_not_named(tmp_path):
    said = {"problem": "Be brief. 1+1? (A) 2 (B) 3", "system": "Be brief.", "options": ["2", "3"], "input": ""}
    assert doubts(tmp_path, [said]) == []
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert doubts(tmp_path, [{"messages": turns, "system": "Be brief."}]) == []
    assert (
        doubts(tmp_path, [{"question": "q", "choices": ["2", "3"], "answer": 0}], fields={"choices": "choices"}) == []
    )
    assert doubts(tmp_path, [{"input": "1+1?", "output": "2"}], fields={"problem": "input", "answer": "output"}) == []
    names = (
        "id source level subject difficulty data_source ability extra_info url domain solution response type topic hint"
    )
    assert doubts(tmp_path, [{"problem": "1+1?", "answer": "2", **dict.fromkeys(names.split(), "x")}]) == []
