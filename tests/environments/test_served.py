"""What an environment is told and what it answers, whoever plays the episode, and what is refused at the start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import toy_worlds
from deadlines import soon
from played_worlds import PROBLEM, count, opened, play, run
from transformers.utils import get_json_schema

from spot_async.errors import ConfigError, PermanentError, RequestError, TransientError
from spot_async.models.episodes import Action, Call, Observation, Step
from spot_async.protocols import Environment

SUPPORT = Path(__file__).parents[1] / "support"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT}:{ROOT}")


PICKED = [  # what a tool returns, as the model reads it
    (Call("pick", {"kind": "json", "names": ["tea", "ℕ"]}), '{"names": ["tea", "ℕ"]}'),
    (Call("pick", {"kind": "list", "names": []}), "[]"),
    (Call("pick", {"kind": "none"}), "None"),
    (run(r"out = '\ud800'"), "?"),
    (Call("wait"), "waited"),
]
RAISED = [  # kinds are `error`
    (run("raise ValueError('no\\nthing')"), "ValueError: no\nthing"),
    (run("raise TimeoutError"), "TimeoutError"),
    (Call("pick", {"kind": "other"}), "KeyError: 'other'"),
    (Call("count", {"many": 2}), "TypeError: Toys.count() got an unexpected keyword argument 'many'"),
    (Call("cont"), "ValueError: there is no tool 'cont', but count, pick, run, wait"),
    (Call("_close"), "ValueError: there is no tool '_close', but count, pick, run, wait"),
    (Call("reset"), "ValueError: there is no tool 'reset', but count, pick, run, wait"),
]


async def test_a_class_is_tools_with_the_schemas_of_transformers() -> None:
    async with opened(arguments={"start": 5}) as environment:
        assert isinstance(environment, Environment)
        assert not environment.reads_text
        assert environment.resets
        assert environment.tools() == [
            get_json_schema(getattr(toy_worlds.Toys, name)) for name in ("count", "pick", "run", "wait")
        ]
        steps: list[Step] = []
        assert (await play(environment, steps, count(), count(2))).texts == ("6", "8")
        answered = await play(environment, steps, *(call for call, _ in PICKED))
        assert answered == Observation(texts=tuple(text for _, text in PICKED))
        answered = await play(environment, steps, *(call for call, _ in RAISED))
        assert answered == Observation(texts=tuple(text for _, text in RAISED), kind="error")
        assert await environment.reward(PROBLEM, steps, seed=1, deadline=soon()) == 2.0


async def test_functions_are_tools_without_a_state() -> None:
    async with opened(object=["toy_worlds:add", "toy_worlds:dice"]) as environment:
        assert [tool["function"]["name"] for tool in environment.tools()] == ["add", "dice"]
        steps: list[Step] = []
        assert (await play(environment, steps, Call("add", {"a": 2, "b": 3}))).texts == ("5",)
        assert not environment.resets
        assert await environment.opening(PROBLEM, seed=1, deadline=soon()) == ""
        assert await environment.reward(PROBLEM, steps, seed=1, deadline=soon()) is None


async def test_an_opening_depends_on_problem_and_seed_alone() -> None:
    async with opened() as one, opened() as other:
        first = await one.opening(PROBLEM, seed=1, deadline=soon())
        assert first.startswith("How many?, seed 1, ")
        again = [await each.opening(PROBLEM, seed=1, deadline=soon()) for each in (one, other, other)]
        assert again == [first] * 3
        assert await one.opening(PROBLEM, seed=2, deadline=soon()) != first


@pytest.mark.parametrize("shape", ["gymnasium", "short", "old", "mapping", "messages"])
async def test_a_world_that_reads_text_answers_as_gymnasium_does_or_with_a_mapping(shape: str) -> None:
    async with opened(object="toy_worlds:Walk", arguments={"shape": shape}) as environment:
        assert (environment.reads_text, environment.resets, environment.tools()) == (True, True, [])
        assert await environment.opening(PROBLEM, seed=1, deadline=soon()) == "at 0"
        steps: list[Step] = []
        assert await play(environment, steps, text="right") == Observation(texts=("at 1",), reward=1.0)
        assert await play(environment, steps, text="up") == Observation(texts=("KeyError: 'up'",), kind="error")
        assert await play(environment, steps, text="right") == Observation(texts=("at 2",), reward=2.0, is_done=True)
        assert await environment.reward(PROBLEM, steps, seed=1, deadline=soon()) == 3.0


async def test_steps_are_played_again_by_whoever_has_not_played_them() -> None:
    steps: list[Step] = []
    async with opened(timeout_s=3.0) as one:
        await play(one, steps, count(5))
        assert (await play(one, steps, count(90), run("while True: pass"))).kind == "killed"
        assert steps[-1].observation.texts == ("killed: it took longer than 3 s",) * 2
        unreadable = Observation(texts=("no such format",), kind="unreadable")
        steps.append(Step(action=Action(text="<tool_call>"), observation=unreadable))
        assert (await play(one, steps, count())).texts == ("6",)  # what was killed had no effect
        forks = [[*steps], [*steps]]
        assert [(await play(one, fork, count(by))).texts for fork, by in zip(forks, (1, 10), strict=True)] == [
            ("7",),
            ("16",),
        ]
        assert one.replayed_steps == 1 + 2  # after the kill, and for the second fork
    async with opened(workers=2) as other:
        assert (await play(other, forks[1], count())).texts == ("17",)
        assert (await play(other, forks[1], count())).texts == ("18",)  # by the worker that has it now
        assert other.replayed_steps == 3
        assert await other.reward(PROBLEM, forks[0], seed=1, deadline=soon()) == 7 / 4


async def test_an_episode_that_is_answered_differently_is_an_error_with_both_texts() -> None:
    steps: list[Step] = []
    objects = ["toy_worlds:add", "toy_worlds:dice"]
    async with opened(object=objects) as one:
        await play(one, steps, Call("add", {"a": 40, "b": 1}))
        await play(one, steps, Call("dice"))
    async with opened(object=objects) as other:
        with pytest.raises(PermanentError, match=r"turn 2 of problem 'p7' was answered differently") as error:
            await play(other, [*steps], count())
        assert f"'{steps[1].observation.texts[0]}', then '" in str(error.value)
        assert str(error.value).endswith("it depends on more than problem, seed and actions (environment.replayable)")


async def test_episodes_beyond_those_that_are_kept_are_played_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with opened(sandbox="none", arguments={"log": str(log)}) as environment:
        episodes: list[list[Step]] = [[] for _ in range(65)]
        for n, steps in enumerate(episodes):
            await play(environment, steps, count(n))
        assert log.read_text() == "closed\n"  # the oldest
        assert environment.replayed_steps == 0
        assert [(await play(environment, episodes[n], count())).texts for n in (64, 0)] == [("65",), ("1",)]
        assert environment.replayed_steps == 1


FAULTS: list[tuple[str, dict[str, Any], type[RequestError], str]] = [
    ("reset", {}, PermanentError, "play raised ValueError: no row"),
    ("hang", {"timeout_s": 0.5}, TransientError, "it took longer than 0.5 s"),
    ("exit", {}, TransientError, "its process ended"),
    ("reward", {}, PermanentError, "reward raised ValueError: could not convert string to float: 'much'"),
    ("nan", {}, PermanentError, "reward raised ValueError: Out of range float"),
]


@pytest.mark.parametrize(("where", "settings", "kind", "said"), FAULTS)
async def test_what_the_environment_itself_fails_at_is_an_error(
    where: str, settings: dict[str, Any], kind: type[RequestError], said: str
) -> None:
    async with opened(object="toy_worlds:Faulty", arguments={"where": where}, **settings) as environment:
        with pytest.raises(kind) as error:
            await environment.reward(PROBLEM, [], seed=1, deadline=soon())
    assert str(error.value).startswith("environment.object=toy_worlds:Faulty: reward of problem 'p7': ")
    assert said in str(error.value)


@pytest.mark.parametrize("shape", ["nothing", "infinite"])
async def test_a_step_that_is_none_is_an_error(shape: str) -> None:
    async with opened(object="toy_worlds:Walk", arguments={"shape": shape}) as environment:
        with pytest.raises(PermanentError, match="act raised ValueError"):
            await play(environment, [], text="right")


REFUSED = [
    ({"object": "no_such_module:Toys"}, "environment.object=no_such_module:Toys: ModuleNotFoundError: No module named"),
    ({"object": "toy_worlds:Tojs"}, "toy_worlds:Tojs: AttributeError: module 'toy_worlds' has no attribute 'Tojs'"),
    ({"object": "toy_worlds"}, "environment.object=toy_worlds: "),
    ({"python": "no-such-python"}, "environment.python=no-such-python: there is no such program"),
    ({"object": ["toy_worlds:undescribed"]}, "undescribed has no docstring for item: describe it (it is shown to"),
    ({"object": "toy_worlds:silent"}, "tool silent has no docstring: describe it (it is shown to the model)"),
    ({"object": "toy_worlds:untyped"}, "tool untyped has no schema: Argument item is missing a type hint"),
    ({"object": "builtins:object"}, "environment.object=builtins:object: TypeError: there is no tool"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
async def test_what_cannot_be_played_is_refused_at_the_start_in_a_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        async with opened(**changes):
            pass
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.13"])
async def test_another_interpreter_plays_the_same(version: str) -> None:
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no Python {version} here")
    async with opened(python=str(found[-1])) as other, opened(python=sys.executable) as ours:
        assert other.tools() == ours.tools()
        steps: list[Step] = []
        await play(other, steps, count(5))
        assert (await play(ours, steps, count(2))).texts == ("7",)
        openings = [await each.opening(PROBLEM, seed=3, deadline=soon()) for each in (other, ours)]
        assert openings[0] == openings[1]


PROGRAMS = [
    ("print('a' * 3); print('b')", "aaa\nb\n"),
    ("print(1)\nraise ValueError('no')", "1\nValueError: no"),
    ("print(", "SyntaxError: '(' was never closed"),
    ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
    ("open('kept.txt', 'w').write('42')", ""),
    ("print(open('kept.txt').read())", "42\n"),
    ("import random; print(random.random(), {'a', 'b', 'c'}, object())", "0.8444218515250481 "),
    ("open('/proc/1/mem')", "PermissionError: [Errno 13] Permission denied: '/proc/1/mem'"),
    ("print(bytearray(2**40))", "MemoryError"),
    ("import socket; socket.create_connection(('127.0.0.1', 9))", "OSError: [Errno 101] Network is unreachable"),
    ("print('\\ud800')", "UnicodeEncodeError: "),
]


async def test_the_python_tool_gives_what_a_program_prints_and_its_last_line_of_error() -> None:
    tool = "spot_async.environments.python_tool:PythonTool"
    steps: list[Step] = []
    async with opened(object=tool) as environment:
        for code, printed in PROGRAMS:
            answered = await play(environment, steps, Call("python", {"code": code}))
            assert answered.kind == "answer"
            assert answered.texts[0].startswith(printed), code
    async with opened(object=tool) as other:  # hashes, random numbers and addresses are the same there
        assert (await play(other, steps, Call("python", {"code": "print(2 + 2)"}))).texts == ("4\n",)
        assert other.replayed_steps == len(PROGRAMS)
