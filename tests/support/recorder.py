"""Services of a prompt's stages that keep what they were asked."""

from __future__ import annotations

import numpy as np

from spot_async.testing.services import generation, token_scores
from spot_async.types import ScoredPositions


class Recorder:
    """Student, teacher, reference, verifier and cache at once. An answer of the verifier's may be an error."""

    def __init__(self, *answers, says=(9,)):
        self.answers, self.says = list(answers), says
        self.read = []  # the prompt of each request
        self.generated = []  # prompt and sampling
        self.sessions = []
        self.scored = []  # responses
        self.top_k = []  # of rollouts and scores
        self.temperatures = []  # of scores
        self.asked_versions = []
        self.verified = 0
        self.keys = []  # of the cache, which keeps nothing

    async def generate(self, prompt_ids, sampling, *, top_k=0, session=None, deadline):
        self.read.append(prompt_ids.tolist())
        self.generated.append((prompt_ids.tolist(), sampling))
        self.sessions.append(session)
        self.top_k.append(top_k)
        return generation(self.says)

    async def score(self, request, *, top_k):
        self._note(request)
        self.scored.append(request.response_ids.tolist())
        self.top_k.append(top_k)
        tokens = len(request.response_ids)
        return token_scores(np.zeros(tokens), topk_ids=np.tile([[6, 2, 1]], (tokens, 1)))

    async def score_at(self, request, positions, *, top_k):
        self._note(request)
        self.scored.append(request.response_ids.tolist())
        topk_ids = np.tile(np.array([[6, 2, 1]], np.int32), (len(positions), 1))
        zeros = np.zeros(topk_ids.shape, np.float32)
        return ScoredPositions(
            topk_ids=topk_ids, topk_logprobs=zeros, entropy_lower=zeros[:, 0], entropy_upper=zeros[:, 0]
        )

    async def candidate_logprobs(self, request, positions, candidate_ids, *, expected_version):
        self._note(request)
        self.asked_versions.append(expected_version)
        return np.zeros(candidate_ids.shape, np.float32)

    async def verify(self, problem, text, *, deadline):
        self.verified += 1
        if isinstance(answer := self.answers.pop(0), Exception):
            raise answer
        return answer

    async def fetch(self, kind, asked, ask, *, what):
        self.keys.append([part.tolist() if isinstance(part, np.ndarray) else part for part in asked])
        return await ask()

    def _note(self, request):
        self.read.append(request.prompt_ids.tolist())
        self.temperatures.append(request.temperature)
