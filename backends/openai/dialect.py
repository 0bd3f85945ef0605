"""The dialects of OpenAI's API: makes request bodies in an endpoint's dialect, and reads its refusals.

Pure. `openai_discovery.py` finds out which dialect an endpoint understands.

An endpoint that only chats renders messages with its own template. A rendered prompt is turned back into a message only
if our template makes exactly the same prompt from that, token by token, where a control token that the message spells
is that token. Nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from spot_async.base.text import counted
from spot_async.errors import (
    DeadlineExceededError,
    PermanentError,
    PoisonedReplyError,
    RequestError,
    TransientError,
)
from spot_async.spending.prices import Size
from spot_async.types import IntArray, LogprobTemperature, SamplingSettings

from ..shared.failures import Access, FailedReply, advice_on

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedTokenizerBase

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PLAIN_TEXT = "One half of 12 is 6, and 3 times 5 is 15. The sum of both numbers is"
# Fields that vLLM and SGLang add to the API. Others ignore or refuse them.
EXTENSIONS: Mapping[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True}
TEXT_EXTENSIONS: Mapping[str, Any] = {"add_special_tokens": False}
# What else bends a distribution, with the values that do not. A request that leaves one out gets the server's default:
# from generation_config.json (vLLM, SGLang), from its flags (llama.cpp), or built in (llama-cpp-python: top_k=40).
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "top_k": (-1, 0),  # SGLang refuses 0, llama-cpp-python anything below it
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "watermarking": (False,),  # vLLM
    "repeat_penalty": (1.0,),  # from here on llama.cpp and what is built on it
    "typical_p": (1.0,),
    "top_n_sigma": (-1.0,),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "dynatemp_range": (0.0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
}
LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
LOGPROB_KEYS = ("prompt_logprobs", "logprobs", "top_logprobs")
TEMPLATE_TOKENS = 256  # more than a chat template or a provider's own system message adds
MARK = "\N{OBJECT REPLACEMENT CHARACTER}message\N{OBJECT REPLACEMENT CHARACTER}"
TEMPLATE_ARGUMENTS: tuple[dict[str, bool], ...] = ({"enable_thinking": False}, {"enable_thinking": True}, {})
MAX_STOP_TEXTS = 4  # the limit of OpenAI's API
ANSWER_CHARACTERS = 160  # shown of each answer in a message with several answers

Scoring = Literal["prompt_logprobs", "echo", "echo_and_generate"]


class UnsupportedError(PermanentError):
    """The endpoint does not understand a request of this form."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How to talk to one endpoint."""

    model: str
    max_context_tokens: int | None = None  # as the endpoint states it
    lists_models: bool = True
    chat_length_key: str | None = None  # if the endpoint only chats, its name for max_tokens
    token_id_prompts: bool = False
    prepends_start: bool = False  # it puts its start token before a text
    extensions: bool = False  # it accepts `EXTENSIONS`
    neutral: Mapping[str, Any] = field(default_factory=dict)  # the fields of `NEUTRAL` that it accepts
    sampled_token_ids: bool = False
    generation_logprobs: bool = False
    scoring: Scoring | None = None  # None: it cannot score given tokens
    unscored: str = ""  # why it cannot: what it was asked, and what it answered
    keyed_by_text: bool = False  # top log-probabilities name tokens by text, not by id
    max_top_k: int = 0  # largest top-k of scores
    score_temperature: LogprobTemperature = "one"
    generation_temperature: LogprobTemperature = "one"

    @property
    def description(self) -> str:
        """The dialect in one line, for people."""
        if self.chat_length_key is not None:
            return "OpenAI-compatible: chat only"
        prompts = "token ids" if self.token_id_prompts else "text"
        scores = "no scores" if self.scoring is None else f"scores by {self.scoring.replace('_', ' ')}"
        keys = "" if self.scoring is None else f", tokens named by {'text' if self.keyed_by_text else 'id'}"
        return f"OpenAI-compatible: prompts as {prompts}, {scores}{keys}"

    @property
    def extra(self) -> dict[str, Any]:
        """The fields of every completions request."""
        return {**EXTENSIONS, **({} if self.token_id_prompts else TEXT_EXTENSIONS)} if self.extensions else {}

    def sampling_fields(self, sampling: SamplingSettings) -> dict[str, Any]:
        """Return the fields of every request that generates, completion or chat."""
        if unknown := next((name for name, _ in sampling.further if name not in self.neutral), None):
            raise PermanentError(f"this endpoint takes no {unknown}: leave it out, or evaluate with another backend")
        said = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed}
        return {**said, **self.neutral, **dict(sampling.further)}

    def generate_body(
        self,
        prompt: Sequence[int] | str,
        sampling: SamplingSettings,
        tokenizer: PreTrainedTokenizerBase,
        *,
        top_k: int = 0,
    ) -> dict[str, Any]:
        """Return the body of a completion request."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": sampling.max_tokens}
        body |= {**self.sampling_fields(sampling), **self.extra}
        if not self.sampled_token_ids:
            return {**body, "stop": _stop_texts(sampling, tokenizer)}
        # With ignore_eos SGLang ignores stop_token_ids. Without it a server's own end tokens also end a response.
        ends = {"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {"ignore_eos": True}
        return {**body, "logprobs": max(top_k, 1), **ends}

    def chat_body(self, message: str, sampling: SamplingSettings) -> dict[str, Any]:
        """Return the body of a chat request with one user message."""
        assert self.chat_length_key is not None
        messages = [{"role": "user", "content": message}]
        length = {self.chat_length_key: sampling.max_tokens}
        return {"model": self.model, "messages": messages, **length, **self.sampling_fields(sampling)}

    def score_body(self, prompt: Sequence[int] | str, k: int, *, temperature: float = 1.0) -> dict[str, Any]:
        """Return the body of a request for the log-probabilities of all of `prompt`'s tokens."""
        body = {"model": self.model, "prompt": prompt, "temperature": temperature, "max_tokens": 1, **self.extra}
        match self.scoring:
            case "prompt_logprobs":  # the reply need not repeat the ids
                return {**body, "prompt_logprobs": k, "return_token_ids": not self.token_id_prompts}
            case "echo":
                return {**body, "echo": True, "logprobs": k, "max_tokens": 0}
            case _:
                return {**body, "echo": True, "logprobs": k}


