"""Notes the requests that a run's policy makes for a few prompts, and sends them again in the same proportions.

It knows no method. The policy supervises some prompts as always, through stages that note each request as a template. A
template can be sent again for another prompt, with other seeds and in another session.

* Requests that need only a prompt (rollouts, the teacher's responses) take the next prompt of the run's schedule, so
  that none is sent twice.
* Requests about a response (scores, candidates, probes, what continues a prefix) repeat the noted one, so a server's
  prefix cache helps them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any, cast

import msgspec
import numpy as np

from spot_async.base.tasks import gather
from spot_async.errors import ConfigError
from spot_async.protocols import Policy, PromptStages
from spot_async.stages.plugin_contract import supervise
from spot_async.stages.services import STAGE_SERVERS
from spot_async.stages.stages import Stages
from spot_async.telemetry.totals import GENERATING
from spot_async.tools.simulate.lengths import RecordedPrompt
from spot_async.tools.simulate.reading import RESPONSES
from spot_async.types import Generation, Prompt, TokenScores

Ask = Callable[[PromptStages], Awaitable[Any]]

# The stage of each method of `PromptStages` that makes requests.
STAGE_OF = {
    "rollout": "rollout",
    "teacher_response": "teacher_response",
    "score": "score",
    "score_at": "score",
    "teacher_candidates": "score",
    "reference_logprobs": "reference",
    "candidate_logprobs": "candidates",
    "probe": "probe",
    "verify": "verify",
}


@dataclass(frozen=True)
class Template:
    """A request that the policy made, which can be made again."""

    stage: str
    prompt: Prompt  # the prompt that it was made for
    ask: Ask
    tokens: int  # in its answer
    begins: bool = False  # whether it asks for a response from its beginning, of which a prompt is all that it needs
    prompt_tokens: int = 0  # before the response


@dataclass(frozen=True)
class Request:
    """A template that is about to be sent for one prompt."""

    stage: str
    send: Callable[[], Awaitable[int]]  # returns the answer's tokens


class NotedStages:
    """One prompt's `protocols.PromptStages`, of which requests that were sent and answered are noted."""

    def __init__(self, stages: PromptStages, prompt: Prompt, templates: list[Template]) -> None:
        self._stages = stages
        self._prompt = prompt
        self._templates = templates

    def __getattr__(self, name: str) -> Any:
        return partial(self._noted, name) if name in STAGE_OF else getattr(self._stages, name)

    async def _noted(self, name: str, *given: Any, **asked: Any) -> Any:
        """Pass a request on, and note it."""

        def ask(stages: PromptStages) -> Awaitable[Any]:
            request: Awaitable[Any] = getattr(stages, name)(*given, **asked)
            return request

        answer, stage = await ask(self._stages), STAGE_OF[name]
        # A probe with nothing left to sample is answered without a request.
        if not (isinstance(answer, Generation) and not answer.version_spans):
            begins = stage in RESPONSES and not asked.keys() & {"prompt_ids", "prefix_ids"}
            read_ids = self._prompt.token_ids
            if name == "score":
                own = asked.get("prompt_ids")
                read_ids = self._prompt.read_by_teacher if own is None else own
            tokens = tokens_of(answer, len(read_ids))
            self._templates.append(Template(stage, self._prompt, ask, tokens, begins, len(read_ids)))
        return answer


def tokens_of(answer: Any, prompt_tokens: int) -> int:
    """Return the tokens that an answer generated, or scored with its prompt; candidates and verdicts count none."""
    match answer:
        case Generation():
            return len(answer.token_ids)
        case TokenScores():
            return prompt_tokens + len(answer.logprobs)
        case np.ndarray(ndim=1):  # the reference's log-probabilities
            return prompt_tokens + len(answer)
        case _:
            return 0


async def note_requests(policy: Policy, stages: Stages, prompts: Sequence[Prompt]) -> list[Template]:
    """Let the policy supervise `prompts` at the same time, and return the requests that it made.

    Raises what a failed request raised, and ConfigError if there are none.
    """
    templates: list[Template] = []

    def noted(prompt: Prompt) -> PromptStages:
        return cast(PromptStages, NotedStages(stages.for_prompt(prompt), prompt, templates))

    await gather(supervise(policy, prompt, noted(prompt)) for prompt in prompts)
    if not templates:
        raise ConfigError(f"policy {type(policy).__name__} asks no server for these prompts, so there is none to tune")
    return templates


def endless(templates: Sequence[Template], stages: Stages, prompts: Iterator[Prompt], seed: int) -> Iterator[Request]:
    """Return requests in the templates' proportions, without end. Each round has the noted prompts in a new order.

    `prompts` are further prompts of the run. In each round, each noted prompt is replaced by one of them, whose ordinal
    gives its requests other seeds and another session.
    """
    draw, groups = random.Random(seed), _by_prompt(templates)
    while True:
        draw.shuffle(groups)
        for group in groups:
            drawn = next(prompts)
            for template in draw.sample(group, len(group)):
                yield _request(template, stages, drawn)


def _request(template: Template, stages: Stages, drawn: Prompt) -> Request:
    prompt = drawn if template.begins else msgspec.structs.replace(template.prompt, ordinal=drawn.ordinal)

    async def send() -> int:
        return tokens_of(await template.ask(stages.for_prompt(prompt)), template.prompt_tokens)

    return Request(template.stage, send)


def recorded_prompts(templates: Sequence[Template]) -> list[RecordedPrompt]:
    """Return the prompts, with the tokens that were generated for each; of written responses those that were scored."""
    return [
        RecordedPrompt(
            responses,
            [template.tokens for template in own if template.stage in GENERATING and not template.begins],
            mean([template.prompt_tokens for template in own if template.stage == "score"] or [own[0].prompt_tokens]),
        )
        for own in _by_prompt(templates)
        if (responses := [template.tokens for template in own if template.begins] or _scored(own))
    ]


def _by_prompt(templates: Sequence[Template]) -> list[list[Template]]:
    found: dict[int, list[Template]] = {}
    for template in templates:
        found.setdefault(template.prompt.ordinal, []).append(template)
    return list(found.values())


def _scored(templates: Sequence[Template]) -> list[int]:
    return [each.tokens - each.prompt_tokens for each in templates if each.stage == "score" and each.tokens]


def by_server(templates: Sequence[Template]) -> dict[str, list[Template]]:
    """Return the templates by the server that they ask, in the order of the stages."""
    found = {server: list[Template]() for server in STAGE_SERVERS.values()}
    for template in templates:
        found[STAGE_SERVERS[template.stage]].append(template)
    return {server: own for server, own in found.items() if own}
