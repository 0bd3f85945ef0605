"""A backend: a teacher inside the run's own process, which scores responses with a Hugging Face model.

It is good for a first try and for small models. A backend is a class with the methods of the protocols that its role
needs (`spot_async.protocols`): here `Backend` and `Scorer`. It inherits from nothing of spot-async. Copy this file for
a backend of your own, and replace what is done with the model by requests to your server.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

import numpy as np
import torch
from pydantic import Field
from transformers import AutoModelForCausalLM

from spot_async import BackendSettings, Capabilities, ScoreRequest, TokenScores, Vocabulary, WeightVersion
from spot_async.errors import PermanentError
from spot_async.models.alignment import decision_rows

ONLY_WEIGHTS = WeightVersion(0, 0)  # a teacher's weights never change


class InlineTeacher:
    """Scores with a model in torch, one response at a time.

    The run makes one object for each server of a role (`Settings.servers`), enters it, asks what it offers, and leaves
    it at the end. A request has a `deadline` in the event loop's time, and may be cancelled at every await.
    """

    class Settings(BackendSettings):
        """The keys of `teacher.backend` in a configuration, besides `kind`. Unknown keys are refused."""

        threads: int = Field(1, ge=1, description="threads that compute")

    def __init__(self, settings: Settings, *, role: str, model: str, run_directory: Path) -> None:
        """Make a backend that is not entered yet. Nothing is started here.

        * `role`: the part that it plays: `student`, `teacher` or `reference`. Errors name keys by it.
        * `model`: the directory of the model, as `teacher.model` says.
        * `run_directory`: where logs go, below `logs/`.
        """
        self._settings = settings
        self._name = settings.server_name(role)
        self._path = model
        self._one_at_a_time = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Start the server, or connect to it. Raises ConfigError for what the user has to correct."""
        self._model = await asyncio.to_thread(
            AutoModelForCausalLM.from_pretrained, self._path, dtype=torch.float32, trust_remote_code=False
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave nothing behind: no process, no connection."""
        del self._model

    async def watch(self) -> None:
        """Run for as long as the server lives. Raise ProcessDiedError when it ends by itself."""
        await asyncio.Event().wait()  # it has no process of its own that could die

    async def capabilities(self, *, deadline: float) -> Capabilities:
        """Say what the server offers. A method that needs more is refused before the first request."""
        config = self._model.config
        return Capabilities(
            model=self._path,
            vocab_size=config.vocab_size,
            vocab_fingerprint=Vocabulary.load(Path(self._path)).fingerprint,  # other tokens under the same ids: refused
            max_context_tokens=config.max_position_embeddings,
            max_top_k=config.vocab_size,
            exact_entropy=True,  # a server that knows a top-k gives bounds instead
            candidate_logprobs="none",  # a student's: log-probabilities of given tokens
            weight_update=False,  # a student's
            generation=False,
            abort=False,  # a forward that has begun runs to its end
            server="torch, in this process",
        )

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        """Return what the model gives to each token of the response (T,), and to its top-k (T, K).

        Everything is of the whole softmax, in nats, at the request's temperature. Raise `TransientError` for what
        another try may mend, `ThrottledError` where the server asks for a pause, and `PermanentError` for what stays.
        """
        self._check(request, top_k)
        async with asyncio.timeout_at(request.deadline), self._one_at_a_time:
            return await asyncio.to_thread(self._score, request, top_k)

    def _check(self, request: ScoreRequest, top_k: int) -> None:
        """Refuse what the model cannot score, before it is asked. Nothing is cut to fit."""
        room, vocab_size = self._model.config.max_position_embeddings, self._model.config.vocab_size
        ids = request.token_ids
        if not len(request.prompt_ids):
            raise PermanentError(f"{self._name}: an empty prompt: nothing decides the first token of the response")
        if len(ids) > room:
            raise PermanentError(f"{self._name}: {len(ids)} tokens, and {room} have room")
        if not 0 <= ids.min() <= ids.max() < vocab_size:
            raise PermanentError(f"{self._name}: ids {ids.min()} to {ids.max()}, and the model has {vocab_size}")
        if not 0 <= top_k <= vocab_size:
            raise PermanentError(f"{self._name}: top_k={top_k}, and the model knows {vocab_size} tokens")

    @torch.inference_mode()
    def _score(self, request: ScoreRequest, top_k: int) -> TokenScores:
        """Compute in a thread, so that the event loop continues."""
        torch.set_num_threads(self._settings.threads)
        ids = torch.from_numpy(request.token_ids.astype(np.int64))
        prompt_tokens = len(request.prompt_ids)
        rows = decision_rows(prompt_tokens, len(request.response_ids))  # which output row decides which response token
        logprobs = (self._model(ids[None]).logits[0, rows] / request.temperature).log_softmax(-1)  # (T, V)
        top = logprobs.topk(top_k)
        entropy = -(logprobs.exp() * logprobs).sum(-1).numpy()
        return TokenScores(
            logprobs=logprobs.gather(-1, ids[prompt_tokens:, None])[:, 0].numpy(),
            topk_ids=top.indices.numpy().astype(np.int32),  # likeliest first
            topk_logprobs=top.values.numpy(),
            entropy=entropy,
            entropy_lower=entropy,
            entropy_upper=entropy,
            version=ONLY_WEIGHTS,
        )
