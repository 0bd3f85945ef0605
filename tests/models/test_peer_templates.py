"""What stands between turns by the chat templates that TRL ships, beside those templates' own renders and `renderers`.

`make test-peers` runs these and prints what each template came to. SPOT_PEERS_PYTHON is the interpreter of an
environment with trl and renderers.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import peer_bridges
import pytest
from tiny_tokenizers import of_bytes
from toy_worlds import add
from transformers.utils import get_json_schema

from spot_async.errors import ConfigError, DataError, SpotError
from spot_async.models.bridges import Bridges
from spot_async.models.calls import check_calls, response_template
from spot_async.models.episodes import Call
from spot_async.models.vocabulary import Vocabulary

PYTHON = os.environ.get("SPOT_PEERS_PYTHON", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="SPOT_PEERS_PYTHON names no interpreter with the peers"),
]
LOGGER = logging.getLogger(__name__)
QUESTION, ANSWER = {"role": "user", "content": "How much?"}, "3 <|im_end|>"
CALL, ADD = Call(name="add", arguments={"a": 2, "b": 3}), get_json_schema(add)
# Tokens that end a turn, by the models' configurations; where a template spells none of these, it ends none.
ENDS = {
    "glm4moe": ["<|observation|>", "<|user|>"],
    "": [
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|return|>", "<|call|>", "</s>"),
        *("<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
    ],
}
OTHERS = [  # control tokens that `renderers` looks up, though no template here spells them
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "[gMASK]", "<sop>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
CONTROL = re.compile(r"<\|[^<>|\s']+\|?>|<[^<>|\s']+\|>|<｜[^<>]+｜>|</?arg_(?:key|value)>")


class Trial:
    """A template with a tokenizer that has its control tokens, and little more than bytes."""

    def __init__(self, name: str, template: str, role: str, **arguments: Any) -> None:
        ends = [each for each in ENDS.get(name, ENDS[""]) if each in template] or ["<|im_end|>"]
        control = sorted({*CONTROL.findall(template), *OTHERS} - set(ends))
        self.tokenizer = of_bytes("", specials=(*ends, *control))
        self.tokenizer.bos_token = "<s>"
        self.vocabulary = Vocabulary(self.tokenizer, tuple(self.tokenizer.convert_tokens_to_ids(ends)))
        self.role, self.tools = role, [ADD] if role == "tool" else None
        self.template, self.arguments = template, {"chat_template": template, **arguments}
        self.prompt = self.render([QUESTION])

    def bridges(self, **choices: Any) -> Bridges:
        return Bridges(self.vocabulary, self.arguments, self.tools or (), role=self.role, **choices)

    def render(self, messages: list[Any], **choices: Any) -> Any:
        choices = {"tools": self.tools, "tokenize": False, "add_generation_prompt": True, **self.arguments, **choices}
        return self.tokenizer.apply_chat_template(messages, **choices)

    def answer(self) -> dict[str, str]:
        told = {"name": CALL.name, "tool_call_id": "call00001"} if self.role == "tool" else {}
        return {"role": self.role, "content": ANSWER, **told}

    def turns(self, bridges: Bridges) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yield what a model may write behind the prompt, each with the messages that may stand for it."""
        said: list[tuple[str, str, Any]] = [("So", "So", None), (" So\n", " So\n", None)]
        if self.role == "tool" and CALL.name in (written := bridges.written(CALL)):
            function = {"name": CALL.name, "arguments": CALL.arguments}
            calls = [{"id": "call00001", "type": "function", "function": function}]
            said.append((written.rpartition("</think>")[2].lstrip(), "", calls))
        is_gemma = "<|think|>" in self.prompt
        begins, ends = ("<|channel>thought\n", "\n<channel|>") if is_gemma else ("<think>\n", "\n</think>\n\n")
        begun = begins.strip() if self.prompt.rstrip().endswith(begins.strip()) else ""
        thinks = is_gemma or ("<think>" in self.template and not self.prompt.rstrip().endswith(ends.strip()))
        thoughts = ["", begins + "why" + ends] if thinks else [""]
        for thought in thoughts[bool(begun) :]:
            for text, content, calls in said:
                turn = {"role": "assistant", "tool_calls": calls} if calls else {"role": "assistant"}
                messages = [{**turn, "content": thought + content}]
                if thought:
                    messages.append({**turn, "content": content, "reasoning_content": "why"})
                yield thought.removeprefix(begun) + text, messages

    def outcome(self, bridges: Bridges) -> str:
        """Compare the text of two turns, whose ids spell it letter by letter, with what the template shows of them."""
        encode, worst = self.vocabulary.encode, 0
        bridge = [bridges.turn_end, *bridges.between([ANSWER]).tolist()]
        for turn, forms in self.turns(bridges):
            sampled = [each for letter in turn for each in encode(letter).tolist()]
            kept = self.tokenizer.decode([*encode(self.prompt).tolist(), *2 * [*sampled, *bridge]])
            shown = [self.render([QUESTION, form, self.answer(), form, self.answer()]) for form in forms]
            same = (level for level, seen in enumerate(SEEN) if seen(kept) in map(seen, shown))
            worst = max(worst, next(same, len(SEEN)))
        return OUTCOMES[worst]


