r"""Benchmarks in other formats: what the student and the verifier see, and what the configuration allows."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot_async.checks.plan import evaluation_warnings, plan_evaluation
from spot_async.config import PromptConfig
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError
from spot_async.evaluation.benchmarks import behind_examples, order_choices, outputs_of
from spot_async.models.files import read_model
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Problem, Verdict
from spot_async.verification.multiple_choice import MultipleChoice

QUICKSTART = Path("configs/quickstart.yaml")
OPTIONS = ("4 cm", "12 cm", r"\frac{1}{2}", "B")
QUESTION = Problem(id="q", text="How long?", answer="C", choices=OPTIONS, category="physics")


@settings(max_examples=40)
@given(order=st.permutations(range(4)), seed=st.integers(0, 5), where=st.text(max_size=3))
def test_the_letters_depend_on_the_seed_and_not_on_the_files_order_or_ids(order, seed, where):
    shuffled = msgspec.structs.replace(
        QUESTION, id=where, choices=tuple(OPTIONS[i] for i in order), answer="ABCD"[order.index(2)]
    )
    one, other = order_choices(QUESTION, seed, "k"), order_choices(shuffled, seed, "k")
    assert (one.choices, one.answer) == (other.choices, other.answer)
    assert one.choices["ABCD".index(one.answer)] == OPTIONS[2]


def test_other_seeds_give_other_letters():
    assert {order_choices(QUESTION, seed, "k").answer for seed in range(30)} == set("ABCD")


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        (r"\boxed{C}", "correct"),
        (r"first \boxed{A}, no: \boxed{\text{(C)}}", "correct"),
        (r"\boxed{C. \frac{1}{2}}", "correct"),
        (r"\boxed{C) \frac12}", "correct"),
        (r"\boxed{C) half}", "wrong"),  # as `C) or B` would be: behind a letter, only its option's text counts
        (r"\boxed{\frac12}", "correct"),  # the option's text
        (r"\boxed{c}", "correct"),
        (r"\boxed{b}", "wrong"),
        (r"\boxed{B}", "wrong"),  # a letter comes before an option of that text
        (r"\boxed{12 cm}", "wrong"),
        (r"\boxed{13 cm}", "wrong"),  # begins like no letter, equals no option
        (r"\boxed{E}", "wrong"),
        (r"\boxed{}", "no_answer"),
        ("The answer is C.", "no_answer"),
    ],
)
def test_the_last_box_names_an_option_by_letter_or_text(response, verdict):
    verifier = MultipleChoice(MultipleChoice.Settings())
    assert run_on_virtual_time(verifier.verify(QUESTION, response, deadline=0.0)) == Verdict(verdict)


@pytest.mark.parametrize("gold", ["AB", "AC", "BCD", "A, B", '["A", "C"]', "a", "E", "1", "4 cm", "[", "Z"])
@pytest.mark.parametrize("options", [OPTIONS, ()])
def test_a_gold_that_is_not_the_letter_of_one_option_judges_no_response(gold, options):
    verifier = MultipleChoice(MultipleChoice.Settings())
    question = Problem(id="q", text="Which?", answer=gold, choices=options)
    for response in (r"\boxed{A}", r"\boxed{B}", r"\boxed{A, B}", rf"\boxed{{{gold}}}"):
        verdict = run_on_virtual_time(verifier.verify(question, response, deadline=0.0))
        assert verdict is Verdict.UNJUDGED, response


def test_of_more_options_than_letters_those_with_a_letter_are_judged():
    verifier = MultipleChoice(MultipleChoice.Settings())
    options = tuple(f"option {i}" for i in range(30))
    for gold, expected in (("Z", Verdict.CORRECT), ("A", Verdict.WRONG), ("[", Verdict.UNJUDGED)):
        question = Problem(id="q", text="Which?", answer=gold, choices=options)
        assert run_on_virtual_time(verifier.verify(question, r"\boxed{option 25}", deadline=0.0)) is expected


def test_worked_examples_are_of_the_questions_category_and_answer_in_a_box():
    def example(number, category):
        return msgspec.structs.replace(
            QUESTION,
            id=str(number),
            text=f"Example {number}?",
            category=category,
            solution="A: Add. The answer is (C).",
        )

    examples = [example(i, "physics" if i % 2 else "law") for i in range(8)]
    text = behind_examples([QUESTION], examples, 3, "k", with_options=True)[0].text
    assert [f"Example {i}?" in text for i in range(8)] == [False, True, False, True, False, True, False, False]
    assert text.count("Answer: Add. The answer is \\boxed{C}.") == 3
    assert text.endswith("Question: How long?\nOptions:\nA. 4 cm\nB. 12 cm\nC. \\frac{1}{2}\nD. B")
    with pytest.raises(DataError, match="4 examples of category 'physics', which problem 'q' has, and 5"):
        behind_examples([QUESTION], examples, 5, "k", with_options=True)


def test_a_base_model_reads_worked_examples_and_no_chat(tmp_path, monkeypatch):
    """`template: plain`, with examples of boxed answers: one that has its box, and one that gets it."""
    examples = [("1+1?", "It is 2.", "2"), ("2+2?", r"So \boxed{4}.", "4"), ("never", "asked", "0")]
    for name, rows in {
        "examples": [dict(zip(("problem", "solution", "answer"), each, strict=True)) for each in examples],
        "set": [{"problem": "a1+2?", "answer": "3"}],
    }.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sums = {
        "path": str(tmp_path / "set.jsonl"),
        "examples": {"path": str(tmp_path / "examples.jsonl"), "fields": {"solution": "solution"}},
        "example_count": 2,
    }
    config = evaluation(tmp_path, benchmarks={"sums": sums}, template="plain", instruction="Box it.")
    files = read_model("student", config.student.model)
    tokenizer, read = files.vocabulary.tokenizer, []
    monkeypatch.setattr(tokenizer, "chat_template", None)  # as a base model's

    def encoded(conversation, **rest):
        read.append(apply(conversation, **(rest | {"tokenize": False, "return_dict": False})))
        return apply(conversation, **rest)

    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", encoded)
    (benchmark,) = plan_evaluation(config, files)
    (prompt,) = read[0]  # of all problems, which are read together
    assert prompt == (
        "The following are questions about various subjects, with their answers.\n\n"
        "Question: 1+1?\nAnswer: It is 2. The answer is \\boxed{2}.\n\n"
        "Question: 2+2?\nAnswer: So \\boxed{4}.\n\n"
        "Question: a1+2? Box it.\nAnswer:"
    )
    assert benchmark.note == "worked examples (2); example_count 2 instead of 5"
    assert benchmark.doubts == []
    thinks = {"thinking": None, "thinking_tokens": 9}
    bounded = evaluation(tmp_path, benchmarks={"sums": sums}, template="plain", **thinks)
    assert ["tokenizer cannot write </think>" in each for each in plan_evaluation(bounded, files)[0].doubts] == [True]
    monkeypatch.setattr(files.vocabulary, "whole_text", lambda ids: "</think>")
    assert plan_evaluation(bounded, files)[0].doubts == []
    with pytest.raises(DataError, match=r"set evaluation.template to plain, for a base model"):
        plan_evaluation(evaluation(tmp_path, benchmarks={"sums": sums}), files)


def test_alpaca_eval_gets_the_fields_its_tool_reads():
    asked = [Problem(id="1", text="Sing.", answer="", category="vicuna"), Problem(id="2", text="Dance.", answer="")]
    assert outputs_of(asked, ["la", "no"], generator="student", dataset="alpaca") == [
        {"instruction": "Sing.", "output": "la", "generator": "student", "dataset": "vicuna"},
        {"instruction": "Dance.", "output": "no", "generator": "student", "dataset": "alpaca"},
    ]


def evaluation(tmp_path, *, instruction="Answer", **settings):
    """The quickstart with another evaluation section."""
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"base": str(QUICKSTART.resolve()), "evaluation": {"problems": None, **settings}}))
    return load_config(path, [f"prompt.instruction={json.dumps(instruction)}"])


def test_a_benchmark_has_its_own_format_limits_and_verifier(tmp_path):
    rows = [{"problem": "a1b+2", "answer": "B", "choices": ["3", "4"]}]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "set.jsonl")
    config = evaluation(
        tmp_path,
        samples=4,
        max_response_tokens=50,
        verifier="boxed_match",
        benchmarks={
            "plain": path,
            "choice": {
                "path": path,
                "fields": {"choices": "choices"},
                "format": "multiple_choice",
                "order_choices": False,
                "samples": 1,
            },
            "outputs": {"path": path, "format": "alpaca_eval", "max_response_tokens": 9},
            "strict": {"path": path, "verifier": {"kind": "math_verify", "timeout_s": 1.5}, "instruction": ""},
        },
    )
    student = read_model("student", config.student.model)
    plain, choice, outputs, strict = plan_evaluation(config, student)

    def prompt(benchmark):
        return student.vocabulary.tokenizer.decode(benchmark.sources[0].token_ids.tolist())

    assert [(b.samples, b.max_response_tokens) for b in (plain, choice, outputs, strict)] == [
        (4, 50), (1, 50), (1, 9), (4, 50)
    ]  # fmt: skip
    kinds = [each.verifier and each.verifier.kind for each in (plain, choice, outputs, strict)]
    assert kinds == ["boxed_match", "multiple_choice", None, "math_verify"]
    assert [each.note for each in (plain, choice, outputs, strict)] == [
        None,
        "judged by multiple_choice; options in the file's order; samples 1 instead of 4",
        "not judged here: outputs for its own tool; max_response_tokens 9 instead of 50",
        'instruction ""; judged by math_verify, timeout_s 1.5',
    ]
    assert len(prompt(choice)) > len(prompt(plain)) > len(prompt(strict)) == len(prompt(outputs))
    assert choice.sources[0].problem.text == "a1b+2\nA. 3\nB. 4"


TOLERANT = {"kind": "math_verify", "relative_tolerance": 0.01, "workers": 1}


def test_a_verifier_that_cannot_judge_its_benchmark_is_refused_and_one_that_judges_letters_alone_warned_of(tmp_path):
    (tmp_path / "set.jsonl").write_text(json.dumps({"problem": "a1b+2", "answer": "B", "choices": ["3", "4"]}) + "\n")
    options = {"path": str(tmp_path / "set.jsonl"), "fields": {"choices": "choices"}, "verifier": "multiple_choice"}
    letters = options | {"format": "multiple_choice", "verifier": "math_verify"}
    config = evaluation(tmp_path, max_response_tokens=50, benchmarks={"options": options, "letters": letters})
    student = read_model("student", config.student.model)
    (warning,) = evaluation_warnings(plan_evaluation(config, student), student.vocabulary)
    assert warning.startswith("evaluation.benchmarks.letters.verifier=math_verify: knows no options")
    numbers = {"path": str(tmp_path / "numbers.jsonl")}
    (tmp_path / "numbers.jsonl").write_text(json.dumps({"problem": "a1b+2", "answer": 3, "id": 5}) + "\n")
    for owner, changed in (
        ("evaluation.benchmarks.n", {"benchmarks": {"n": numbers | {"verifier": "multiple_choice"}}}),
        ("evaluation", {"benchmarks": {"n": numbers}, "verifier": "multiple_choice"}),
    ):
        with pytest.raises(
            ConfigError, match=rf"^{owner}\.verifier=multiple_choice: .*'5' of evaluation\.benchmarks\.n"
        ):
            plan_evaluation(evaluation(tmp_path, max_response_tokens=50, **changed), student)


def test_what_a_benchmark_changes_of_the_preset_is_noted_and_what_only_sets_the_pace_is_not(tmp_path):
    (tmp_path / "set.jsonl").write_text(json.dumps({"problem": "a1b+2", "answer": "3"}) + "\n")
    one = {"path": str(tmp_path / "set.jsonl"), "max_response_tokens": 64}  # what the example's student has room for
    config = evaluation(
        tmp_path,
        instruction=PromptConfig().instruction,
        preset="paper",
        max_response_tokens=8192,
        verifier="math_verify",
        benchmarks={
            "pace": {**one, "verifier": {"kind": "math_verify", "workers": 7}, "samples": 8},
            "other": {**one, "samples": 2, "instruction": "Go", "verifier": TOLERANT},
        },
    )
    pace, other = plan_evaluation(config, read_model("student", config.student.model))
    assert pace.note == "not as preset paper: max_response_tokens 64 instead of 8192"
    assert other.note == (
        'not as preset paper: instruction "Go"; samples 2 instead of 8; max_response_tokens 64 instead of 8192; '
        "judged by math_verify, relative_tolerance 0.01"
    )


def test_a_tier_that_is_called_as_results_call_all_problems_is_refused(tmp_path):
    (tmp_path / "set.jsonl").write_text(json.dumps({"problem": "a", "answer": 1, "tier": "all", "id": 7}))
    config = evaluation(tmp_path, max_response_tokens=50, benchmarks={"b": str(tmp_path / "set.jsonl")})
    with pytest.raises(DataError, match=r"evaluation\.benchmarks\.b: problem '7' has the tier 'all'.*b\.fields\.tier"):
        plan_evaluation(config, read_model("student", config.student.model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of problems and benchmarks"),
        ({"benchmarks": {"a": "x"}, "pass_k": [1, 9]}, "pass_k=9 needs as many samples"),
        ({"benchmarks": {"a": {"path": "x", "samples": 12}}, "pass_k": [9, 13]}, "pass_k=13 needs as many samples"),
        ({"benchmarks": {"a": {"path": "x", "format": "alpaca_eval", "samples": 2}}}, "samples=2"),
        (
            {"benchmarks": {"a": {"path": "x", "formt": "boxed"}}},
            "benchmarks.a.formt: unknown key; did you mean `format`?",
        ),
        (
            {"benchmarks": {"a": {"path": "x", "verifier": {"relative_tolerance": 0.1}}}},
            "benchmarks.a.verifier: needs a `kind`, one of: boxed_match, ",
        ),
        ({"benchmarks": {"a/b": "x"}}, "benchmarks.a/b: a name is letters, digits, `_`, `.` and `-`, and"),
        ({"benchmarks": {"a": "x"}, "problems": "x"}, "exactly one of problems and benchmarks: set problems to null"),
        ({"benchmarks": {"problems": "x"}}, "benchmarks.problems: in results this is the set of evaluation.problems"),
        *(
            (
                {"benchmarks": {"a": "x", name: "x"}},
                f"benchmarks.{name}: results have a row of their own with this name",
            )
            for name in ("all", "macro", "Avg.")
        ),
        (
            {"benchmarks": {"a": "x"}, "preset": "paper", "verifier": "math_verify"},
            "evaluation.max_response_tokens=160 is not the paper's 8192; prompt.instruction=",
        ),
        (
            {"benchmarks": {"a": "x"}, "preset": "paper", "verifier": "math_verify", "max_response_tokens": 8192},
            'configuration: prompt.instruction="Answer" is not the paper\'s "Please',
        ),
        (
            {"benchmarks": {"a": "x"}, "preset": "paper", "max_response_tokens": 8192},
            "verifier=boxed_match is not the paper's",
        ),
        (
            {
                "benchmarks": {"a": "x"},
                "preset": "paper",
                "verifier": {"kind": "math_verify", "relative_tolerance": 0.05},
                "max_response_tokens": 8192,
            },
            "verifier.relative_tolerance is not the paper's",
        ),
    ],
)
def test_what_cannot_be_or_is_not_the_papers_protocol_is_refused_by_its_key(tmp_path, settings, message):
    with pytest.raises(ConfigError) as refused:
        evaluation(tmp_path, **settings)
    assert message in str(refused.value)
