"""Answers that no response can meet: which are mended, which are named, and where a user reads of them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from problem_files import FEW, doubts, load, read, write
from pyarrow import parquet
from typer.testing import CliRunner

from spot_async.checks.plan import plan_training, plan_warnings
from spot_async.cli import app
from spot_async.config.loading import load_config
from spot_async.data.golds import as_boxed, gold_doubts
from spot_async.errors import DataError
from spot_async.tools.check.problems import check_golds
from spot_async.types import Problem, Verdict
from spot_async.verification import MathMatch, MathVerify

QUICKSTART = Path("configs/quickstart.yaml")
pytestmark = pytest.mark.usefixtures("trusted_templates")


def problems(*answers, **more):
    return [Problem(id=f"row-{i}", text=f"p {i}", answer=answer, **more) for i, answer in enumerate(answers, 1)]


@pytest.mark.parametrize(
    ("answer", "boxed"),
    [
        (r"\(7\)", "7"),
        (r"\[7\]", "7"),
        (r"$\(7\)$", "7"),
        ("**7**", "7"),
        ("`7`", "7"),
        ('"7"', "7"),
        ("b'7'", "7"),
        ("Answer: 7", "7"),
        ("The final answer is 7", "7"),
        (r"\boxed{7}", "7"),
        ("9 - 2 = 7 #### 7", "7"),
        ('["18"]', "18"),
        ("['18']", "18"),
        ("\N{MINUS SIGN}7", "-7"),
        ("\N{FULLWIDTH DIGIT SEVEN}", "7"),
        ("\N{ARABIC-INDIC DIGIT SEVEN}", "7"),
        ("\N{ZERO WIDTH SPACE}7", "7"),
        ("x<sup>2</sup>", "x^{2}"),
        ("<b>7</b>", "7"),
        ("a &lt; b", "a < b"),
        (r"\\frac{3}{2}", r"\frac{3}{2}"),
        (r"2\\sqrt{3}", r"2\sqrt{3}"),
        ('["1", "2"]', '["1", "2"]'),  # not to be mended, but named
        ("{'value': '7'}", "{'value': '7'}"),
    ],
)
def test_an_answer_that_no_response_writes_so_is_named_with_what_a_response_writes(answer, boxed):
    assert as_boxed(answer) == boxed
    (line,) = gold_doubts(problems(answer, "1", "2"), "data.train")
    assert "data.train: 1 answer of 3 not spelled as a response would box it: row-1 has" in line
    assert repr(boxed) in line
    assert "data.train.fields.answer" in line


@pytest.mark.parametrize(
    "answer",
    [
        *("7", "-7", "7.", "$7$", r"\$36", "1,234", "x = 7", "7\N{NO-BREAK SPACE}", "1\N{NARROW NO-BREAK SPACE}234"),
        *("[1, 2]", "{1, 2}", "(1,2)", r"\{1,2\}", "[0, 1)", r"x^{2}", "x<y>z", "a < b", r"\text{None of these}"),
        *("New York", r"\text{Saturday}", "f'(x)", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "½", "50\\%", "no", "C"),
    ],
)
def test_answers_of_mathematics_are_not_named(answer):
    assert gold_doubts(problems(answer, "1", "2"), "") == []
    assert gold_doubts(problems(answer, choices=("x", "y")), "") == []


@pytest.mark.parametrize(
    "answer",
    ["proof", "notfound", "Not found.", "N/A", "None", "null", "nan", "-", "?", "see solution", "Multiple answers"],
)
def test_words_for_no_answer_are_named_and_how_often_they_stand(answer):
    (line,) = gold_doubts(problems(answer, "7", answer), "")
    assert f"2 answers of 3 may say that there is none: {answer!r} (2)" in line


def test_an_answer_that_is_much_of_the_file_is_named():
    numbers = [str(i) for i in range(20)]
    (line,) = gold_doubts(problems(*numbers, *["ask the teacher"] * 3), "")
    assert "3 of 23 answers are 'ask the teacher'" in line
    (line,) = gold_doubts(problems(*numbers, *["42"] * 21), "")
    assert "22 of 41 answers are '42'" not in line
    assert "21 of 41 answers are '42'" in line
    assert gold_doubts(problems(*["yes", "no"] * 10), "") == []
    assert gold_doubts(problems(*["7"] * 10), "") == []  # perhaps a set of one kind of problem


def test_a_list_of_one_is_its_answer_also_in_a_string(tmp_path):
    answers = [["18"], [18], '["18"]', "['18']", "[18]", '[" 18 "]']
    found = load(tmp_path, [{"problem": f"p {i}", "answer": answer} for i, answer in enumerate(answers)])
    assert {problem.answer for problem in found.problems} == {"18"}
    assert found.mended["answer taken out of a list of one"] == 4  # a list that is no string needs no mending
    verl = [{"prompt": [{"role": "user", "content": "p"}], "reward_model": {"ground_truth": '["18"]'}}]
    assert load(tmp_path, verl).problems[0].answer == "18"
    with pytest.raises(DataError, match=r"problems.jsonl:1: column 'answer' is \['1', '2'\]"):
        load(tmp_path, [{"problem": "p", "answer": ["1", "2"]}])
    plain = load(tmp_path, [{"problem": "p", "answer": '["18"]'}], layout="plain").problems
    assert plain[0].answer == '["18"]'  # as it stands, and named
    assert gold_doubts(plain, "") != []


@pytest.mark.parametrize("spelled", [json.dumps, repr], ids=["JSON", "Python"])
@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_a_chat_in_a_string_is_a_chat(tmp_path, spelled, column):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "It's what?"}]
    found = load(tmp_path, [{column: spelled(chat), "answer": "7"}])
    assert found.problems[0].text == "It's what?"
    assert found.mended["chat messages in a string"] == 1


def test_ids_may_be_the_rows_numbers(tmp_path):
    rows = [{"problem": f"p {i}", "answer": i, "id": "same", "level": 3} for i in (1, 2)]
    with pytest.raises(DataError, match=r"data.train.fields.id, or set that to null, which numbers the rows"):
        load(tmp_path, rows)
    found = load(tmp_path, rows, fields={"id": None, "tier": None}).problems
    assert [(problem.id, problem.tier) for problem in found] == [("row-1", None), ("row-2", None)]
    with pytest.raises(ValueError, match="problem: null, but only id, tier, category may be"):
        load(tmp_path, rows, fields={"problem": None})


@pytest.mark.parametrize(
    "eaten",
    [
        *("\frac{3}{2}", "\boxed{3}", "\beta", "\vec{v}", "\alpha", "2\right)", "\rho", "\x1b[31m3", "3\x00", "3\x85"),
        *("5 \text{ m}", "\times 3", "\theta", "x \neq 3", "\nabla f", "\u2029i"),
    ],
)
def test_text_whose_escapes_were_read_as_control_characters_is_named_with_its_first_row(tmp_path, eaten):
    parts = {"problem": "p", "answer": "3", "solution": "s", "response": "r"}
    rows = [{**parts, "problem": "first"}, {part: f"{text} {eaten}" for part, text in parts.items()}]
    rows.append({**parts, "answer": eaten})
    fields = {"solution": "solution", "response": "response"}
    lines = doubts(tmp_path, rows, fields=fields)
    assert [line.split(" holds")[0] for line in lines] == [f"data.train: `{part}`" for part in parts]
    assert all("holds control characters, as where JSON reads" in line for line in lines)
    assert "2 of 3 rows, first " in lines[1]
    assert "problems.jsonl:2 (" in lines[1]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert len(read(tmp_path / "p.parquet", fields=fields).doubts("", None)) == 4


def test_eaten_escapes_are_named_in_choices_and_earlier_turns_and_in_an_answer_of_a_few_letters(tmp_path):
    question = {"problem": "p", "answer": "A", "choices": ["1", "\frac12"]}
    (line,) = doubts(tmp_path, [question], fields={"choices": "choices"})
    assert "`choices` holds control characters" in line
    turns = [{"role": "system", "content": "Write \boxed{}."}, {"role": "user", "content": "p"}]
    (line,) = doubts(tmp_path, [{"messages": turns}])
    assert "`history` holds control characters" in line
    for answer in ("\tau", "\nu"):
        (line,) = doubts(tmp_path, [{"problem": "a\tau\nu", "answer": answer}])
        assert "`answer` holds control characters" in line


@pytest.mark.parametrize(
    "answer", ["def f(x):\n\treturn x", "if a:\n\tif b:\n\t\tprint('\\n')\nelse:\n\tpass\n", "name\tage\nann\tten"]
)
def test_an_answer_of_several_lines_may_have_tabs(tmp_path, answer):
    assert doubts(tmp_path, [{"problem": "p", "answer": answer}]) == []
    (line,) = doubts(tmp_path, [{"problem": "p", "answer": answer + "\frac"}])
    assert "`answer` holds control characters" in line


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "Thoughts", "cot"])
def test_thoughts_beside_a_response_are_named_and_those_within_it_are_not(tmp_path, name):
    row = {"problem": "p", "answer": "7", "response": "So it is 7.", name: "Let me see."}
    (line,) = doubts(tmp_path, [row], fields={"response": "response"})
    assert f"column {name!r} may belong to the response and is not read (write it into the response)" in line
    for other in (row | {name: ""}, row | {"response": f"<think>{row[name]}</think> So it is 7."}):
        assert doubts(tmp_path, [other], fields={"response": "response"}) == []
    assert doubts(tmp_path, [row]) == []  # no response is learnt


DOUBLED = (r"\\frac{3}{2}", r"2\\sqrt{3}", r"\\\\boxed{3}", r"5 \\text{ m}", r"\\pm 3", r"A \\cup B")


@pytest.mark.parametrize("doubled", DOUBLED)
@pytest.mark.parametrize("part", ["problem", "solution", "response"])
def test_commands_behind_two_backslashes_are_named(tmp_path, part, doubled):
    fields = {"solution": "solution", "response": "response"}
    row = {"problem": "p", "answer": "3", "solution": "s", "response": "r", part: doubled}
    (line,) = doubts(tmp_path, [row], fields=fields)
    assert line.startswith(f"data.train: `{part}` has two backslashes before a command (write one): 1 of 1 row, first")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a\r\nb",
            "1\tan apple\tan\n2\tan exit\n",
            "p\nequal parts",
            "solve(\neq = Eq(x, 3))",
            "from\nleq\ngeq",
            "zero\u200bwidth",
            "a\u00a0b",
            "\ufeffp",
        ),
        *(r"\begin{pmatrix} a\\b \\ 2\\x \\\frac12 \end{pmatrix}", r"C:\\Users", "ends\r\n", "old\rMac"),
    ],
)
def test_line_ends_tables_and_rows_of_matrices_are_not_named(tmp_path, text):
    assert (
        doubts(tmp_path, [{"problem": text, "answer": "7"}, {"problem": "p", "answer": text.replace("\tan", "")}]) == []
    )


async def test_golds_that_math_verify_reads_as_something_else_are_found():
    sound = (r"\frac{3}{4}", r"\text{Sunday}", "52_8", r"15\mbox{ cm}^2", "(3,4]", r"x\le 3")
    own = ("np.arcsin(10/13)", "-1./3", r"\frac{sqrt{7} + 1}{2}", "2pi/3", "∀x＞0, 3<sup>x</sup>≥x<sup>2</sup>")
    for kind in (MathMatch, MathVerify):
        async with kind(kind.Settings(workers=1, timeout_s=20.0)) as verifier:
            found = await check_golds(problems(*sound, *own), verifier)
        assert [problem.answer for problem in found.spelling_only] == list(own)
        assert not found.unverifiable
        assert kind is MathVerify or not found.misread


async def test_a_gold_whose_worker_is_killed_once_is_asked_again():
    verdicts = [Verdict.ERROR, Verdict.CORRECT]

    class Killed:
        async def verify(self, problem, response_text, *, deadline):
            return verdicts.pop(0)

    assert not (await check_golds(problems("7"), Killed())).unverifiable


def test_training_evaluation_and_the_check_all_name_them(tmp_path):
    train = write(tmp_path, [{"problem": f"a{i}", "answer": f"Answer: {i}"} for i in range(4)], "train.jsonl")
    held = write(tmp_path, [{"problem": f"b{i}", "answer": "N/A" if i else "1"} for i in range(4)], "held.jsonl")
    overrides = [
        f"data.train={train}",
        f"evaluation.problems={held}",
        "training.batch_size=2",
        "training.mini_batch_size=2",
    ]
    config = load_config(QUICKSTART, overrides)
    lines = plan_warnings(config, plan_training(config))
    assert any("data.train: 4 answers of 4 not spelled" in line for line in lines), lines
    assert any("evaluation.problems: 3 answers of 4 may say that there is none" in line for line in lines), lines
    config = load_config(QUICKSTART, [FEW])
    assert not any("answers" in line for line in plan_warnings(config, plan_training(config)))
    words = ["check", train, "--against", held, "--verifier", "boxed_match"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert (
        "warning: 4 answers of 4 not spelled as a response would box it: row-1 has 'Answer: 0' for '0'" in result.output
    )


def test_answers_that_are_the_letter_of_no_one_option_are_named(tmp_path):
    rows = [
        {"problem": f"p{i}", "options": ["x", "y", "z"], "answer": each} for i, each in enumerate(["AB", "B", "AC"])
    ]
    path = write(tmp_path, rows)
    train = f"data.train={{path: {path}, fields: {{choices: options}}, verifier: multiple_choice}}"
    sizes = ["training.batch_size=1", "training.mini_batch_size=1", "training.iterations=4"]
    config = load_config(QUICKSTART, [train, "evaluation=null", *sizes])
    lines = plan_warnings(config, plan_training(config))
    said = "data.train: 2 answers of 3 not the letter of one option, so no response to them is judged"
    assert any(f"{said}: row-1 has 'AB', row-3 has 'AC'; write one letter" in line for line in lines), lines
    result = CliRunner().invoke(app, ["check", path, "fields.choices=options"], env={"COLUMNS": "200"})
    assert (result.exit_code, "3 tried, 2 unverifiable" in result.output) == (1, True), result.output
    config = load_config(QUICKSTART, [FEW, "verifier=multiple_choice", "evaluation=null"])  # has no options
    assert any("180 answers of 180 not the letter" in line for line in plan_warnings(config, plan_training(config)))


def test_training_evaluation_its_examples_and_the_check_all_name_eaten_escapes(tmp_path):
    eaten = write(tmp_path, [{"problem": f"a{i} \frac12", "answer": i, "solution": "s"} for i in range(4)])
    clean = write(tmp_path, [{"problem": f"b{i}", "answer": i} for i in range(4)], "clean.jsonl")
    benchmark = f"{{path: {clean}, example_count: 2, examples: {{path: {eaten}, fields: {{solution: solution}}}}}}"
    overrides = [
        f"data.train={eaten}",
        f"evaluation={{benchmarks: {{x: {benchmark}, y: {eaten}}}, max_response_tokens: 24}}",
        "training.batch_size=2",
        "training.mini_batch_size=2",
    ]
    config = load_config(QUICKSTART, overrides)
    named = [line.split(":")[0] for line in plan_warnings(config, plan_training(config)) if "holds control" in line]
    assert named == ["data.train", "evaluation.benchmarks.x.examples", "evaluation.benchmarks.y"]
    result = CliRunner().invoke(app, ["check", eaten, "--verifier", "boxed_match"], env={"COLUMNS": "200"})
    assert "warning: `problem` holds control characters" in result.output
