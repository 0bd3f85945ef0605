"""The running sum's teacher behind a tokenizer that makes one token of a label, an operator or `=` and a digit.

Its probability of such a token is the product of two, which the backend computes with the teacher's own weights. The
student's tokenizer is byte-level here, since one that drops blanks does not say which bytes its tokens have.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import string
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from spot_async import BackendSettings, Capabilities, ScoreRequest, TokenScores, Vocabulary
from spot_async.base.tasks import Opened
from spot_async.testing.services import capabilities, token_scores

EXAMPLE = Path(__file__).parents[2] / "examples" / "running_sum"
LEFT = [*string.ascii_lowercase[:16], *"+-="]


def with_bytes(role: str, directory: Path) -> Path:
    """Copy a model of the example. Its tokenizer decodes without the blanks, so that tokens are their letters."""
    shutil.copytree(EXAMPLE / role, directory)
    path = directory / "tokenizer.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"decoder": json.loads(decoders.ByteLevel().__getstate__())})
    )
    return directory


def with_joined_tokens(directory: Path) -> Path:
    """Write the files of a teacher without weights, whose tokenizer joins."""
    with_bytes("teacher", directory)
    (directory / "model.safetensors").unlink()
    path = directory / "tokenizer.json"
    tree = json.loads(path.read_text())
    words = [*tree["model"]["vocab"], *(left + digit for left in LEFT for digit in string.digits)]
    words[5:5] = [f"<|other_{number}|>" for number in range(7)]  # ids mean other tokens than the student's
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<|unk|>")
    pieces = Regex(r"\\boxed|one|two|three|so|then|next|[a-p+\-=][0-9]|.")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    tokenizer.save(str(path))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": len(words)}))
    return directory


class JoinedTeacher(Opened):
    """Scores joined tokens with a model that knows their parts."""

    class Settings(BackendSettings):
        parts: str = Field(description="directory of the model that knows the parts")

    def __init__(self, settings: Settings, *, role: str, model: str, run_directory: Path) -> None:
        self._directory, self._one_at_a_time = model, asyncio.Lock()
        self._files, self._known = Vocabulary.load(Path(model)), Vocabulary.load(Path(settings.parts))
        self._model = AutoModelForCausalLM.from_pretrained(settings.parts, dtype=torch.float32)

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def capabilities(self, *, deadline: float) -> Capabilities:
        size = len(self._files.tokenizer)
        offered = {"model": self._directory, "vocab_fingerprint": self._files.fingerprint, "server": "joined"}
        limits = {"max_context_tokens": self._model.config.max_position_embeddings, "score_temperature": "one"}
        unlike = dict.fromkeys(("exact_entropy", "weight_update", "in_flight_updates", "generation", "abort"), False)
        return capabilities(size, candidate_logprobs="none", **offered, **limits, **unlike)

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        async with asyncio.timeout_at(request.deadline), self._one_at_a_time:
            return await asyncio.to_thread(self._score, request, top_k)

    def _score(self, request: ScoreRequest, top_k: int) -> TokenScores:
        torch.set_num_threads(1)  # of this thread: beside servers and a trainer on threads, several wait for each other
        before, of_each = self._in_parts(request.prompt_ids), list(map(self._in_parts, request.response_ids[:, None]))
        starts = len(before) + np.cumsum([0, *map(len, of_each)])[:-1]
        ids = torch.tensor([*before, *chain.from_iterable(of_each)])
        chosen = torch.from_numpy(request.response_ids.astype(np.int64))[:, None]
        if top_k > 1:  # as the checks ask, which look at whole rows
            rows = self._rows(ids, torch.from_numpy(starts))
            logprobs, top = rows.gather(-1, chosen), rows.topk(top_k)
        else:
            logprobs = torch.from_numpy(self._products(ids, starts))[:, None]
            top = torch.return_types.topk((logprobs, chosen))
        return token_scores(logprobs[:, 0], topk_ids=top.indices, topk_logprobs=top.values)

    @torch.inference_mode()
    def _products(self, ids: torch.Tensor, starts: Any) -> Any:
        """Return the log-probabilities of joined tokens, where parts [start, next start) are one each."""
        of_parts = self._model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0].numpy()
        return np.add.reduceat(of_parts.astype(np.float64), starts - 1).astype(np.float32)

    @torch.inference_mode()
    def _rows(self, ids: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities (N, V) of joined tokens at `starts` (N,). A left part alone has no digit behind.

        Whatever stands behind the left part does not matter, so all are asked for in one pass.
        """
        known = self._known.tokenizer.get_vocab()
        left = torch.tensor([known[each] for each in LEFT])
        digits = torch.tensor([known[each] for each in string.digits])
        first = self._model(ids[None]).logits[0, starts - 1].log_softmax(-1)
        texts = ids.expand(len(starts), len(left), -1).clone()
        texts.scatter_(2, starts.expand(len(left), -1).T[:, :, None], left.expand(len(starts), -1)[:, :, None])
        behind = self._model(texts.flatten(0, 1)).logits.view(*texts.shape, -1)
        behind = behind[torch.arange(len(starts)), :, starts].log_softmax(-1)[:, :, digits]
        alone = first.clone()
        alone[:, left] += torch.log1p(-behind.exp().sum(-1).clamp(max=1 - 1e-7))
        rows = torch.full((len(starts), len(self._files.tokenizer)), -60.0)
        names = self._files.tokenizer.get_vocab()
        rows[:, [names[name] for name in known]] = alone[:, [*known.values()]]
        pairs = [names[each + digit] for each in LEFT for digit in string.digits]
        rows[:, pairs] = (first[:, left, None] + behind).flatten(1)
        return rows.log_softmax(-1)

    def _in_parts(self, ids: Any) -> list[int]:
        names, known = self._files.tokenizer.convert_ids_to_tokens(ids.tolist()), self._known.tokenizer.get_vocab()
        return [known[part] for name in names for part in ([name] if name in known else name)]
