"""The wire contract of `/v1`: what a teacher needs of OpenAI's API, as JSON. That is models, and whole completions.

A field that is not served is refused by name if it would change the result. Other unknown fields are ignored, as by
OpenAI's own clients and servers. `ignore_eos`, `add_special_tokens`, `stop_token_ids` and `return_*` are vLLM's
additions, with vLLM's meaning.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from spot_async.serving.http.bodies import UNREADABLE
from spot_async.types import FinishReason

COMPLETIONS = "/completions"
MODELS = "/models"
PREFIX = "/v1"

DEFAULT_MAX_TOKENS = 16  # OpenAI's
# JSON has no infinity. vLLM sends this for a token that the model rules out.
LOWEST_LOGPROB = -9999.0
MAX_STOP_TOKENS = 1024

# Fields that are not served, each with the values that would not change the result. None never would.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "stop": ([],),
    "n": (1,),
    "best_of": (1,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "allowed_token_ids": (),
    "logprob_token_ids": (),
    "bad_words": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
_INSTEAD = {
    "stream": "leave it out, and the whole reply comes at once",
    "stop": "give stop_token_ids, or cut the text yourself",
    "n": "repeat the prompt in a list of prompts",
    "prompt_logprobs": "ask for echo with logprobs",
}

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]

# Decodes only the fields above from a request.
_Unserved = msgspec.defstruct("_Unserved", [(name, Any, None) for name in _NEUTRAL])


class ApiError(Exception):
    """An error in OpenAI's shape, with its HTTP status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> bytes:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a completion request. A field that is None counts as not given."""

    prompt: str | list[str | TokenId | list[TokenId]]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def token_budget(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Columns over tokens. The numbers of a text's first token are None, because nothing comes before it."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "spot-async"
    root: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


def read_completion_request(body: bytes | memoryview) -> CompletionRequest:
    """Decode a request. Raises `ApiError` if it is malformed, or asks for something that is not served."""
    try:
        _refuse_unserved(msgspec.json.decode(body, type=_Unserved))
        asked = msgspec.json.decode(body, type=CompletionRequest)
    except UNREADABLE as error:
        raise _malformed(error) from None
    if not asked.token_budget and not asked.echo:
        raise ApiError(400, "max_tokens=0: scores a prompt, so it needs echo to be true", param="max_tokens")
    return asked


def _refuse_unserved(fields: msgspec.Struct) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}: is not served here; {_INSTEAD.get(name, 'leave it out')}", param=name)


def _malformed(error: Exception) -> ApiError:
    """Make one line of msgspec's message, which ends with the place of the error: "... - at `$.name[0]`"."""
    if isinstance(error, RecursionError):
        return ApiError(400, "cannot read the request: it is nested too deep")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"cannot read the request: not valid JSON: {error}")
    what, _, place = str(error).partition(" - at ")
    name = re.match(r"`\$\.(\w+)", place)
    if name is None:
        return ApiError(400, f"cannot read the request: {what[:1].lower()}{what[1:]}")
    return ApiError(400, f"{name[1]}: {what[:1].lower()}{what[1:]}", param=name[1])
