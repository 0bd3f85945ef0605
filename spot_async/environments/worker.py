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
import select
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


class Failed(Exception):
    """The environment raised, or answered otherwise than before: it would again."""


class Lost(Exception):
    """A child was gone before it answered. The message says why."""


class Episode:
    """An episode as the child has it that plays it. The zygote's own never begins."""

    def __init__(self, names: str | list[str], arguments: dict[str, Any]) -> None:
        """Import `module:name` or `FILE.py:name`, a class or functions. Raises whatever that raises."""
        split = [name.rpartition(":") for name in ([names] if isinstance(names, str) else names)]
        found = [getattr(_imported(where), name) for where, _, name in split]
        self._make = partial(found[0], **arguments) if inspect.isclass(found[0]) else None
        self._object: Any = None  # functions have none
        self._opening = ""
        self.reads_text, resets = hasattr(found[0], "step"), hasattr(found[0], "reset")
        self.tools = {each.__name__: each for each in found}
        if self._make is not None:
            methods = [] if self.reads_text else inspect.getmembers(found[0], inspect.isroutine)
            self.tools = {name: tool for name, tool in methods if name[0] != "_" and name not in NO_TOOLS}
        if not (self.tools or self.reads_text):
            raise TypeError("there is no tool: no public method")
        described = [[name, str(inspect.signature(tool)), inspect.getdoc(tool)] for name, tool in self.tools.items()]
        self.description = {"reads_text": self.reads_text, "resets": resets, "tools": described}

    def opening(self) -> str:
        return self._opening

    def play(self, row: dict[str, Any], seed: int, steps: list[Any]) -> None:
        """Begin, and play what was played before. Raises `Failed` if that is answered differently."""
        random.seed(seed)
        self._object = self._make and self._make()
        self._opening = self._reset({**row, "seed": seed})
        for number, step in enumerate(steps, 1):
            was = step["observation"]
            if was["kind"] not in HAD_NO_EFFECT and was != (now := self.act(step["action"])):
                shown = ["\n".join(each["texts"]) for each in (was, now)]
                start = max(len(os.path.commonprefix(shown)) - 20, 0)  # noqa: RUF071 - letter by letter is meant
                before, after = (repr(each[start : start + 80]) for each in shown)
                raise Failed(
                    f"turn {number} of problem {row['id']!r} was answered differently when it was played again: "
                    f"{before}, then {after}: it depends on more than problem, seed and actions "
                    "(environment.replayable)"
                )

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


def _imported(where: str) -> Any:
    """Return a module, by its name or by its file, whose neighbours it then can import as a script can."""
    if where.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(where))  # noqa: PTH100
        sys.path.insert(0, folder)
        where = file[: -len(".py")]
    return importlib.import_module(where)


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

    def __init__(self, episode: Episode, settings: dict[str, Any], not_its_own: list[int]) -> None:
        """Fork. The child closes files that are not its own."""
        self.channel, channel = socket.socketpair()
        in_namespaces = settings["sandbox"] == "namespaces"
        self._ended_by = signal.SIGTERM if in_namespaces else signal.SIGKILL
        limits = settings["memory_limit_bytes"], in_namespaces, settings["network"], os.getpid()
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
        number, read = os.urandom(8).hex().encode(), b""
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

    def waits(self) -> bool:
        """Return whether it waits for a request. It is ended if it has ended itself, or written what nobody asked."""
        if is_readable := bool(select.select([self.channel], [], [], 0)[0]):
            self.end()
        return not is_readable

    def close(self) -> None:
        """Let the episode close what it opened, and end the process."""
        with suppress(Failed, Lost):  # it is ended then
            self.ask("close", 1.0)
            self.end()

    def end(self) -> None:
        """End the process and, in namespaces, all that it started."""
        for kill in os.killpg, os.kill:  # right after the fork it has no group yet
            with suppress(ProcessLookupError):
                kill(self._pid, self._ended_by)
        os.waitpid(self._pid, 0)
        self.channel.close()


