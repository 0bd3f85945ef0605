"""What a chat template writes between a model's turns, in tokens, so that nothing sampled is made of text again.

The ids of an episode are `prompt | turn | bridge | turn | ...`. The last id of a turn is its end token. What follows it
is found by marks: the template renders a chat of words that occur nowhere else, and the bridge stands among them.

Some templates show earlier turns otherwise than they were sampled. Most of these drop what was thought before a user's
last message. A model that is trained on its turns as they were would never meet such a history again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from spot_async.base.text import first_line, shortened
from spot_async.errors import ConfigError, DataError
from spot_async.models.episodes import Call, Tools
from spot_async.models.template_trial import overdoes
from spot_async.models.vocabulary import Vocabulary
from spot_async.types import IntArray

EMPTY_BLOCKS = (
    "environment: the chat template shows earlier turns with an empty block of thinking more, or less, than the run "
    "keeps of them"
)
_MARK = "w7"  # begins the words by which texts are found
_ASKED, _THOUGHT, _SAID, _SEEN, _TOOL = (_MARK + word for word in ("asked", "thought", "said", "seen", "tool"))
_QUESTION, _TURN = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}
# As models spell it: <think>, <seed:think>, [THINK].
_OPEN, _CLOSE = (rf"(?i:[<\[]{slash}(?:\w+:)?think(?:ing)?[>\]])" for slash in ("", "/"))
_EMPTY_THINKING = re.compile(rf"{_OPEN}\s*{_CLOSE}\s*")
_BEGUN_THINKING = re.compile(rf"{_OPEN}\s*\Z")
_SPACE_AROUND = re.compile(rf"\s*({_THOUGHT}|{_SAID}|{_OPEN}|{_CLOSE})\s*")


class Bridges:
    """What stands between turns by one chat template, where an environment answers as `tool` or as `user`.

    `turn_end` is the id with which the template ends a turn. `generation_prompt` is the text from a user's message to
    the next turn. `doubts` has a line if the template would show an empty block of thinking more or less.
    """

    turn_end: int

    def __init__(
        self,
        vocabulary: Vocabulary,
        arguments: Mapping[str, Any],
        tools: Tools = (),
        *,
        role: Literal["auto", "tool", "user"] = "auto",
        history: Literal["exact", "kept"] = "exact",
    ) -> None:
        """Find the bridge. `arguments` is what `apply_chat_template` gets beside messages and tools.

        Raises ConfigError if the template writes no bridge, or rewrites earlier turns though `history` is `exact`, and
        DataError if it fails.
        """
        self._tokenizer, self._added = vocabulary.tokenizer, vocabulary.added
        shown = list(tools) or None
        self.template_text = str(self._tokenizer.get_chat_template(arguments.get("chat_template"), shown))
        self._arguments = {**arguments, "tools": shown, "chat_template": self.template_text}
        self.role = role if role != "auto" else "tool" if tools else "user"
        self._other = "user" if self.role == "tool" else "tool"
        self._stops = {str(self._tokenizer.convert_ids_to_tokens(each)): each for each in vocabulary.end_token_ids}
        self._stop = re.compile("|".join(map(re.escape, sorted(self._stops, key=len, reverse=True))))
        self._prompt = self._render([_QUESTION])
        self.generation_prompt = self._prompt.rpartition(_ASKED)[2]
        self._begun = _BEGUN_THINKING.search(self._prompt)
        mark = self._begun or re.search(_OPEN, self.template_text)
        self._open = mark[0].strip() if mark else "<think>"
        self._close = f"{self._open[0]}/{self._open[1:]}"
        if "<|think|>" in self._prompt:  # so Gemma 4 is told to think
            self._open, self._close = "<|channel>thought", "<channel|>"
        self._find()
        self.doubts = self._doubts(history)

    def between(self, texts: Sequence[str]) -> IntArray:
        """Return the ids (B,) between a turn's end token and the next turn.

        `texts` answer the turn's calls, one for each; for role `user` there is one. Control tokens that they spell are
        letters. Raises DataError if they cannot be, or if the template shows these texts otherwise than others.
        """
        head, behind = self._parts(texts)
        inner = behind.removeprefix(self._before).removesuffix(self._after)
        if len(self._before) + len(inner) + len(self._after) != len(behind):
            shown = shortened(str(list(texts)), 60)
            raise DataError(f"environment: the chat template shows {shown} otherwise than other answers")
        chat = self._chat([_TURN], texts)
        spells = any(map(self._added.search, texts))  # or it is much faster
        ids = np.array(self._apply(chat, tools=[], sanitize_control_tokens=spells)["input_ids"], np.int32)
        ends = np.flatnonzero(np.isin(ids, list(self._stops.values())))
        return ids[ends[len(self._stop.findall(head))] + 1 :]

    def written(self, call: Call) -> str:
        """Return the text of a turn in which the template shows a call, as a model would write it behind a prompt."""
        turn = {"role": "assistant", "content": "", "tool_calls": _in_messages([call])}
        _, _, text = self._render([_QUESTION, turn], add_generation_prompt=False).partition(_ASKED)
        begun = self.generation_prompt  # of its thinking, a turn that is over may show nothing
        bare, unbegun = (pattern.sub("", begun) for pattern in (_EMPTY_THINKING, _BEGUN_THINKING))
        for head, ended in ((begun, ""), (bare, ""), (unbegun, self._close)):
            if text.startswith(head):
                return ended + self._stop.split(text.removeprefix(head), maxsplit=1)[0]
        return text

    def _apply(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> Any:
        """Apply the template, with what begins the next turn. Raises DataError if that fails."""
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), **{"add_generation_prompt": True, **self._arguments, **arguments}
            )
        except Exception as error:  # noqa: BLE001 - the template is the user's own program
            raise DataError(f"environment.role={self.role}: the chat template fails: {first_line(error)}") from None

    def _render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        return str(self._apply(messages, tokenize=False, **arguments))

    def _chat(self, turns: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[Mapping[str, Any]]:
        """Return a question, and turns that are each answered with these texts."""
        messages: list[Mapping[str, Any]] = [_QUESTION]
        calls = _in_messages([Call(name=_TOOL)] * len(texts))
        for turn in turns:
            messages.append({**turn, "tool_calls": calls} if self._is_calling else turn)
            for call, text in zip(calls, texts, strict=True):
                of_call = {"name": _TOOL, "tool_call_id": call["id"]} if self.role == "tool" else {}
                messages.append({"role": self.role, "content": text, **of_call})
        return messages

    def _parts(self, texts: Sequence[str]) -> tuple[str, str]:
        """Return the text in front of a turn that is answered so, and that from its end token to the next turn.

        The text in front shows no tools. They are long, and this is done for every turn.
        """
        head, _, text = self._render(self._chat([_TURN], texts), tools=[]).partition(_SAID)
        end = self._stop.search(text)
        return head, "" if end is None else text[end.start() :]

    def _find(self) -> None:
        self._is_calling = False  # whether turns call tools, where a template answers nothing else
        if why := self._fault():
            self._is_calling = self.role == "tool"
            if not self._is_calling or self._fault():
                raise ConfigError(
                    f"environment.role={self.role}: the chat template writes no {self.role} message behind a turn, or "
                    f"none to go on from ({why}): set environment.role={self._other}, or give prompt.template a Jinja "
                    "file that does"
                )

    def _fault(self) -> str:
        """Take what stands around an answer. Return why there is no bridge; empty if there is one."""
        chat = self._chat([_TURN, _TURN], [_SEEN])
        if (fault := overdoes(self._tokenizer, self.template_text, self._arguments, chat)) is not None:
            raise DataError(f"environment: the chat template {fault} for two turns: correct it, or give another")
        try:
            text = self._render(self._chat([_TURN], [_SEEN]))
            unasked = self._render([_QUESTION], add_generation_prompt=False)
            _, behind = self._parts([_SEEN])
        except DataError as error:
            return str(error).partition(": ")[2]
        said, seen = text.split(_SAID), text.split(_SEEN)
        if len(said) != 2 or len(seen) != 2 or _SEEN in said[0]:
            return "it leaves one of them out, or repeats it"
        before, self._after = said[1].split(_SEEN)
        end = self._stop.search(before)
        if end is None:
            return "it ends the turn with no end token"
        self._written_call = before[: end.start()] if self._is_calling else ""
        self._before, self.turn_end = before[end.start() :], self._stops[end[0]]
        if _MARK in self._before + self._after:
            return "it writes the call's name or id into the answer"
        if behind != self._before + _SEEN + self._after:
            return "it writes tools there"
        begins = self.generation_prompt.removeprefix(unasked.rpartition(_ASKED)[2])
        if not self._after.endswith(begins) or self._after.endswith(tuple(self._stops)):
            return f"the next turn would begin behind {_quoted(self._after)}"
        return ""

    def _doubts(self, history: str) -> list[str]:
        """Compare two turns, as a model may write them, with what the template shows of them afterwards."""
        doubts = []
        for turn, content in self._turns():
            kept = self._prompt + 2 * (turn + self._written_call + self._before + _SEEN + self._after)
            forms = [{**_TURN, "content": content}]
            if _THOUGHT in turn:
                forms.append({**_TURN, "reasoning_content": _THOUGHT})
            shown = [self._render(self._chat([form, form], [_SEEN])) for form in forms]
            if _bare(kept) in map(_bare, shown):
                continue
            if _bare(_without_empty(kept)) in (_bare(_without_empty(each)) for each in shown):
                doubts = [EMPTY_BLOCKS]
            elif history == "exact":
                raise ConfigError(self._rewritten(kept, shown[0]))
        return doubts

    def _turns(self) -> Iterator[tuple[str, str]]:
        """Yield turns as a model may write them behind the prompt, each with its content as a message has it."""
        thought = f"{_THOUGHT}\n{self._close}\n\n{_SAID}"
        if self._begun:
            yield thought, self._begun[0] + thought
            return
        yield _SAID, _SAID
        yield f" {_SAID}\n", f" {_SAID}\n"
        if not _EMPTY_THINKING.search(self.generation_prompt):
            yield f"{self._open}\n{thought}", f"{self._open}\n{thought}"

    def _rewritten(self, kept: str, shown: str) -> str:
        """Return the line that refuses a template for what it shows of turns that are kept as they were."""
        start = next((at for at, (one, other) in enumerate(zip(kept, shown, strict=False)) if one != other), 0)
        was, is_now = (self._stop.split(each[start:])[0].replace(_MARK, "") for each in (kept, shown))
        does = "drops <think> of" if re.search(_CLOSE, was) and not re.search(_CLOSE, is_now) else "rewrites"
        return (
            f"environment.role={self.role}: the chat template {does} earlier turns when a {self.role} message follows "
            f"({_quoted(was)} was sampled, {_quoted(is_now)} is shown): use role={self._other}, a template or "
            "prompt.template_arguments that keep it, or environment.history=kept"
        )


def _in_messages(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return calls as messages have them. Their ids have nine letters and digits, which some templates ask for."""
    return [
        {"id": f"{_MARK}call{number:03}", "type": "function", "function": msgspec.to_builtins(call)}
        for number, call in enumerate(calls)
    ]


def _without_empty(text: str) -> str:
    return _EMPTY_THINKING.sub("", text)


def _bare(text: str) -> str:
    """Return a chat without the white space around what was thought and said."""
    return _SPACE_AROUND.sub(r"\1", text)


def _quoted(text: str) -> str:
    return shortened(repr(text), 60)
