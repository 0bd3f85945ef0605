"""Reads calls of tools in a model's turn, by a response template as transformers has it.

A response template says in JSON where calls begin and end in a turn. Few tokenizers have one, so there are three here,
for calls as most chat templates write them. A reader of other calls than the model's would find none, and each turn
would pass for an answer. So at plan time the chat template writes a call of each tool, which must be read as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spot_async.base.files import decode_json, read_bounded, reading
from spot_async.base.text import first_line, shortened
from spot_async.errors import ConfigError
from spot_async.models.episodes import Call, Tools

if TYPE_CHECKING:
    from spot_async.models.bridges import Bridges
    from spot_async.models.vocabulary import Vocabulary

# By what a chat template with such calls spells, the first that fits: Qwen3.5's, Hermes', Llama's.
_CALLS: dict[str, dict[str, Any]] = {
    "<function=": {
        "open_pattern": r"<tool_call>\s*(?:<function=(?P<name>[^>\n]+)>)?",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    },
    "<tool_call>": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"function": "{content}"},
    },
    '"parameters": ': {
        # All that is said is the call.
        "open_pattern": r'(?:\A|(?<=</think>))\s*(?:<\|python_tag\|>)?\s*(?=\{[^{}]*"parameters")',
        "content": "json",
        "transform": {"function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
    },
}
_EXAMPLES = {"integer": 7, "number": 2.5, "boolean": True, "array": ["a"], "object": {"a": "b"}}


def read_calls(template: Mapping[str, Any], text: str, tools: Tools, prompt: str = "") -> tuple[Call, ...]:
    """Return the calls of a turn, in their order; none if it has none. Raises ValueError for one that cannot be read.

    `text` has special tokens, and not the turn's end. `tools` are JSON schemas, by which arguments get their types.
    `prompt` ends with what the chat template begins the turn with, since that may open a block of thinking.

    The template's patterns take as long as they like. So a model's text is read in a process that can be killed.
    """
    from transformers.utils.chat_parsing import parse_response  # slow to import

    try:
        found = parse_response(text, dict(template), prefix=prompt, tools=list(tools)).get("tool_calls") or []
        return tuple(map(_call, found if isinstance(found, list) else [found]))
    except Exception as error:  # noqa: BLE001 - a template is a program, and JSON may be too deep
        raise ValueError(first_line(error)) from None


def _call(found: Any) -> Call:
    call = dict(found["function"])
    arguments = call.get("arguments") or {}
    call["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return msgspec.convert(call, Call)


def response_template(vocabulary: Vocabulary, chat_template: str, path: Path | None = None) -> dict[str, Any]:
    """Return what reads a model's calls: the file that is given, the tokenizer's own, or one of those here.

    Raises ConfigError if there is none, and DataError for a file that cannot be read.
    """
    if path is not None:
        with reading(path):
            return decode_json(read_bounded(path), dict[str, Any], f"environment.calls={path}")
    own: dict[str, Any] | None = getattr(vocabulary.tokenizer, "response_template", None)
    if own:
        return own
    for spelt, calls in _CALLS.items():
        if spelt in chat_template:
            fields = {"thinking": {"open": "<think>", "close": "</think>"}, "tool_calls": calls, "content": {}}
            return {"start_anchor_pattern": r"assistant(?:<\|end_header_id\|>)?\s*", "fields": fields}
    raise ConfigError(
        "environment: nothing is known that reads this model's calls: give environment.calls, a response template of "
        "transformers in JSON, or take a student whose tokenizer has one"
    )


def check_calls(bridges: Bridges, template: Mapping[str, Any], tools: Tools, path: Path | None = None) -> None:
    """Raise ConfigError if a call that the chat template writes is not read as it was. `path` is the template's file.

    A chat template that writes no calls leaves them to the prompt's text. Then only a file says how to read them.
    """
    for tool in tools:
        function = tool.get("function", tool)
        properties = function.get("parameters", {}).get("properties", {})
        call = Call(name=function["name"], arguments={key: _example(each) for key, each in properties.items()})
        written = bridges.written(call)
        if call.name not in written:
            if path is not None:
                continue
            raise ConfigError(
                "environment: the chat template writes no calls: give environment.calls, which reads them"
            )
        try:
            found: object = read_calls(template, written, tools, bridges.generation_prompt)
        except ValueError as error:
            found = error
        if found == (call,):
            continue
        reader, what_to_do = (str(path), "correct") if path else ("its response template", "give")
        read = shortened(str(found), 80) if found else "nothing"
        raise ConfigError(
            f"environment: the chat template writes calls that {reader} does not read (wrote "
            f"{shortened(written, 80)!r}, read {read}): {what_to_do} environment.calls"
        )


def _example(schema: Mapping[str, Any]) -> Any:
    """Return a value of a parameter's type. One of several types is a text."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    return _EXAMPLES.get(kind, 'two "words"') if isinstance(kind, str) else 'two "words"'
