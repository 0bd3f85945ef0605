"""Plays episodes of one environment. `served.py` starts it as a file; it is never imported.

It reads a request a line, and writes an answer a line. It is a zygote: it imports the environment once, and never runs
it. Each episode is played by a forked child, which is shut in and can be killed at any time, since a request carries
the whole episode before it: a child that has played it goes on, or else a new one plays it again. So code that runs in
an episode reaches no other one. Standard library only, Python 3.9 and later.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import json
import os
import random
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from spot_async.environments import confinement
else:
    import confinement

CHILDREN = 64  # that are kept for their episodes' next turns
REPLY_BYTES = 1 << 20  # of a child, to one request
TEXT_CHARACTERS = 1 << 16  # of what is answered to a turn; what is longer loses its middle
HAD_NO_EFFECT = ("killed", "unreadable")  # kinds of answers to turns of which the environment knows nothing
NO_TOOLS = ("reset", "get_reward")  # public methods that are none
NUMBER_BYTES = 16  # of a request, before it and its reply


class Failed(Exception):
    """The environment raised, or answered otherwise than before: it would again."""


class Lost(Failed):
    """A child was gone before it answered."""


class Episode:
    """An episode as the child has it that plays it. The zygote's own never begins."""

    def __init__(self, names: list[str], arguments: dict[str, Any]) -> None:
        """Import `module:name`, a class or functions. Raises whatever that raises."""
        split = [name.partition(":") for name in names]
        found = [getattr(importlib.import_module(module), name) for module, _, name in split]
        self.tools = {each.__name__: each for each in found}
        self.reads_text, self.resets = hasattr(found[0], "step"), hasattr(found[0], "reset")
        self._make: Any = None
        self._object: Any = None  # functions have none
        if inspect.isclass(found[0]):
            self._make = partial(found[0], **arguments)
            methods = dict(inspect.getmembers(found[0], inspect.isroutine))
            self.tools = {name: methods[name] for name in methods if name[0] != "_" and name not in NO_TOOLS}

    def ready(self) -> None:
        """Do nothing: there is a child that does."""

    def play(self, row: dict[str, Any], seed: int, steps: list[Any]) -> str:
        """Begin, and play what was played before; return what the prompt says of the episode."""
        random.seed(seed)
        self._object = self._make and self._make()
        opening = self._reset({**row, "seed": seed})
        for number, step in enumerate(steps, 1):
            was = step["observation"]
            if was["kind"] not in HAD_NO_EFFECT and was != (now := self.act(step["action"])):
                shown = ["\n".join(each["texts"]) for each in (was, now)]
                start = max(len(os.path.commonprefix(shown)) - 20, 0)  # noqa: RUF071 - letter by letter is meant
                before, after = (repr(each[start : start + 80]) for each in shown)
                raise Failed(
                    f"turn {number} of problem {row['id']!r} was answered differently when it was played again: "
                    f"{before}, then {after}: it depends on more than problem, seed and actions"
                )
        return opening

    def _reset(self, given: dict[str, Any]) -> str:
        reset = getattr(self._object, "reset", None)
        if reset is None:
            return ""
        wanted = inspect.signature(reset).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in wanted.values()):
            given = {name: given[name] for name in given if name in wanted}
        opening = reset(**given)
        opening = opening[0] if isinstance(opening, tuple) else opening  # gymnasium's has a second part
        return "" if opening is None else _as_text(opening, TEXT_CHARACTERS)

    def act(self, action: dict[str, Any]) -> dict[str, Any]:
        """Return what is answered. What a tool raises is an answer too, unless there was not enough memory."""
        observation: dict[str, Any] = {"texts": [], "kind": "answer", "is_done": False, "reward": None}
        calls = [partial(self._call, **call) for call in action["calls"]]
        for call in [partial(self._object.step, action["text"])] if self.reads_text else calls:
            try:
                answer = call()
            except MemoryError:
                raise
            except BaseException as error:  # noqa: BLE001 - somebody else's, of which the model is told
                answer, observation["kind"] = _said(error), "error"
            else:
                answer = _seen(answer, observation) if self.reads_text else answer
            observation["texts"].append(_as_text(answer, TEXT_CHARACTERS // max(len(calls), 1)))
        return observation

    def reward(self) -> float | None:
        """Return what the episode is worth, if the environment says so."""
        given = getattr(self._object, "get_reward", None) or getattr(self._object, "reward", None)
        given = given() if callable(given) else given
        return None if given is None else float(given)

    def close(self) -> None:
        """Close what the environment opened; nothing if it never began."""
        getattr(self._object, "_close", bool)()

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name not in self.tools:
            raise ValueError(f"there is no tool {name!r}, but {', '.join(self.tools)}")
        answer = getattr(self._object, name, self.tools[name])(**arguments)
        return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


def _seen(answer: Any, observation: dict[str, Any]) -> Any:
    """Read what `step` returned, a mapping or a tuple as gymnasium's; return what is seen."""
    if isinstance(answer, dict):
        seen = answer["observations"] if "observations" in answer else answer["observation"]
        reward, is_done = answer.get("reward"), answer.get("done")
    else:
        seen, reward, is_done, *more = answer
        is_done = is_done or (len(more) > 1 and more[0])  # its own end, or that of its time
    observation.update(is_done=bool(is_done), reward=None if reward is None else float(reward))
    are_messages = isinstance(seen, list) and all(isinstance(each, dict) and "content" in each for each in seen)
    return "\n".join(str(each["content"]) for each in seen) if are_messages else seen


def _said(error: BaseException) -> str:
    return ": ".join(filter(None, [type(error).__name__, str(error)]))


def _as_text(value: Any, most: int) -> str:
    """Return a value as a model reads it."""
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (dict, list)) else str(value)
    if len(text) > most:
        text = f"{text[: most // 2]}\n...\n{text[-most // 2 :]}"
    return text.encode(errors="replace").decode()


class Child:
    """A process that plays one episode."""

    def __init__(self, episode: Episode, limits: dict[str, Any], not_its_own: list[int]) -> None:
        """Fork. The child closes files that are not its own."""
        self.channel, channel = socket.socketpair()
        self._ended_by = signal.SIGTERM if limits["in_namespaces"] else signal.SIGKILL
        limits = {**limits, "parent": os.getpid()}
        self._pid = os.fork()
        if not self._pid:
            _play(channel, episode, limits, [*not_its_own, self.channel.fileno()])
        channel.close()

    def ask(self, do: str, timeout_s: float, **given: Any) -> Any:
        """Return what the episode's method returns, or end the child: raises `Failed`, or `Lost` without an answer."""
        until = time.monotonic() + timeout_s
        try:
            kind, what = self._answer(json.dumps([do, given]).encode(), until)
        except (OSError, ValueError, TypeError, RecursionError):
            is_late = time.monotonic() >= until
            kind, what = "lost", f"it took longer than {timeout_s:g} s" if is_late else "its process ended"
        if kind == "result":
            return what
        self.end()
        raise Failed(what) if kind == "failed" else Lost(what)

    def _answer(self, request: bytes, until: float) -> Any:
        """Return the kind and the content of what answers a request. Raises OSError if nothing does in time.

        It stands behind the request's number, which no program that the child starts can guess.
        """
        number, read = os.urandom(NUMBER_BYTES // 2).hex().encode(), b""
        self.channel.settimeout(until - time.monotonic())
        self.channel.sendall(number + request + b"\n")
        while not (line := re.search(rb"^%b(.*)\n" % number, read, re.MULTILINE)):
            if len(read) > REPLY_BYTES:
                return "lost", "it wrote too much"
            self.channel.settimeout(max(until - time.monotonic(), 1e-3))
            if not (part := self.channel.recv(1 << 16)):
                raise ConnectionError
            read += part
        return json.loads(line[1])

    def close(self) -> None:
        """Let the episode close what it opened, and end the process."""
        with suppress(Failed):  # it is ended then
            self.ask("close", 1.0)
            self.end()

    def end(self) -> None:
        """End the process and, in namespaces, all that it started."""
        for kill in os.killpg, os.kill:  # right after the fork it has no group yet
            with suppress(ProcessLookupError):
                kill(self._pid, self._ended_by)
        os.waitpid(self._pid, 0)
        self.channel.close()


def _play(channel: socket.socket, episode: Episode, limits: dict[str, Any], not_its_own: list[int]) -> NoReturn:
    """Be the child: answer requests until there are no more."""
    try:
        os.setsid()
        for each in not_its_own:
            os.close(each)
        refusal = ""
        try:
            confinement.confine(**limits)
        except (OSError, AttributeError) as error:
            refusal = _said(error)
        for line in channel.makefile("rb"):
            try:
                do, given = json.loads(line[NUMBER_BYTES:])
                answer = ["lost", refusal] if refusal else ["result", getattr(episode, do)(**given)]
                reply = json.dumps(answer, allow_nan=False)
            except MemoryError:
                reply = '["lost", "it took too much memory"]'
            except BaseException as error:  # noqa: BLE001 - whoever asked is told
                is_ours = isinstance(error, Failed)
                reply = json.dumps(["failed", str(error) if is_ours else f"{do} raised {_said(error)}"])
            channel.sendall(b"\n" + line[:NUMBER_BYTES] + reply.encode() + b"\n")
    finally:
        os._exit(1)


class Zygote:
    """Answers requests. Its public methods are what can be asked."""

    def __init__(self, settings: dict[str, Any], own_files: list[int]) -> None:
        self._limits: dict[str, Any] = settings["limits"]
        self._timeout_s: float = settings["timeout_s"]
        self._own_files = own_files
        self._kept: list[tuple[list[Any], Child]] = []  # with what they have played, the oldest first
        self._episode = Episode(settings["objects"], settings["arguments"])
        gc.freeze()  # children share what was imported

    def describe(self) -> dict[str, Any]:
        """Return what the tools are, or why no child can be shut in."""
        try:
            child = self._fork()
            child.ask("ready", self._timeout_s)
            child.end()
        except Lost as lost:
            return {"refusal": str(lost)}
        tools = self._episode.tools.items()
        described = [[name, str(inspect.signature(tool)), inspect.getdoc(tool)] for name, tool in tools]
        return {"reads_text": self._episode.reads_text, "resets": self._episode.resets, "tools": described}

    def opening(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        child = self._fork()
        text = child.ask("play", self._timeout_s, row=row, seed=seed, steps=[])
        child.close()
        return {"text": text}

    def act(self, row: dict[str, Any], seed: int, steps: list[Any], action: dict[str, Any]) -> dict[str, Any]:
        child, replayed_steps = self._at(row, seed, steps)
        try:
            observation = child.ask("act", self._timeout_s, action=action)
        except Lost as lost:
            texts = [f"killed: {lost}"] * max(len(action["calls"]), 1)
            observation = {"texts": texts, "kind": "killed", "is_done": False, "reward": None}
        else:
            step = {"action": action, "observation": observation}
            self._kept.append(([row, seed, [*_lasting(steps), step]], child))
            if len(self._kept) > CHILDREN:
                self._kept.pop(0)[1].close()
        return {"observation": observation, "replayed_steps": replayed_steps}

    def reward(self, row: dict[str, Any], seed: int, steps: list[Any]) -> dict[str, Any]:
        child, replayed_steps = self._at(row, seed, steps)
        reward = child.ask("reward", self._timeout_s)
        child.close()
        return {"reward": reward, "replayed_steps": replayed_steps}

    def _at(self, row: dict[str, Any], seed: int, steps: list[Any]) -> tuple[Child, int]:
        """Return a child that has played these steps, and how many it played again for that."""
        lasting = _lasting(steps)
        for kept in self._kept:
            if kept[0] == [row, seed, lasting]:
                self._kept.remove(kept)
                with suppress(Failed):  # it may have ended meanwhile
                    kept[1].ask("ready", self._timeout_s)
                    return kept[1], 0
                break
        child = self._fork()
        child.ask("play", self._timeout_s * (1 + len(lasting)), row=row, seed=seed, steps=steps)
        return child, len(lasting)

    def _fork(self) -> Child:
        others = [child.channel.fileno() for _, child in self._kept]
        return Child(self._episode, self._limits, [*self._own_files, *others])


def _lasting(steps: list[Any]) -> list[Any]:
    return [step for step in steps if step["observation"]["kind"] not in HAD_NO_EFFECT]


def main() -> None:
    """Answer requests until there are no more: each names a method of the zygote, and its arguments."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # schedulers send it to all processes of a job
    requests, replies, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for taken in 0, 1:
        os.dup2(nothing, taken)  # what is printed is no reply
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - as Python put it there
    zygote, why_not = None, ""
    try:
        zygote = Zygote(json.loads(sys.argv[1]), [requests, replies])
    except BaseException as error:  # noqa: BLE001 - whoever asks is told
        why_not = _said(error)
    answers = os.fdopen(replies, "w")
    print("{}", file=answers, flush=True)
    os.dup2(nothing, 2)
    for line in os.fdopen(requests):
        request = json.loads(line)
        try:
            if zygote is None:
                raise Lost(why_not)
            reply = getattr(zygote, request.pop("do"))(**request)
        except (Failed, OSError) as error:  # the latter where it cannot fork
            reply = {"error": str(error), "is_passing": not isinstance(error, Failed) or isinstance(error, Lost)}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
