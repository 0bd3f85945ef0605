"""Calls in turns, as Hermes, Qwen3.5 and Llama write them; what reads no calls of a model is refused at the start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from spot_async.errors import ConfigError, DataError
from spot_async.models import calls_worker
from spot_async.models.bridges import Bridges
from spot_async.models.calls import check_calls, read_calls, response_template
from spot_async.models.episodes import Call
from spot_async.models.vocabulary import Vocabulary

TOKENIZER = Path(__file__).parents[1] / "recorded" / "openai" / "tokenizer.json"
TYPES = {
    "item": "string",
    "count": "integer",
    "least": "number",
    "is_new": "boolean",
    "tags": "array",
    "more": "object",
}
PROPERTIES = {
    **{name: {"type": kind} for name, kind in TYPES.items()},
    "size": {"type": ["integer", "string"]},
    "colour": {"type": "string", "enum": ["red", "blue"]},
}
PRICE = {"type": "function", "function": {"name": "price", "parameters": {"properties": PROPERTIES}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [PRICE, LOOK]

HERMES = """<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>"""
XML = """<tool_call>
<function={{ call.name }}>
{% for key, value in call.arguments.items() %}
<parameter={{ key }}>
{{ value if value is string else value | tojson if value is mapping or value is sequence else value | string }}
</parameter>
{% endfor %}
</function>
</tool_call>"""
LLAMA = """{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}"""


def chat(call: str, begun: str = "") -> str:
    """A template by how it writes a call, and what it begins the next turn with."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content }}"
        f"{{% for each in m.tool_calls or [] %}}{{% set call = each.function %}}{call}{{% endfor %}}<|im_end|>"
        f"{{{{ '\n' }}}}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{begun}{{% endif %}}"
    )


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), eos_token="<|im_end|>")
    return Vocabulary(tokenizer, (tokenizer.eos_token_id,))


def bridges(vocabulary: Vocabulary, template: str) -> Bridges:
    return Bridges(vocabulary, {"chat_template": template}, TOOLS)


def price(**arguments: object) -> Call:
    return Call(name="price", arguments=arguments)


