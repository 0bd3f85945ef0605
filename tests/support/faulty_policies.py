"""Policies of somebody else's, each with one fault: what a rehearsal finds of them, and what it cannot see."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from typing import Any, ClassVar

import msgspec
import numpy as np

import spot_async as spot

K = 4


class Whole:
    """Has no fault: distils on sampled tokens and on rows of the teacher, and weighs both in a second word."""

    Settings = spot.PluginSettings
    stated: ClassVar[dict[str, Any]] = {"term_bytes_per_token": spot.row_bytes(K)}

    def __init__(self, settings: Any, context: Any) -> None:
        self.needs = spot.PolicyNeeds(**{"teacher_top_k": K, **self.stated})
        self.context = context

    async def supervise(self, prompt: Any, stages: Any) -> Any:
        rollout = await stages.rollout()
        return [await self.sample(prompt, stages, rollout)]

    async def sample(self, prompt: Any, stages: Any, rollout: Any, **terms: Any) -> Any:
        y = rollout.token_ids
        scores, judgement = await spot.both(stages.score(y, top_k=K), stages.verify(y))
        terms = {"pulls": (spot.pull(scores),), "soft_targets": (spot.compared(scores, spot.forward_kl()),), **terms}
        return spot.student_sample(prompt, stages, rollout, judgement, scores, **terms)

    def revise(self, batch: Any) -> Any:
        return [
            spot.revised(each, pulls=(spot.weighted(each.supervision.pulls[0], live.entropy >= 1),))
            for each, live in zip(batch.samples, batch.live, strict=True)
        ]


class WrongAttribute(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        scores = await stages.score((await stages.rollout()).token_ids, top_k=K)
        return scores.top_ids  # at fault


class ChangedInPlace(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        (sample,) = await super().supervise(prompt, stages)
        sample.supervision.pulls = ()  # at fault
        return [sample]


class ChangedArray(Whole):
    def revise(self, batch: Any) -> Any:
        batch.samples[0].supervision.pulls[0].logprobs[0] = -1.0  # at fault
        return batch.samples


class AsksUnstated(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        rollout = await stages.rollout()
        await stages.reference_logprobs(rollout.token_ids)  # at fault
        return [await self.sample(prompt, stages, rollout)]


class AsksTwice(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        first, _ = await spot.gather(stages.rollout(n=n) for n in range(2))  # at fault
        return [await self.sample(prompt, stages, first)]


class WrongTarget(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        (sample,) = await super().supervise(prompt, stages)
        (targets,) = sample.supervision.soft_targets
        doubled = msgspec.structs.replace(targets, probabilities=2 * targets.probabilities)
        return [spot.revised(sample, soft_targets=(doubled,))]


class IndexInRevise(Whole):
    def revise(self, batch: Any) -> Any:
        return [spot.revised(each, pulls=(each.supervision.pulls[1],)) for each in batch.samples]  # at fault


class NeverRevises(Whole):
    def revise(self, batch: Any) -> Any:
        threading.Event().wait()


class Impure(Whole):
    def __init__(self, settings: Any, context: Any) -> None:
        super().__init__(settings, context)
        self.calls = itertools.count(1)

    def revise(self, batch: Any) -> Any:
        weight = 1 / next(self.calls)
        return [spot.revised(s, pulls=(spot.weighted(s.supervision.pulls[0], weight),)) for s in batch.samples]


class ChangesResponse(Whole):
    def revise(self, batch: Any) -> Any:
        return [spot.revised(each, response_ids=each.supervision.response_ids[::-1]) for each in batch.samples]


class NeedsTooMuch(Whole):
    stated: ClassVar = {**Whole.stated, "rollout_top_k": 100}  # of 48 tokens


class StatesTooLittle(Whole):
    stated: ClassVar = {"term_bytes_per_token": spot.row_bytes(1)}


class ForgetsAwait(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        rollout = stages.rollout()
        rollout.close()  # it would be told that nobody awaited it
        return rollout.token_ids  # at fault


class MasksNoForeign(Whole):
    stated: ClassVar = {**Whole.stated, "teacher_responses": 1}

    async def supervise(self, prompt: Any, stages: Any) -> Any:
        sample = await self.sample(prompt, stages, await stages.teacher_response())
        return [spot.revised(sample, policy_mask=None)]


class DividesByNothing(Whole):
    stated: ClassVar = {**Whole.stated, "samples_per_prompt": 2}

    async def supervise(self, prompt: Any, stages: Any) -> Any:
        rollouts = await spot.gather(stages.rollout(n=n) for n in range(2))
        rewards = np.array([(await stages.verify(each.token_ids)).reward for each in rollouts])
        with np.errstate(invalid="ignore"):
            shares = (rewards - rewards.mean()) / rewards.std()  # NaN where both are right, or wrong
        return [
            await self.sample(prompt, stages, each, advantages=np.full(len(each.token_ids), share, np.float32))
            for each, share in zip(rollouts, shares, strict=True)
        ]


class KnowsTwoVerdicts(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        rollout = await stages.rollout()
        judged = await stages.verify(rollout.token_ids)
        share = {spot.Verdict.CORRECT: 1.0, spot.Verdict.WRONG: -1.0}[judged.verdict]  # there are four more
        return [await self.sample(prompt, stages, rollout, advantages=np.full_like(rollout.logprobs, share))]


class KnowsShortResponses(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        rollout = await stages.rollout()
        assert len(rollout.token_ids) < 100
        return [await self.sample(prompt, stages, rollout)]


class WaitsForSocket(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            async with asyncio.timeout(1.0):  # which must not pass on virtual time, as no answer could come
                await asyncio.get_running_loop().sock_recv(ours, 1)
        return []


class WaitsForOthers(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        await asyncio.Event().wait()
        return []


class Polls(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        while not getattr(self, "is_done", False):  # noqa: ASYNC110 - that is the fault
            await asyncio.sleep(0)
        return []


class AsksForEver(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        while True:
            await stages.rollout()


class TeachesNothing(Whole):
    async def supervise(self, prompt: Any, stages: Any) -> Any:
        samples = await super().supervise(prompt, stages)
        return [msgspec.structs.replace(each, supervision=None) for each in samples]


class WantsLongResponses(Whole):
    def __init__(self, settings: Any, context: Any) -> None:
        super().__init__(settings, context)
        if context.sampling.max_response_tokens < 100:
            raise spot.ConfigError("sampling.max_response_tokens: at least 100")


class Frozen:
    """Has no second word. Of its response it learns what `terms` says."""

    Settings = spot.PluginSettings

    def __init__(self, settings: Any, context: Any) -> None:
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0)

    async def supervise(self, prompt: Any, stages: Any) -> Any:  # told of
        rollout = await stages.rollout(top_k=self.top_k)
        scores, judgement = await spot.both(stages.score(rollout.token_ids, top_k=0), stages.verify(rollout.token_ids))
        return [
            spot.student_sample(prompt, stages, rollout, judgement, scores, **await self.terms(stages, rollout, scores))
        ]

    top_k = 0

    async def terms(self, stages: Any, rollout: Any, scores: Any) -> dict[str, Any]:
        return {"pulls": (spot.pull(scores),)}


class FrozenTopK(Frozen):
    top_k = 2


class FrozenCandidates(Frozen):
    def __init__(self, settings: Any, context: Any) -> None:
        self.needs = spot.PolicyNeeds(teacher_top_k=1, asked_top_k=0, candidate_logprobs=True)

    async def terms(self, stages: Any, rollout: Any, scores: Any) -> dict[str, Any]:
        y = rollout.token_ids
        said = await stages.candidate_logprobs(y, np.arange(len(y), dtype=np.int32), y[:, None])
        return {"pulls": (spot.pull(scores, np.exp(said[:, 0])),)}


class FrozenDifference(Frozen):
    async def terms(self, stages: Any, rollout: Any, scores: Any) -> dict[str, Any]:
        return {"advantages": np.tanh(scores.logprobs - rollout.logprobs)}


class FrozenReward(Frozen):
    async def terms(self, stages: Any, rollout: Any, scores: Any) -> dict[str, Any]:
        reward = np.full_like(scores.logprobs, rollout.token_ids[0] % 2)
        is_even = rollout.token_ids % 2 == 0
        return {"advantages": np.where(is_even, reward, 7), "policy_mask": is_even, "pulls": (spot.pull(scores),)}


class RevisedTopK(FrozenTopK):
    def revise(self, batch: Any) -> Any:
        return batch.samples


class Remembers(Whole):
    """Notes what it was asked, of all policies of its class; must be given its prompts before."""

    asked: ClassVar[list[Any]] = []

    def __init__(self, settings: Any, context: Any) -> None:
        super().__init__(settings, context)
        self.known: set[int] = set()
        self.asked.append(self)

    def check(self, prompts: Any) -> None:
        self.known = {each.ordinal for each in prompts}

    async def supervise(self, prompt: Any, stages: Any) -> Any:
        (sample,) = await super().supervise(prompt, stages)
        assert prompt.ordinal in self.known
        vars(self).setdefault("seen", []).append(sample.supervision)
        return [sample]


class NeverAsked:
    """A verifier that nobody may make."""

    Settings = spot.PluginSettings

    def __init__(self, settings: Any) -> None:
        raise AssertionError
