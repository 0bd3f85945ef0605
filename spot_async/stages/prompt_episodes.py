"""Plays one prompt's episodes, and knows them by their ids, so that policies ask as they do for plain responses."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from spot_async.base.seeds import derive_seed
from spot_async.errors import ContractError
from spot_async.models.episodes import Action, Observation, Step
from spot_async.protocols import Environment
from spot_async.stages.episode import NOTHING_BEFORE, Before, Episode, Generate, play
from spot_async.stages.requests import content
from spot_async.stages.services import EnvironmentService
from spot_async.stages.stage import Stage
from spot_async.types import Generation, IntArray, Judgement, Prompt, Sample, TokenScores, Verdict


@dataclass(eq=False)
class PromptEpisodes:
    """The episodes of one prompt. All of them have the same seed: equal ids then mean equal episodes."""

    stage: Stage[Environment]
    service: EnvironmentService
    prompt: Prompt
    run_seed: int
    taught: dict[bytes, Episode]  # the newest that a teacher played of the problem: later epochs may learn from it too

    def __post_init__(self) -> None:
        self._seed = derive_seed(self.run_seed, self.prompt.ordinal, "environment")
        self._by_ids = ChainMap({}, self.taught)

    async def play(
        self,
        generate: Generate,
        *,
        most: int,
        top_k: int = 0,
        before: Before = NOTHING_BEFORE,
        is_taught: bool = False,
    ) -> Generation:
        """Play an episode on, and return what is new of it."""
        new, episode = await play(self.service.rules, generate, self._act, most=most, top_k=top_k, before=before)
        found = {content(episode.token_ids): replace(episode, reward=await self._reward(episode.steps))}
        self._by_ids |= found
        if is_taught:
            self.taught.clear()  # or it would hold the whole run's, where a teacher writes anew in each epoch
            self.taught |= found
        return new

    def before(self, response_ids: IntArray, position: int, token_id: int) -> Before:
        """Return what a branch of a response goes on from. Raises ContractError for one that is no episode."""
        return self._of(response_ids, "probes").before(position, token_id)

    def last_turn(self, response_ids: IntArray) -> IntArray:
        """Return the last turn of an episode, by which it counts; of other ids all."""
        episode = self._by_ids.get(content(response_ids))
        return response_ids if episode is None else episode.last_turn

    def counted(self, response_ids: IntArray, scores: TokenScores) -> TokenScores:
        """Return scores that know nothing of tokens that were only read."""
        episode = self._by_ids.get(content(response_ids))
        if episode is None or episode.counted.all():
            return scores
        valid, counted = scores.known & episode.counted, int(episode.counted.sum())
        return msgspec.structs.replace(scores, valid=valid, counted=counted)

    def judged(self, response_ids: IntArray, judgement: Judgement) -> Judgement:
        """Return the environment's reward, where it is the judge, beside the verifier's verdict on the last turn."""
        if self.service.judge == "verifier":
            return judgement
        reward = self._of(response_ids, "verifies").reward
        verdict = Verdict.UNJUDGED if judgement.verdict.is_missing else judgement.verdict
        return msgspec.structs.replace(judgement, verdict=verdict, reward=reward)

    def recorded(self, sample: Sample) -> Sample:
        """Return a sample with the metrics of its episode, and its turns and its end in the record."""
        ids = sample.record.get("response_ids") if sample.supervision is None else sample.supervision.response_ids
        episode = None if ids is None else self._by_ids.get(content(ids))
        if episode is None:
            return sample
        turns = {"turns": list(episode.starts), "failed_turns": episode.failed_turns(), "ended": episode.ended}
        record, metrics = sample.record | turns, sample.metrics | episode.metrics()
        return msgspec.structs.replace(sample, metrics=metrics, record=record)

    def _of(self, response_ids: IntArray, does: str) -> Episode:
        if (episode := self._by_ids.get(content(response_ids))) is None:
            raise ContractError(
                f"the policy {does} a response that was not played, beside an environment: give the ids of a rollout, "
                "or of a branch with its whole continuation"
            )
        return episode

    async def _act(self, steps: Sequence[Step], action: Action) -> Observation:
        return await self.stage.ask(
            (self.prompt.ordinal,),
            lambda environment, deadline: environment.act(
                self.prompt.problem, steps, action, seed=self._seed, deadline=deadline
            ),
        )

    async def _reward(self, steps: Sequence[Step]) -> float | None:
        """Return the sum of the steps' rewards, or what the environment says of them where it is the judge."""
        given = [step.observation.reward for step in steps if step.observation.reward is not None]
        if given or self.service.judge == "verifier":
            return sum(given) if given else None
        return await self.stage.ask(
            (self.prompt.ordinal,),
            lambda environment, deadline: environment.reward(
                self.prompt.problem, steps, seed=self._seed, deadline=deadline
            ),
            kind="reward",
        )
