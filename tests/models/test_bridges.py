"""Bridges between turns: the template's ids and no others, whatever is answered; templates that cannot be kept to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spot_async.errors import ConfigError, DataError
from spot_async.models.bridges import EMPTY_BLOCKS, Bridges
from spot_async.models.vocabulary import Vocabulary

TOKENIZER = Path(__file__).parents[1] / "recorded" / "openai" / "tokenizer.json"
LLAMAS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
PRICE = {"type": "function", "function": {"name": "price", "parameters": {"properties": {"item": {"type": "string"}}}}}

SYSTEM = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
ASKED = "<|im_start|>user\n{{ m.content }}<|im_end|>\n"
CALL = "{% for each in m.tool_calls or [] %}<tool_call>{{ each.function | tojson }}</tool_call>{% endfor %}"
RESPONSES = (  # of several messages in a row, as Qwen has them
    "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
)
LATER_THOUGHT = (  # what was thought behind the user's last message, as Qwen3 shows it
    "{% set last = messages | map(attribute='role') | list %}"
    "{{ m.content.split('</think>')[-1].strip('\n') if 'user' in last[loop.index0:] else m.content }}"
)
EMPTY = "<think>\n\n</think>\n\n"
PARTED = (  # what was thought stands in a part of its own
    "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '' }}"
    "{{ m.content.split('</think>')[-1] }}"
)


def chatml(said: str = "{{ m.content }}", tool: str = RESPONSES, begun: str = "") -> str:
    """A template of Qwen's shape, by what it writes of a turn, of a tool's message, and in front of the next turn."""
    turn = f"<|im_start|>assistant\n{said}{CALL}<|im_end|>{{{{ '\n' }}}}"
    by_role = f"{{% if m.role == 'user' %}}{ASKED}{{% elif m.role == 'tool' %}}{tool}{{% else %}}{turn}{{% endif %}}"
    begins = f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{begun}{{% endif %}}"
    return f"{SYSTEM}{{% for m in messages %}}{by_role}{{% endfor %}}{begins}"


QWEN = chatml()
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)
NO_TOOLS = chatml(tool="")
ALTERNATING = chatml(tool="{{ raise_exception('Roles must alternate') }}")
"""One that shows the answers to calls and no others."""
AFTER_CALLS = chatml(
    tool="{% if loop.previtem.tool_calls or loop.previtem.role == 'tool' %}" + RESPONSES + "{% endif %}"
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), eos_token="<|im_end|>", bos_token=LLAMAS[0])
    tokenizer.add_tokens(LLAMAS, special_tokens=True)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return Vocabulary(tokenizer, tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>", "<|eot_id|>"])))


def bridges(vocabulary: Vocabulary, template: str, **choices) -> Bridges:
    return Bridges(vocabulary, {"chat_template": template}, choices.pop("tools", [PRICE]), **choices)


def rendered(vocabulary: Vocabulary, template: str, messages: list[dict[str, object]]) -> list[int]:
    """Return the ids of a whole chat as transformers makes them, with what texts spell as letters."""
    apply = vocabulary.tokenizer.apply_chat_template
    kept = {"add_generation_prompt": True, "sanitize_control_tokens": True}
    return apply(messages, chat_template=template, tools=[PRICE], **kept)["input_ids"]


QUESTION = {"role": "user", "content": "How much?"}
SPELT = st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<think>", "</tool_response>", "<|im_", " "]
)
ANSWERS = st.lists(st.text(max_size=12) | SPELT, max_size=6).map("".join)


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(ANSWERS, min_size=1, max_size=3), template=st.sampled_from([QWEN, LLAMA, AFTER_CALLS]))
def test_a_bridge_is_what_the_template_writes_whatever_is_answered(vocabulary, texts, template):
    """Its ids are those at the end of the whole chat, and its control tokens those of any other answers."""
    found = bridges(vocabulary, template)
    ids = found.between(texts).tolist()
    answers = [{"role": "tool", "content": text, "tool_call_id": "1", "name": "price"} for text in texts]
    call = {"id": "1", "type": "function", "function": {"name": "price", "arguments": {}}}
    turn = {"role": "assistant", "content": "So", "tool_calls": [call] * len(texts)}
    whole = rendered(vocabulary, template, [QUESTION, turn, *answers])
    assert whole[-len(ids) - 1 :] == [found.turn_end, *ids]
    control = vocabulary.tokenizer.all_special_ids
    plain = found.between(["x"] * len(texts))
    assert [each for each in ids if each in control] == [each for each in plain if each in control]
    assert ids[-1] not in vocabulary.end_token_ids


@settings(deadline=None, max_examples=30)
@given(sampled=st.lists(st.integers(3, 250), max_size=8), text=ANSWERS)
def test_an_episode_holds_the_ids_that_were_sampled_and_reads_as_the_chat_does(vocabulary, sampled, text):
    """However a turn's ids spell its text: they are kept, and what follows them is the template's."""
    found = bridges(vocabulary, QWEN)
    prompt = rendered(vocabulary, QWEN, [QUESTION])
    bridge = found.between([text]).tolist()
    kept = [*prompt, *sampled, found.turn_end, *bridge, *sampled, found.turn_end, *bridge]
    turns = [
        {"role": "assistant", "content": vocabulary.tokenizer.decode(sampled)},
        {"role": "tool", "content": text},
    ] * 2
    decode = vocabulary.tokenizer.decode
    whole = rendered(vocabulary, QWEN, [QUESTION, *turns])
    if "\ufffd" not in turns[0]["content"]:
        assert decode(kept) == decode(whole)
    assert kept.count(found.turn_end) == whole.count(found.turn_end)


def test_a_user_answers_with_one_message(vocabulary):
    found = bridges(vocabulary, QWEN, tools=[])
    assert (found.role, bridges(vocabulary, QWEN).role) == ("user", "tool")
    text = vocabulary.tokenizer.decode(found.between(["Wrong."]))
    assert text == "\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "role", "doubts"),
    [
        (QWEN, "tool", []),
        (QWEN, "user", []),
        (LLAMA, "tool", []),  # it strips turns
        (AFTER_CALLS, "tool", []),
        (chatml(LATER_THOUGHT), "tool", []),
        (chatml(PARTED), "tool", []),
        (chatml(LATER_THOUGHT, begun="<think>{{ '\n' }}"), "tool", []),
        (chatml(begun=EMPTY), "tool", [EMPTY_BLOCKS]),
        (chatml(LATER_THOUGHT, begun=EMPTY), "user", [EMPTY_BLOCKS]),
        (chatml("{{ '' if '<think>' in m.content else '<think></think>' }}{{ m.content }}"), "tool", [EMPTY_BLOCKS]),
    ],
)
def test_turns_that_a_template_shows_as_they_were_are_silent_and_empty_thinking_is_a_doubt(
    vocabulary, template, role, doubts
):
    assert bridges(vocabulary, template, role=role).doubts == doubts


@pytest.mark.parametrize(
    ("template", "role", "complaint"),
    [
        (
            chatml(LATER_THOUGHT),
            "user",
            r"environment\.role=user: the chat template drops <think> of earlier turns when a user message follows "
            r"\('<think>\\nthought\\n</think>\\n\\nsaid' was sampled, 'said' is shown\): use role=tool, .*history=kept",
        ),
        (chatml(LATER_THOUGHT, begun="<think>{{ '\n' }}"), "user", "drops <think> of earlier turns"),
        (chatml("{{ m.content.split('[/THINK]')[-1] }}", begun="[THINK]"), "tool", r"\('\[THINK\]thought\\n\[/THINK\]"),
        (
            "<|think|>" + chatml("{{ m.content.split('<channel|>')[-1] }}"),  # as Gemma 4 is told to think
            "tool",
            r"\('<\|channel>thought\\nthought\\n<channel\|>",
        ),
        (chatml("final:{{ m.content }}"), "tool", r"rewrites earlier turns .*'final:said' is shown"),
    ],
)
def test_a_template_that_rewrites_turns_is_refused_unless_they_are_kept(vocabulary, template, role, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        bridges(vocabulary, template, role=role)
    assert "\n" not in str(caught.value)
    kept = bridges(vocabulary, template, role=role, history="kept")
    assert kept.turn_end == vocabulary.tokenizer.eos_token_id


@pytest.mark.parametrize("history", ["exact", "kept"])
@pytest.mark.parametrize(
    ("template", "role", "why"),
    [
        (NO_TOOLS, "tool", "writes no tool message .*: set environment.role=user, or give prompt.template"),
        (ALTERNATING, "tool", r"\(the chat template fails: Roles must alternate\): set environment.role=user"),
        (chatml(tool="{{ m.name }}: {{ m.content }}"), "tool", "the call's name or id"),
        (chatml(tool="{{ m.content }} {{ m.tool_call_id }}"), "tool", "the call's name or id"),
        (chatml(tool="{{ tools | tojson }}" + RESPONSES), "tool", "it writes tools there"),
        (chatml().replace("<|im_end|>", "<|fin|>"), "tool", "no end token"),
        (chatml().replace("_prompt", "_prompt and messages[-1].role == 'user'"), "tool", "begin behind '.n</tool_"),
        (chatml().replace("{% if add_gen", "<|endoftext|>{% if not add_gen"), "tool", "begin behind"),
        (
            QWEN.replace("{{ m.content }}<|im_end|>\n", "{{ '' }}<|im_end|>"),
            "user",
            "no user .*: set environment.role=tool",
        ),
    ],
)
def test_a_template_without_a_bridge_is_always_refused(vocabulary, template, role, why, history):
    with pytest.raises(ConfigError, match=why) as caught:
        bridges(vocabulary, template, role=role, history=history)
    assert "\n" not in str(caught.value)


def test_an_answer_that_cannot_be_bridged_is_refused_in_one_line(vocabulary):
    found = bridges(
        vocabulary, chatml(tool=RESPONSES.replace("{{ m.content }}", "{{ m.content or raise_exception('No') }}"))
    )
    with pytest.raises(DataError, match=r"the chat template fails: No$"):
        found.between([""])
    found = bridges(vocabulary, chatml(tool="{% if m.content %}" + RESPONSES + "{% endif %}"))
    with pytest.raises(DataError, match=r"^environment: the chat template shows \[''\] otherwise than other answers$"):
        found.between([""])


def test_a_control_token_that_has_no_letters_is_refused_by_its_name():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<|im_end|>": 1, "one": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", unk_token="<unk>")
    found = bridges(Vocabulary(tokenizer, (1,)), QWEN)
    with pytest.raises(DataError, match=r"'<\|im_end\|>': the tokenizer produces it from plain text"):
        found.between(["one <|im_end|> one"])
