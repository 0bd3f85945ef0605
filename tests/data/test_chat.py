"""Chat data and problems without answers: what becomes the prompt, where answers come from, and who needs none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow
import pytest
from problem_files import load, read, write
from pyarrow import parquet
from typer.testing import CliRunner

from spot_async.checks.plan import plan_training
from spot_async.cli import app
from spot_async.config import PromptConfig
from spot_async.config.loading import load_config
from spot_async.data.problem_set import count_identical, identity, require_responses
from spot_async.data.prompts import PromptRenderer
from spot_async.errors import ConfigError, DataError
from spot_async.models.vocabulary import Vocabulary
from spot_async.tools.check.problems import JudgedSet, check_sets
from spot_async.types import ChatTurn, Problem


def said(*turns, **more):
    """A row of OpenAI's messages: each turn as `role: text`."""
    return {"messages": [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns], **more}


ASKED = said("system: Be brief.", "user: What is 1+2?", r"assistant: Three: \boxed{3}, or $\boxed{{03}.}$.", id="a")
TALKED = said("user: Hi", "assistant: Hello", "user: 2+2?", "assistant: I do not know.", id="b")


def turn(role, content):
    return ChatTurn(role=role, content=content)


# Messages


def test_system_and_user_messages_become_the_prompt_and_the_last_answer_does_not(tmp_path):
    expected = [
        Problem(id="a", text="What is 1+2?", answer="", history=(turn("system", "Be brief."),)),
        Problem(id="b", text="2+2?", answer="", history=(turn("user", "Hi"), turn("assistant", "Hello"))),
    ]
    found = load(tmp_path, [ASKED, TALKED], needs_answers=False)
    assert (found.layout, found.problems) == ("messages", expected)
    parquet.write_table(pyarrow.Table.from_pylist([ASKED, TALKED]), tmp_path / "p.parquet")
    assert read(tmp_path / "p.parquet", needs_answers=False).problems == expected
    renamed = [{"chat": row["messages"], "id": row["id"]} for row in (ASKED, TALKED)]
    assert (
        load(tmp_path, renamed, layout="messages", fields={"problem": "chat"}, needs_answers=False).problems == expected
    )


def test_a_written_response_is_a_column_or_what_the_assistant_said_last_and_is_read_only_where_asked_for(tmp_path):
    rows = [{"problem": "1+2?", "answer": "3", "response": "It is 3."}]
    assert load(tmp_path, rows).problems[0].response is None
    (problem,) = load(tmp_path, rows, fields={"response": "response"}).problems
    assert (problem.response, problem.answer) == ("It is 3.", "3")
    asked = [ASKED, said("user: Hi")]
    found = load(tmp_path, asked, fields={"response": "messages"}, needs_answers=False)
    assert [each.response for each in found.problems] == [r"Three: \boxed{3}, or $\boxed{{03}.}$.", None]
    with pytest.raises(
        DataError, match=r"problem '.*row-2' has no response, .* column in data\.train\.fields\.response"
    ):
        require_responses(found, "data.train")


def answered(**message):
    return {"messages": [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "It is 3.", **message}]}


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ({"reasoning_content": "1, 2, 3"}, "'reasoning_content'"),
        ({"thinking": "1, 2, 3"}, "'thinking'"),
        ({"reasoning": "1, 2, 3"}, "'reasoning'"),
        ({"reasoning_details": [{"text": "1, 2, 3"}]}, "'reasoning_details'"),
        ({"tool_calls": [{"function": {"name": "add"}}]}, "'tool_calls'"),
        ({"tool_calls": [{"function": {"name": "add"}}], "content": None}, "'tool_calls'"),
        ({"function_call": {"name": "add"}}, "'function_call'"),
        (
            {"content": [{"type": "thinking", "thinking": "1"}, {"type": "text", "text": "3"}]},
            "content that is not text",
        ),
    ],
)
def test_a_written_response_of_which_a_part_would_not_be_learnt_is_refused(tmp_path, message, lost):
    with pytest.raises(
        DataError, match=rf"problems\.jsonl:2: column 'messages': .* {lost}.* would not be learnt: write"
    ):
        load(tmp_path, [answered(), answered(**message)], fields={"response": "messages"}, needs_answers=False)
    found = load(tmp_path, [answered(**message)], needs_answers=False)  # no part of the prompt
    assert (found.problems[0].text, found.doubts("", None)) == ("1+2?", [])