@pytest.mark.parametrize(
    ("call", "text", "found"),
    [
        (HERMES, "It is 3.", ()),
        (HERMES, 'So\n<tool_call>\n{"name": "price", "arguments": {"count": 2}}\n</tool_call>', (price(count=2),)),
        (
            HERMES,
            '<tool_call>{"name": "look"}</tool_call>\n<tool_call>{"name": "price", "arguments": "{}"}</tool_call>',
            (Call(name="look"), price()),
        ),
        (HERMES, "<think>I may <tool_call> later</think>It is 3.", ()),
        (
            XML,
            "<tool_call>\n<function=price>\n<parameter=item>\n 7 \n</parameter>\n<parameter=count>\n7\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=look>\n</function>\n</tool_call>",
            (price(item=" 7 ", count=7), Call(name="look")),
        ),
        (LLAMA, '{"name": "price", "parameters": {"more": {"a": "}"}}}', (price(more={"a": "}"}),)),
        (LLAMA, '<|python_tag|>{"type": "function", "name": "look", "parameters": {}}', (Call(name="look"),)),
        (LLAMA, '{"price": 3}', ()),
    ],
)
def test_calls_are_read_in_their_order_and_arguments_have_their_types(vocabulary, call, text, found):
    assert read_calls(response_template(vocabulary, chat(call)), text, TOOLS, "<|im_start|>assistant\n") == found


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "price", "argum'),
        (HERMES, "<tool_call>price(3)</tool_call>"),
        (HERMES, '<tool_call>["price"]</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "price", "arguments": [3]}</tool_call>'),
        (HERMES, f"<tool_call>{'[' * 100_000}</tool_call>"),
        (XML, '<tool_call>\n{"name": "price"}\n</tool_call>'),
        (LLAMA, '{"name": "price", "parameters": {}}; {"name": "price", "parameters": {}}'),
        (LLAMA, '{"parameters": {}}'),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_of_one_line(vocabulary, call, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - of any text
        read_calls(response_template(vocabulary, chat(call)), text, TOOLS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("begun", ["", "<think>\n", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("call", [HERMES, XML, LLAMA])
def test_what_a_chat_template_writes_is_read_as_it_was(vocabulary, call, begun):
    found = bridges(vocabulary, chat(call, begun))
    template = response_template(vocabulary, found.template_text)
    check_calls(found, template, TOOLS)
    written = found.written(price(item='two "words"', count=7))
    assert "im_start" not in written
    assert read_calls(template, written, TOOLS, found.generation_prompt) == (price(item='two "words"', count=7),)


def test_a_reader_of_other_calls_than_the_models_is_refused(vocabulary):
    found = bridges(vocabulary, chat(XML))
    others = response_template(vocabulary, chat(LLAMA))
    with pytest.raises(
        ConfigError,
        match=r"^environment: the chat template writes calls that its response template does not read \(wrote "
        r"'<tool_call>\\n<function=price>.*…', read nothing\): give environment\.calls$",
    ):
        check_calls(found, others, TOOLS)
    with pytest.raises(
        ConfigError, match=r"that mine\.json does not read .* read .*JSON.*: correct environment\.calls$"
    ):
        check_calls(found, response_template(vocabulary, chat(HERMES)), TOOLS, Path("mine.json"))
    untyped = response_template(vocabulary, chat(XML))
    with pytest.raises(ConfigError, match=r"read \(Call\(name='price', arguments=\{'item'"):
        check_calls(found, {**untyped, "fields": {**untyped["fields"], "tool_calls": XML_OF_TEXTS}}, TOOLS)


XML_OF_TEXTS = {
    "open_pattern": "<function=(?P<name>[^>]+)>",
    "close": "</function>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": "<parameter=(?P<key>[^>]+)>(?P<value>.*?)</parameter>"},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}


def test_a_file_reads_calls_rather_than_the_tokenizers_template_and_that_rather_than_ours(vocabulary, tmp_path):
    path = tmp_path / "calls.json"
    path.write_text('{"start_anchor": "a"}')
    ours = response_template(vocabulary, chat(HERMES))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), eos_token="<|im_end|>", response_template={"start_anchor": "b"}
    )
    own = Vocabulary(tokenizer, (tokenizer.eos_token_id,))
    assert response_template(own, chat(HERMES)) == {"start_anchor": "b"} != ours
    assert response_template(own, chat(HERMES), path) == {"start_anchor": "a"}
    for text, complaint in (("[]", "Expected `object`"), ("{", "truncated")):
        path.write_text(text)
        with pytest.raises(DataError, match=rf"^environment\.calls=.*calls\.json: .*{complaint}"):
            response_template(own, chat(HERMES), path)
    with pytest.raises(DataError, match=r"none\.json: cannot be read"):
        response_template(own, chat(HERMES), tmp_path / "none.json")


def test_calls_that_no_template_writes_need_a_file(vocabulary):
    found = bridges(vocabulary, silent := chat(""))
    with pytest.raises(ConfigError, match=r"nothing is known that reads .*: give environment\.calls"):
        response_template(vocabulary, silent)
    template = response_template(vocabulary, chat(HERMES))
    with pytest.raises(ConfigError, match=r"the chat template writes no calls: give environment\.calls"):
        check_calls(found, template, TOOLS)
    check_calls(found, template, TOOLS, Path("mine.json"))  # a prompt may say how to call


def test_turns_are_read_in_a_process_of_its_own(vocabulary):
    template = response_template(vocabulary, chat(HERMES))
    texts = ['<tool_call>{"name": "price", "arguments": {"count": "2"}}</tool_call>', "<tool_call>no", "3"]
    lines = [json.dumps({"template": template, "text": text, "tools": TOOLS}) for text in texts]
    command = (sys.executable, "-P", calls_worker.__file__, str(2 << 30))
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    ready, called, unreadable, answer = map(json.loads, done.stdout.splitlines())
    assert (ready, called) == ({"ready": True}, {"calls": [{"name": "price", "arguments": {"count": 2}}]})
    assert list(unreadable) == ["unreadable"]
    assert answer == {"calls": []}
