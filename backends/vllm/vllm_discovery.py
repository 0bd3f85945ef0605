"""Finds out what a vLLM server offers, by asking it once at start-up. Versions and flags change what it can do.

Nothing here can harm a server: any version answers each of these requests with a reply or a 400.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog

from spot_async.base.tasks import gather
from spot_async.errors import ConfigError, DataError, PermanentError, PoisonedReplyError, RequestError
from spot_async.models.alignment import decision_row
from spot_async.models.precision import precision
from spot_async.types import Capabilities

from ..shared.discovery import (
    PROCESS,
    ListedModel,
    ModelList,
    Saying,
    asked_as,
    compare_tokenizers,
    may_be_other,
    noise_nats,
)
from ..shared.snapshots import ties_embeddings
from .client import NoSuchRouteError, Sampled, VllmClient
from .process import is_paused
from .replies import CompletionsRoute
from .weights import DEVELOPER_MODE

TEXTS = ("The answer is \\boxed{42}.", "x² + y² ≤ r²\n\n\t∴ 3/4", "one  two   three 1234567890", " naïve 数学 🙂")
PROMPT_TOKENS = 16
RESPONSE_TOKENS = 32
COMPARED_TOP_K = 8
SURE = -1e-4
ON_A_CPU = "device_config=cpu"
DTYPE = re.compile(r"\bdtype=torch\.(\w+)")
# What only one server says. A vLLM of several API servers leaves its start out.
SAYINGS = {
    PROCESS: Saying("/metrics", re.compile(rb"^process_start_time_seconds (\S+)", re.MULTILINE)),
    "version": Saying("/version", re.compile(rb'"version":\s*"([^"]*)"')),
    "weights": Saying("/weight_info", re.compile(rb'"weight_version":\s*"([^"]*)"')),
}
MAX_ALLOWED = re.compile(r"max allowed: (\d+)")


class Found(NamedTuple):
    """What discovery found about a server."""

    offers: Capabilities  # `weight_update` whatever its role; the context is of prompt and response together
    weights: str | None  # the server's name for its weights; None if it does not say


async def discover(client: VllmClient, *, deadline: float) -> Found:
    """Ask the server everything. Raises `ConfigError`, with what to change, if it cannot serve the role's model."""
    version, max_model_len, weights = await _first_answers(client, deadline)
    await _compare_vocabulary_sizes(client, deadline)
    top_k = await _max_logprobs(client, deadline)
    files, stated = client.server.files, client.server.settings.logprob_noise_nats
    config = await _config(client, deadline)
    keeps_output_head = weights is not None and ON_A_CPU in config and await _ties_embeddings(client)
    named = weights is not None and await _has_route(client, "/weight_info", deadline)
    dtype = named_type[1] if (named_type := DTYPE.search(config)) else None
    spoken = await _responses(client, top_k, deadline)
    processed = await _is_processed(client, deadline)
    chosen_tokens = await _has_chosen_tokens(client, spoken[0], dtype, deadline)
    offers = Capabilities(
        model=client.model,
        vocab_size=files.vocab_size,
        vocab_fingerprint=files.vocabulary.fingerprint,
        max_context_tokens=max_model_len,
        max_top_k=top_k,
        # The sampled token may take one of a position's places.
        max_generation_top_k=top_k if top_k == files.vocab_size else max(0, top_k - 1),
        max_position_top_k=0 if processed else top_k,
        exact_entropy=False,
        candidate_logprobs="batched" if chosen_tokens else "none" if processed else "single",
        weight_update=named and not keeps_output_head,
        weights_need=_weights_need(version, names_weights=weights is not None, keeps_output_head=keeps_output_head),
        dtype=dtype,
        logprob_noise_nats=await _noise(client, spoken, dtype, deadline) if stated is None else stated,
        logprob_convention="truncated" if processed else "untruncated",
        score_temperature="one",
        generation_temperature="request" if processed else "one",
        server=f"vllm {version}",
    )
    return Found(offers, weights)