def read_error(role: str, status: int, body: bytes) -> RequestError | None:
    """Return a refusal in this API's terms; None where `shared/failures.py` says enough.

    What a caller does about the error stays the same.
    """
    reply = FailedReply(status, body)
    message = f"{role}: {reply.answer}"
    if advice_on(reply, Access(role, "http", ())):
        return None
    if status == 404 and "model" in reply.said.lower():
        return PermanentError(f"{message}; set {role}.backend.served_model to a model that it serves")
    return UnsupportedError(message) if status in (400, 404, 405, 422, 501) else None


def failed_at(error: RequestError) -> bool:
    """Return whether the endpoint failed over a request: a 5xx, or a reply that cannot be read.

    During discovery this may be the answer to the question, or a passing fault.
    """
    status = error.exchange.status if error.exchange is not None else None
    is_5xx = isinstance(error, TransientError) and status is not None and status >= 500
    return isinstance(error, PoisonedReplyError) or (is_5xx and not isinstance(error, DeadlineExceededError))


def question(path: str, body: Mapping[str, Any] | None = None) -> str:
    """Describe a request of discovery for people: its path, and the fields that decide whether it is understood."""
    said = {name: value for name, value in (body or {}).items() if name not in ("model", "messages")}
    if "prompt" in said:
        said["prompt"] = "text" if isinstance(said["prompt"], str) else "token ids"
    fields = ", ".join(
        f"{name}: {str(value).lower() if isinstance(value, bool) else value}" for name, value in said.items()
    )
    return f"{path} {{{fields}}}" if fields else path