def bare(text: str) -> str:
    return "".join(text.split())


SEEN = (str, bare, lambda text: bare(text).replace("<think></think>", ""))
OUTCOMES = EXACT, SPACE, EMPTY, REWRITES = ("exact", "white space", "empty thinking", "rewrites")
SURE = {  # for role tool and for user: with thinking as the template has it, off and on
    "qwen2_5": [EXACT] * 6,
    "qwen3": [EXACT, EMPTY, EXACT, REWRITES, EMPTY, REWRITES],
    "qwen3_6": [SPACE, SPACE, SPACE, REWRITES, EMPTY, REWRITES],
    "llama3_1": [SPACE] * 6,
    "nemotron_3_nano": [SPACE, SPACE, SPACE, REWRITES, SPACE, REWRITES],
    "gemma4": [*3 * ["no bridge"], SPACE, SPACE, REWRITES],
}


@cache
def templates() -> dict[str, str]:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    files = (Path(packages) / "trl" / "chat_templates").glob("*.jinja")
    return {file.stem: file.read_text() for file in sorted(files) if "training" not in file.stem}


@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize("role", ["tool", "user"])
def test_what_is_kept_of_turns_is_what_the_template_shows_or_it_is_refused(role: str, thinking: bool | None) -> None:
    arguments = {} if thinking is None else {"enable_thinking": thinking}
    found: dict[str, list[str]] = defaultdict(list)
    for name, template in templates().items():
        trial = Trial(name, template, role, **arguments)
        is_refused = False
        try:
            bridges = trial.bridges()
        except (ConfigError, DataError) as error:
            if not (is_refused := "earlier turns" in str(error)):
                found["no bridge"].append(name)
                continue
            bridges = trial.bridges(history="kept")
        outcome = trial.outcome(bridges)
        found[outcome].append(name)
        assert is_refused == (outcome == REWRITES), name
        assert is_refused or bool(bridges.doubts) == (outcome == EMPTY), name
        chat = [QUESTION, {"role": "assistant", "content": "So"}, trial.answer()]
        ids = trial.render(chat, tokenize=True, sanitize_control_tokens=True)["input_ids"]
        bridge = bridges.between([ANSWER]).tolist()
        assert ids[-len(bridge) - 1 :] == [bridges.turn_end, *bridge], name
        if role == "tool":
            try:
                check_calls(bridges, response_template(trial.vocabulary, template), [ADD])
            except SpotError:
                continue
            found["calls are read"].append(name)
    for outcome, names in found.items():
        LOGGER.info("%s, %s: %s: %d: %s", role, arguments, outcome, len(names), ", ".join(names))
    for name, outcomes in SURE.items():
        assert name in found[outcomes[3 * (role == "user") + (None, False, True).index(thinking)]]
        assert role == "user" or name in [*found["calls are read"], *found["no bridge"]]


def test_between_turns_stands_what_renderers_writes(tmp_path: Path) -> None:
    cases, ours = [], []
    for name, role, arguments in (
        (name, role, arguments)
        for name in peer_bridges.FAMILIES
        for role in ("tool", "user")
        for arguments in ({}, {"enable_thinking": False})
        if not arguments or "enable_thinking" in templates()[name]
    ):
        trial = Trial(name, templates()[name], role, **arguments)
        bridges = trial.bridges(history="kept")
        trial.tokenizer.save_pretrained(directory := tmp_path / str(len(cases)))
        answer = [{**trial.answer(), "content": "3"}]  # where it spells control tokens, `renderers` writes these
        told = {"name": name, "arguments": arguments, "messages": answer, "tools": trial.tools}
        turn = [*trial.vocabulary.encode("why</think>So").tolist(), bridges.turn_end]
        prompt = trial.vocabulary.encode(trial.prompt).tolist()
        cases.append({**told, "tokenizer": str(directory), "prompt": prompt, "turn": turn})
        ours.append(bridges.between(["3"]).tolist())
    given, found = tmp_path / "given.json", tmp_path / "found.json"
    given.write_text(json.dumps(cases))
    subprocess.run([PYTHON, peer_bridges.__file__, given, found], env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=True)
    for case, one, other in zip(cases, ours, json.loads(found.read_text()), strict=True):
        assert one == other, (case["name"], case["arguments"], case["messages"])