async def _first_answers(client: VllmClient, deadline: float) -> tuple[str, int, str | None]:
    """Find out that it is vLLM, with the role's tokenizer; return its version, context, and name for its weights."""
    async with asked_as(client.server, "vLLM", may_be_other, deadline=deadline):
        version = (await client.server.get("/version", _Software, deadline=deadline)).version
    if await is_paused(client.server, deadline=deadline):  # it would not answer, and may have lost its weights
        raise ConfigError(
            f"{client.server.section}: the server is paused, perhaps by an update that failed: restart it"
        )
    model = await _served_model(client, deadline)
    client.model = model.id
    await compare_tokenizers(client.server, TEXTS, deadline=deadline, model=client.model)
    try:
        weights = await _first_answer(client, deadline)
    except NoSuchRouteError:
        client.route = CompletionsRoute()  # OpenAI's, of servers without the one for token ids only
        async with asked_as(
            client.server, "vLLM", lambda error: isinstance(error, NoSuchRouteError), deadline=deadline
        ):
            weights = await _first_answer(client, deadline)
    return version, model.max_model_len or client.server.files.max_context_tokens, weights


def _weights_need(version: str, *, names_weights: bool, keeps_output_head: bool) -> str:
    """Return what the server lacks to accept weights, for people."""
    if not names_weights:
        return f"vLLM 0.27 or later, whose replies name the weights that they come from, and is {version}"
    if keeps_output_head:
        return (
            "a GPU, because on a CPU vLLM goes on with the old output layer where the model ties it to its "
            "embeddings (tie_word_embeddings)"
        )
    return f"{DEVELOPER_MODE} in its environment"


class _Software(msgspec.Struct):
    version: str


async def _served_model(client: VllmClient, deadline: float) -> ListedModel:
    models = (await client.server.get("/v1/models", ModelList, deadline=deadline)).data
    wanted = client.server.settings.served_model
    for model in models:
        if wanted in (None, model.id):
            return model
    raise ConfigError(
        f"{client.server.role}.backend.served_model={wanted}: the server has {[model.id for model in models]}"
    )


async def _first_answer(client: VllmClient, deadline: float) -> str | None:
    """Ask for one token; return the server's name for its weights."""
    answer = await client.sample(_prompt(client, 0), _sampling(1, 0), top_k=0, logprobs=0, deadline=deadline)
    return answer.spans[0].version if answer.spans else None


async def _compare_vocabulary_sizes(client: VllmClient, deadline: float) -> None:
    """Raise `ConfigError` unless the server accepts the vocabulary's last id and refuses the next."""
    size = client.server.files.vocab_size
    if await _accepts(client, size - 1, deadline) and not await _accepts(client, size, deadline):
        return
    raise ConfigError(
        f"{client.server.name}: the served model {client.model} has another vocabulary than the {size} tokens of "
        f"{client.server.files.directory}/config.json"
    )


async def _accepts(client: VllmClient, token_id: int, deadline: float) -> bool:
    try:
        await client.sample([token_id], _sampling(1, 0), top_k=0, logprobs=0, deadline=deadline)
    except PermanentError:
        return False
    return True


async def _max_logprobs(client: VllmClient, deadline: float) -> int:
    """Return the largest top-k. The server names it when it refuses one as large as the vocabulary."""
    size = client.server.files.vocab_size
    try:
        await client.score(_prompt(client, 0)[:1], [], top_k=size, deadline=deadline)
    except PermanentError as refusal:
        named = MAX_ALLOWED.search(str(refusal))
        if named is None:
            raise
        return int(named[1])
    return size


async def _is_processed(client: VllmClient, deadline: float) -> bool:
    """Return whether log-probabilities are processed.

    If so, a token is sure once all others are masked. No model would find each token sure by itself.
    """
    prompt = np.array(_prompt(client, 0))
    asked = [client.next_token(prompt, token_id, deadline=deadline) for token_id in _prompt(client, 1)[:4]]
    return all(float(answer.logprobs[0]) > SURE for answer in await gather(asked))