def as_said(answers: Sequence[tuple[str, str]]) -> str:
    """Write answers in one line, each once and before the questions that it was given to."""
    asked: dict[str, list[str]] = {}
    for each, answer in answers:
        asked.setdefault(answer[:ANSWER_CHARACTERS], []).append(each)
    return "; ".join(f"{answer} (asked {_some(each)})" for answer, each in asked.items())


def _some(questions: Sequence[str]) -> str:
    """Return the first of several questions, of which the rest differ little, and how many more there were."""
    others = len(questions) - 1
    return questions[0] if not others else f"{questions[0]}, and {counted(others, 'other question')}"


def _stop_texts(sampling: SamplingSettings, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the end tokens as texts. Endpoints also end a response at their own end token."""
    texts = [tokenizer.decode([each], skip_special_tokens=False) for each in sampling.stop_token_ids]
    return [text for text in texts if text][:MAX_STOP_TEXTS]


def request_size(body: Mapping[str, Any], prompt_tokens: int) -> Size:
    """Return the size of a completion or chat request. `prompt_tokens` is counted by our own tokenizer.

    The endpoint tokenises a text itself. It cannot make more tokens than bytes, and adds a template and start tokens.
    """
    longest = max([body.get(key) or 0 for key in LENGTH_KEYS])
    prompt = body.get("prompt")
    if prompt is None:
        prompt = "".join(str(each.get("content", "")) for each in body["messages"])
    at_most = len(prompt.encode()) + TEMPLATE_TOKENS if isinstance(prompt, str) else None
    longest = max(1, longest)  # some endpoints generate a token even if none is asked for, and count it
    per_token = 1 + max([int(body.get(key) or 0) for key in LOGPROB_KEYS])  # the token's own comes along
    return Size(
        prompt_tokens=prompt_tokens,
        max_completion_tokens=longest,
        max_prompt_tokens=at_most,
        logprobs=per_token * (prompt_tokens + TEMPLATE_TOKENS + longest),
    )


def user_message(role: str, tokenizer: PreTrainedTokenizerBase, prompt_ids: IntArray) -> str:
    """Return the user message that is rendered as `prompt_ids` (P,). Raises PermanentError if there is none."""
    text: str = tokenizer.decode(prompt_ids.tolist(), skip_special_tokens=False)
    for arguments in TEMPLATE_ARGUMENTS if tokenizer.chat_template else ():
        before, mark, after = _rendered(tokenizer, MARK, arguments, tokenize=False).partition(MARK)
        message = text.removeprefix(before).removesuffix(after)
        if mark and message and np.array_equal(_rendered(tokenizer, message, arguments, tokenize=True), prompt_ids):
            return message
    raise PermanentError(
        f"{role}.backend only chats, and this prompt is no chat of one user message in {role}.model's template, or its "
        "text spells a control token, which the endpoint may take for one"
    )


def _rendered(tokenizer: PreTrainedTokenizerBase, message: str, arguments: dict[str, bool], *, tokenize: bool) -> Any:
    chat = [{"role": "user", "content": message}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=tokenize, **arguments)
    return rendered["input_ids"] if tokenize else rendered


async def largest_served(limit: int, refusal: Callable[[int], Awaitable[str | None]]) -> tuple[int, bool]:
    """Return the largest K up to `limit` that is not refused, and whether any was. K = 1 counts as served.

    `refusal` returns why a K is refused, or None. Its text often names the limit.
    """
    said = await refusal(limit)
    if said is None:
        return limit, False
    low, high = 1, limit  # served, refused
    for named in sorted({int(number) for number in re.findall(r"\d+", said)}, reverse=True):
        if low < named < high and await refusal(named) is None:
            if await refusal(named + 1) is not None:
                return named, True
            low = named + 1
            break
    while high - low > 1:
        middle = (low + high) // 2
        if await refusal(middle) is None:
            low = middle
        else:
            high = middle
    return low, True