def test_a_written_response_is_all_that_the_assistant_said_behind_the_question(tmp_path):
    call, result = {"role": "assistant", "content": "Let me add."}, {"role": "tool", "content": "3"}
    void = {"name": None, "arguments": None}
    row = answered(refusal=None, tool_calls=[None], function_call=void, reasoning_content="", name="x", weight=1)
    assert (
        load(tmp_path, [row], fields={"response": "messages"}, needs_answers=False).problems[0].response == "It is 3."
    )
    several = {"messages": [row["messages"][0], call, result, row["messages"][1]]}
    with pytest.raises(
        DataError, match=r"problems\.jsonl:1: column 'messages': .* other messages beside it.* not be learnt"
    ):
        load(tmp_path, [several], fields={"response": "messages"}, needs_answers=False)
    asked_again = {"messages": [*row["messages"], {"role": "user", "content": "And 2+3?"}]}
    found = load(tmp_path, [asked_again], fields={"response": "messages", "answer": "messages"}, needs_answers=False)
    assert (found.problems[0].response, found.problems[0].text) == (None, "And 2+3?")
    apart = {"problem": "1+2?", "answer": "3", "completion": [{"role": "assistant", "content": "It is 3."}]}
    assert load(tmp_path, [apart], fields={"response": "completion"}).problems[0].response == "It is 3."


def test_parts_of_earlier_messages_that_a_prompt_lacks_are_refused_or_named(tmp_path):
    again = {"role": "user", "content": "Sure?"}
    rows = [answered(), answered(reasoning_content="1, 2, 3")]
    rows = [{"messages": [*row["messages"], again]} for row in rows]
    found = load(tmp_path, rows, needs_answers=False)
    (line,) = found.doubts("data.train", None)
    assert line.startswith("data.train: `reasoning_content` of earlier messages is not read: 1 of 2 rows, first")
    assert "problems.jsonl:2" in line
    for lost in ({"tool_calls": [{"function": {"name": "add"}}]}, {"images": ["a.png"]}):
        with pytest.raises(
            DataError, match=rf"has message 2 with {next(iter(lost))!r}, which no prompt holds; correct"
        ):
            load(tmp_path, [{"messages": [*answered(**lost)["messages"], again]}], needs_answers=False)
    with pytest.raises(DataError, match=r"has message 1 with 'images', which no prompt holds; correct"):
        load(tmp_path, [{"messages": [{"role": "user", "content": "<image>?", "images": ["a"]}]}], needs_answers=False)


def test_a_template_renders_the_conversation_with_the_instruction_behind_it(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
    config = PromptConfig(template=str(template), instruction="Box it.", thinking=None)
    renderer = PromptRenderer(Vocabulary.load(Path("examples/running_sum/student")), config)
    asked, talked = load(tmp_path, [ASKED, TALKED], needs_answers=False).problems
    assert renderer.text(asked) == "<system>Be brief.<user>What is 1+2? Box it.<assistant>"
    assert renderer.text(talked) == "<user>Hi<assistant>Hello<user>2+2? Box it.<assistant>"


def test_the_answer_is_a_column_or_where_asked_the_box_in_the_assistants_last_message(tmp_path):
    with_column = [{**ASKED, "answer": 4}, {**TALKED, "answer": "7"}]
    assert [p.answer for p in load(tmp_path, with_column).problems] == ["4", "7"]
    found = load(tmp_path, [ASKED, TALKED], fields={"answer": "messages"})
    assert [(p.id, p.answer) for p in found.problems] == [("a", "03")]
    assert found.dropped == {"no box in the assistant's last message": 1}
    found = load(tmp_path, [ASKED, TALKED], fields={"answer": "messages"}, needs_answers=False)
    assert [(p.id, p.answer) for p in found.problems] == [("a", "03"), ("b", "")]
    assert found.counts["without an answer"] == 1
    with pytest.raises(
        DataError, match=r"fields\.answer \(messages: the box in the assistant's last message\), or another"
    ):
        load(tmp_path, [ASKED])


def test_parts_of_text_are_one_message_and_a_developer_is_the_system(tmp_path):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    row = {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]}
    (problem,) = load(tmp_path, [row], needs_answers=False).problems
    assert (problem.text, problem.history) == ("1+1?", (turn("system", "Be brief."),))


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([{"role": "system", "content": "s"}], "column 'messages' has no message of a user; correct or remove the row"),
        (
            [{"role": "tool", "content": "4"}, {"role": "user", "content": "u"}],
            "column 'messages' has message 1 of another role than system, user or assistant",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "column 'messages' has message 1 with a content that is not text",
        ),
        ([{"role": "user", "content": None}], "column 'messages' has message 1 with a content that is not text"),
        ([{"from": "human", "value": "u"}], "column 'messages' is [{'from': 'human', 'value': 'u'}], but `problem` is"),
        ([{"role": "user", "content": " "}], "`problem` is empty"),
    ],
)
def test_messages_that_cannot_be_asked_are_one_line(tmp_path, messages, complaint):
    with pytest.raises(DataError) as raised:
        load(tmp_path, [{"messages": messages}], needs_answers=False)
    assert str(raised.value).startswith(f"{tmp_path / 'problems.jsonl'}:1: {complaint}")