async def _has_chosen_tokens(client: VllmClient, spoken: _Spoken, dtype: str | None, deadline: float) -> bool:
    """Return whether the server gives log-probabilities of tokens by id, and those are of the rows that it scores."""
    prompt, response = spoken.prompt, spoken.answer.token_ids.tolist()
    start = decision_row(len(prompt), 0)
    try:
        chosen = await client.chosen([*prompt, *response], [[v] for v in response], start=start, deadline=deadline)
    except (PermanentError, PoisonedReplyError):  # refused, or ignored, so that the reply lacks it
        return False
    scored = await client.score(prompt, response, top_k=0, deadline=deadline)
    fault = precision(dtype).fault(scored.logprobs, chosen[:, 0])
    if fault is not None:
        structlog.get_logger().warning(
            "prompt_logprob_token_ids not used", role=client.server.role, reason=f"differs from scores {fault}"
        )
    return fault is None


async def _has_route(client: VllmClient, path: str, deadline: float) -> bool:
    try:
        await client.server.get(path, dict[str, Any], deadline=deadline)
    except NoSuchRouteError:
        return False
    return True


async def _config(client: VllmClient, deadline: float) -> str:
    """Return how the server is configured, in its own words; empty if it does not tell (without developer mode)."""
    try:
        return str((await client.server.get("/server_info", dict[str, Any], deadline=deadline)).get("vllm_config"))
    except RequestError:
        return ""


async def _ties_embeddings(client: VllmClient) -> bool:
    """Return whether the server's model is a student with tied embeddings.

    On a CPU vLLM 0.32 packs the output layer once, and packs it again only if the weights name that layer, which those
    of such a model do not. A server that does not tell where it runs is taken to be on a GPU.
    """
    try:
        return client.server.settings.takes_weights(client.server.role) and await ties_embeddings(
            client.server.files.directory
        )
    except DataError:  # the first update names files that cannot be read
        return False


@dataclass(frozen=True)
class _Spoken:
    """A prompt, and the response that the server sampled to it: such tokens are what training scores."""

    prompt: list[int]
    answer: Sampled
    top_k: int


async def _responses(client: VllmClient, max_logprobs: int, deadline: float) -> list[_Spoken]:
    top_k = max(0, min(COMPARED_TOP_K, max_logprobs - 1))
    encode = client.server.files.vocabulary.tokenizer.encode
    prompts = [encode(text, add_special_tokens=False)[:PROMPT_TOKENS] for text in TEXTS]
    answers = await gather(
        client.sample(
            prompt, _sampling(RESPONSE_TOKENS, seed), top_k=top_k, logprobs=top_k and top_k + 1, deadline=deadline
        )
        for seed, prompt in enumerate(prompts)
    )
    return [_Spoken(prompt, answer, top_k) for prompt, answer in zip(prompts, answers, strict=True)]


async def _noise(client: VllmClient, spoken: list[_Spoken], dtype: str | None, deadline: float) -> float:
    """Measure the noise, in nats, between tokens' log-probabilities as sampled and as scored later.

    Raises `ConfigError` if it is no noise: then the numbers are log-probabilities of different things.
    """
    scored = await gather(
        client.score(each.prompt, each.answer.token_ids.tolist(), top_k=each.top_k, deadline=deadline)
        for each in spoken
    )
    differences, served = [], precision(dtype)
    for name in ("logprobs", "topk_logprobs"):
        one, other = (
            np.concatenate([getattr(each, name).ravel() for each in side])
            for side in ([each.answer for each in spoken], scored)
        )
        differences.append(one - other)
        if (fault := served.fault(other, one)) is None:
            continue
        raise ConfigError(
            f"{client.server.section}: log-probabilities of sampled tokens and of the same tokens scored differ "
            f"{fault}: start the server with --logprobs-mode raw_logprobs"
        )
    return noise_nats(differences)


def _sampling(max_tokens: int, seed: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "ignore_eos": True}


def _prompt(client: VllmClient, number: int) -> list[int]:
    """Return random tokens; `number` seeds them."""
    draw = np.random.default_rng(number)
    tokens: list[int] = draw.integers(0, client.server.files.vocab_size, PROMPT_TOKENS).tolist()
    return tokens
