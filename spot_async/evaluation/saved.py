"""Judges the responses of an earlier evaluation again, from their file alone: no model and no benchmark is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spot_async.base.events import Channel
from spot_async.config import Config
from spot_async.data.prompts import PromptSource
from spot_async.errors import DataError
from spot_async.evaluation.benchmarks import Benchmark, check_verifier, letters_alone, note_of
from spot_async.evaluation.response_log import JudgedResponse, ResponseKey
from spot_async.evaluation.runner import Job, ResponseJudge, key_of, keys_of
from spot_async.protocols import Verifier
from spot_async.types import Problem

NO_PROMPT = np.zeros(0, np.int32)


class SavedResponses(ResponseJudge):
    """Has saved responses judged. Nothing is sampled."""

    def __init__(
        self,
        saved: Mapping[ResponseKey, JudgedResponse],
        benchmarks: Sequence[Benchmark],
        config: Config,
        verifiers: Mapping[str, Verifier],
        events: Channel,
    ) -> None:
        assert config.evaluation is not None
        super().__init__(benchmarks, config.evaluation, verifiers=verifiers, events=events)
        self._saved = saved

    async def sample(self, job: Job) -> JudgedResponse:
        return await self.judged(job, self._saved[key_of(self.benchmarks, job)])


def saved_benchmarks(config: Config, saved: Mapping[ResponseKey, JudgedResponse], name: str) -> list[Benchmark]:
    """Return the judged benchmarks of an evaluation as its responses tell of them, with the verifiers of `config`.

    Raises DataError, which calls their file `name`, for responses that are missing or do not tell.
    """
    evaluation = config.evaluation
    assert evaluation is not None
    if any(not each.problem for each in saved.values()):
        raise DataError(f"{name}: has no problems and answers, as older versions wrote it: evaluate again")
    found, template = [], next((each.template for each in saved.values() if each.template), None)
    for benchmark, settings in evaluation.sets().items():
        first = {each.problem_id: each for each in saved.values() if each.benchmark == benchmark and each.sample == 0}
        if settings.format == "alpaca_eval":
            continue
        verifier, key = settings.verifier_of(evaluation), evaluation.key_of(benchmark)
        verifier.check_machine(f"{key}.verifier")
        problems = [
            Problem(id=each.problem_id, text=each.problem, answer=each.gold, tier=each.tier, choices=each.choices)
            for each in first.values()
        ]
        check_verifier(verifier, problems, settings, key)
        found.append(
            Benchmark(
                benchmark,
                [PromptSource(problem=problem, token_ids=NO_PROMPT) for problem in problems],
                samples=settings.samples or evaluation.samples,
                max_response_tokens=settings.max_response_tokens or evaluation.max_response_tokens,
                verifier=verifier,
                in_macro=settings.in_macro,
                note=note_of(settings, evaluation, config.prompt),
                warning=letters_alone(verifier, settings, key),
                template=template,
            )
        )
    empty = next((each.key for each in found if not each.sources), None)
    if empty or keys_of(found) - saved.keys() or not found:
        raise DataError(f"{name}: lacks responses{f' of {empty}' if empty else ''}: judge a complete evaluation")
    return found