def test_files_with_a_problem_keep_it_and_count_the_messages_that_they_leave_out(tmp_path):
    """Of a file such as NuminaMath, and of those that trainers wrote with a system message of their own."""
    (problem,) = load(tmp_path, [{**ASKED, "problem": "1+2", "answer": 3}]).problems
    assert (problem.text, problem.history) == ("1+2", ())
    found = load(tmp_path, [{"prompt": ASKED["messages"], "answer": 3}])
    assert (found.problems[0].text, found.problems[0].history) == ("What is 1+2?", ())
    assert found.mended == {"messages before the user's last one left out": 1}


def test_one_question_in_another_conversation_is_another_problem_and_under_another_system_none(tmp_path):
    rows = [
        said("user: Hi", "assistant: Hello", "user: Why?", answer=1),
        said("user: Bye", "assistant: So long", "user: Why?", answer=2),
        said("system: In base 2.", "user: 1+1?", answer=10),
        said("system: In base 10.", "user: 1+1?", answer=2),
    ]
    training = load(tmp_path, rows, duplicates="exact").problems
    assert len(training) == 4
    assert len({identity(problem) for problem in training}) == len(training)
    held_out = load(tmp_path, [said("user: 1+1?", answer=2), said("user: Why?", answer=1)]).problems
    assert count_identical(training, held_out) == 1


def test_the_check_shows_conversations_and_names_what_answers_are_needed_for(tmp_path):
    few = write(tmp_path, [ASKED, TALKED])
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check", few, "--verifier", "boxed_match"])
    assert shown.exit_code == 0, shown.output
    assert "[system] Be brief.\nWhat is 1+2?" in shown.output
    assert "warning: no run that learns from outcomes, and no evaluation, takes those without an answer" in shown.output
    asked = ["check", "configs/quickstart.yaml", "--no-servers", f"data.train={few}", "evaluation=null",
             "training.batch_size=2", "training.mini_batch_size=2", "training.iterations=4"]  # fmt: skip
    shown = CliRunner().invoke(app, asked)
    assert (shown.exit_code, "no `answer`" in shown.output) == (2, True), shown.output
    shown = CliRunner().invoke(app, [*asked, "policy.kind=opd"])
    assert shown.exit_code == 0, shown.output


# Without answers


def test_rows_without_an_answer_are_taken_where_none_is_needed_and_counted(tmp_path):
    rows = [{"problem": "a"}, {"problem": "b", "answer": None}, {"problem": "c", "answer": 1}]
    for layout in ("plain", "auto"):
        found = load(tmp_path, rows, layout=layout, needs_answers=False)
        assert [p.answer for p in found.problems] == ["", "", "1"]
        assert found.counts == {"read": 3, "problems": 3, "without an answer": 2}
        with pytest.raises(DataError, match="only policies that learn from no outcome, such as opd, train without"):
            load(tmp_path, rows, layout=layout)
    assert load(tmp_path, rows, layout="dapo", needs_answers=False).dropped == {"no answer": 2}  # for all methods alike