def _play(
    channel: socket.socket, episode: Episode, limits: tuple[int, bool, bool, int], not_its_own: list[int]
) -> NoReturn:
    """Be the child: answer requests until there are no more."""
    try:
        os.setsid()
        for each in not_its_own:
            os.close(each)
        refusal = ""
        try:
            confinement.confine(*limits)
        except (OSError, ValueError, AttributeError) as error:  # the last two: lower limits, and another system
            refusal = _said(error)
        for line in channel.makefile("rb"):
            try:
                number, (do, given) = line[:16], json.loads(line[16:])
                answer = ["lost", refusal] if refusal else ["result", getattr(episode, do)(**given)]
                reply = json.dumps(answer, allow_nan=False)
            except MemoryError:
                reply = '["lost", "it took too much memory"]'
            except BaseException as error:  # noqa: BLE001 - whoever asked is told
                is_ours = isinstance(error, Failed)
                reply = json.dumps(["failed", str(error) if is_ours else f"{do} raised {_said(error)}"])
            channel.sendall(b"\n" + number + reply.encode() + b"\n")
    finally:
        os._exit(1)


class Zygote:
    """Answers requests, and keeps children for the next turns of their episodes."""

    def __init__(self, settings: dict[str, Any], own_files: list[int]) -> None:
        self._settings = settings
        self._timeout_s: float = settings["timeout_s"]
        self._own_files = own_files
        self._kept: dict[str, Child] = {}  # by what they have played, the oldest first
        self._episode = Episode(settings["object"], settings["arguments"])
        gc.freeze()  # children share what was imported

    def describe(self) -> dict[str, Any]:
        """Return what the tools are, or why no child can be shut in."""
        try:
            child = self._fork()
            child.ask("opening", self._timeout_s)
            child.end()
        except Lost as lost:
            return {"refusal": str(lost)}
        return self._episode.description

    def play(self, row: dict[str, Any], seed: int, steps: list[Any], do: str, **given: Any) -> dict[str, Any]:
        """Play an episode's steps, unless a child has, and return what its method `do` answers then.

        What kills the child with an action is an answer, and the steps must be played again for the next.
        """
        lasting = [step for step in steps if step["observation"]["kind"] not in HAD_NO_EFFECT]
        begins = do == "opening"  # which a child may do many times: no model's code is run for it
        kept = self._kept.pop(do if begins else json.dumps([row, seed, lasting]), None)
        is_new = kept is None or not kept.waits()
        child = self._fork() if kept is None or is_new else kept
        replayed_steps = len(lasting) if is_new else 0
        if begins or is_new:
            child.ask("play", self._timeout_s * (1 + len(lasting)), row=row, seed=seed, steps=steps)
        try:
            answer = child.ask(do, self._timeout_s, **given)
        except Lost as lost:
            if do != "act":
                raise
            texts = [f"killed: {lost}"] * max(len(given["action"]["calls"]), 1)
            answer = {"texts": texts, "kind": "killed", "is_done": False, "reward": None}
            return {"answer": answer, "replayed_steps": replayed_steps}
        old: Child | None = child
        if begins:
            old, self._kept[do] = None, child
        elif do == "act":
            place = json.dumps([row, seed, [*lasting, {**given, "observation": answer}]])
            old, self._kept[place] = self._kept.pop(place, None), child
            if len(self._kept) > CHILDREN:
                old = self._kept.pop(next(iter(self._kept)))
        if old is not None:
            old.close()
        return {"answer": answer, "replayed_steps": replayed_steps}

    def _fork(self) -> Child:
        others = [child.channel.fileno() for child in self._kept.values()]
        return Child(self._episode, self._settings, [*self._own_files, *others])


def main() -> None:
    """Answer requests until there are no more: what `Zygote.play` takes, or nothing for `describe`."""
    confinement.end_with(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # schedulers send it to all processes of a job
    requests, replies, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    for taken in 0, 1:
        os.dup2(nothing, taken)  # what is printed is no reply
    del sys.path[0]  # where this file lies
    zygote, why_not = None, ""
    try:
        zygote = Zygote(json.loads(sys.argv[1]), [requests, replies])
    except BaseException as error:  # noqa: BLE001 - whoever asks is told
        why_not = _said(error)
    answers = os.fdopen(replies, "w", buffering=1)
    answers.write("{}\n")
    os.dup2(nothing, 2)
    for line in os.fdopen(requests):
        request = json.loads(line)
        try:
            if zygote is None:
                raise Lost(why_not)
            reply = zygote.play(**request) if request else zygote.describe()
        except (Failed, Lost, OSError) as error:  # the last where it cannot fork
            reply = {"error": str(error), "is_passing": not isinstance(error, Failed)}
        answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