def test_a_row_without_an_answer_contradicts_none(tmp_path):
    rows = [{"problem": "a"}, {"problem": "a", "answer": 1}, {"problem": "b"}, {"problem": "b", "answer": 1}]
    rows.append({"problem": "b", "answer": 2})
    found = load(tmp_path, rows, needs_answers=False)
    assert ([p.id for p in found.problems], found.dropped) == (["row-1", "row-2"], {"conflicting answers": 3})


@pytest.fixture
def unanswered(tmp_path):
    return write(tmp_path, [{"problem": f"a{i}+2b"} for i in range(1, 65)])


def plan(train, *overrides):
    return plan_training(load_config(Path("configs/quickstart.yaml"), [f"data.train={train}", *overrides]))


@pytest.mark.parametrize("kind", ["opd", "eopd", "kd", "{kind: spot, verifier_guidance: false}"])
def test_methods_that_need_no_outcome_train_on_problems_without_answers(unanswered, kind):
    planned = plan(unanswered, "evaluation=null", f"policy={kind}")
    assert planned.rows == {"read": 64, "problems": 64, "without an answer": 64}
    assert planned.filtered == 0
    assert plan(unanswered, f"policy={kind}").evaluation  # of problems that have answers


@pytest.mark.parametrize("overrides", [["policy=spot"], ["policy=grpo", "prompt.template=student"]])
def test_methods_that_learn_from_outcomes_refuse_problems_without_answers(unanswered, overrides):
    with pytest.raises(
        DataError, match=r":1: no `answer`, for which .* name its column in data\.train\.fields\.answer"
    ):
        plan(unanswered, "evaluation=null", *overrides)


def test_where_a_server_judges_no_method_and_no_evaluation_needs_answers(unanswered, monkeypatch):
    judge = "{kind: http, url: http://127.0.0.1:1/judge, api_key_env: JUDGE_KEY}"
    asked = [f"verifier={judge}", f"evaluation.verifier={judge}", f"evaluation.problems={unanswered}", "policy=spot"]
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^verifier: the environment variable JUDGE_KEY is not set$"):
        plan(unanswered, *asked)
    monkeypatch.setenv("JUDGE_KEY", "a key of the judge")
    planned = plan(unanswered, *asked)
    assert planned.rows == {"read": 64, "problems": 64, "without an answer": 64}
    assert len(planned.evaluation[0].problems) == 64
    asks_nobody = JudgedSet("", "", planned.sets["data.train"].problems, planned.evaluation[0].verifier)
    assert asyncio.run(check_sets([asks_nobody])) == []
    with pytest.raises(ConfigError, match=r"^evaluation\.verifier\.prices: only what the verifier of training costs"):
        plan(unanswered, *asked, "evaluation.verifier.prices.request=1")


def test_an_evaluation_that_is_judged_needs_answers_and_one_that_is_not_does_without(tmp_path, unanswered):
    with pytest.raises(
        DataError, match=r":1: no `answer`, for which .* name its column in evaluation\.problems\.fields"
    ):
        plan(unanswered, "policy=opd", f"evaluation.problems={unanswered}")
    rows = write(tmp_path, [{"instruction": "a1+2b", "dataset": "x"}], "alpaca.jsonl")
    with pytest.raises(
        DataError, match=r"evaluation\.problems: problem 'row-1' has no answer, since layout alpaca_eval"
    ):
        plan(unanswered, "policy=opd", f"evaluation.problems={rows}")
    with pytest.raises(
        DataError, match=r"data\.train: problem 'row-1' has no answer, since layout alpaca_eval reads none"
    ):
        plan(rows, "evaluation=null", "policy=spot")
    for path in (rows, unanswered):
        outputs = f"evaluation={{benchmarks: {{x: {{path: {path}, format: alpaca_eval}}}}, max_response_tokens: 90}}"
        assert plan(unanswered, "policy=opd", outputs).evaluation[0].verifier is None
