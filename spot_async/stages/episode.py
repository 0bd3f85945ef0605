"""Plays episodes: a model's turns and what an environment answers to them, as one response.

`prompt | turn | bridge | turn | ...`: a turn is sampled, with the token that ends it, and is never tokenised again. A
bridge is what the chat template writes between two turns, the environment's answer included. `play` is over callables,
so rollouts, probes and evaluation use it alike.
"""

from __future__ import annotations

import bisect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from spot_async.base.text import shortened
from spot_async.models.episodes import Action, Call, Observation, Step
from spot_async.models.responses import counted_tokens, joined, read
from spot_async.models.vocabulary import Vocabulary
from spot_async.types import BoolArray, Generation, IntArray

Generate = Callable[[IntArray], Awaitable[Generation]]  # what comes after these tokens of the response
Act = Callable[[Sequence[Step], Action], Awaitable[Observation]]
# Why no further turn follows: the model made no call, the environment wants none, or there is no room for one.
Ending = Literal["answer", "done", "turns", "tokens"]
CUT = "\n[... {} tokens left out ...]\n"
FAILED_CHARACTERS = 200  # that are kept of an answer to a turn that failed


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a run's episodes are played, whatever answers them."""

    vocabulary: Vocabulary
    turn_end: int  # the token that ends a turn of the model's, after which others follow
    between: Callable[[Sequence[str]], IntArray]  # the bridge around these answers, one for each call
    # Reads a turn's calls of tools; raises ValueError if they cannot be read. None: the environment reads the text.
    read_calls: Callable[[str], Awaitable[Sequence[Call]]] | None = None
    max_turns: int = 4
    max_observation_tokens: int = 512

    def shortened(self, texts: Sequence[str]) -> tuple[str, ...]:
        """Return the answers of a turn, cut in the middle where they are longer together than is allowed."""
        most = max(2, self.max_observation_tokens // max(1, len(texts)))
        return tuple(self._cut(text, self.vocabulary.encode(text), most) for text in texts)

    def _cut(self, text: str, ids: IntArray, most: int) -> str:
        if len(ids) <= most:
            return text
        begin, end = ids[: most // 2], ids[len(ids) - most // 2 :]
        between = CUT.format(len(ids) - len(begin) - len(end))
        return self.vocabulary.decode(begin) + between + self.vocabulary.decode(end)


@dataclass(frozen=True)
class Before:
    """What an episode goes on from: tokens of the response, where turns began in it, and what was answered."""

    token_ids: IntArray  # (T,)
    counted: BoolArray  # (T,) as in `counted_tokens`
    starts: tuple[int, ...] = (0,)
    steps: tuple[Step, ...] = ()


NOTHING_BEFORE = Before(np.zeros(0, np.int32), np.zeros(0, np.bool_))


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An episode as far as it was played."""

    token_ids: IntArray  # (T,) of all turns and bridges
    counted: BoolArray  # (T,) false where the token was only read
    starts: tuple[int, ...]  # where each turn of the model's begins
    steps: tuple[Step, ...]
    ended: Ending
    reward: float | None = None  # where the environment says one

    @property
    def last_turn(self) -> IntArray:
        return self.token_ids[self.starts[-1] :]

    def before(self, position: int, token_id: int) -> Before:
        """Return what a branch goes on from: this episode's first `position` tokens, and one other token."""
        turns = bisect.bisect_right(self.starts, position)
        token_ids = np.append(self.token_ids[:position], np.int32(token_id)).astype(np.int32)
        counted = np.append(self.counted[:position], True)
        return Before(token_ids, counted, self.starts[:turns], self.steps[: turns - 1])

    def failed_turns(self) -> list[tuple[int, str, str]]:
        """Return each turn that got no proper answer: its number, from 1, the kind of the answer, and the text."""
        return [
            (number, step.observation.kind, shortened("\n".join(step.observation.texts), FAILED_CHARACTERS))
            for number, step in enumerate(self.steps, 1)
            if step.observation.kind != "answer"
        ]

    def metrics(self) -> dict[str, float]:
        """Return what an iteration shows the means of."""
        kinds = [step.observation.kind for step in self.steps]
        found = {
            "turns": len(self.starts),
            "read_share": 1 - self.counted.mean(),
            "calls": bool(kinds),
            "out_of_turns": self.ended == "turns",
            "out_of_tokens": self.ended == "tokens",
            **{f"{kind}s" if kind == "error" else kind: kind in kinds for kind in ("error", "unreadable", "killed")},
            **({} if self.reward is None else {"reward": self.reward}),
        }
        return {f"environment/{name}": float(value) for name, value in found.items()}


async def play(
    rules: Rules, generate: Generate, act: Act, *, most: int, top_k: int = 0, before: Before = NOTHING_BEFORE
) -> tuple[Generation, Episode]:
    """Play on to the end, in at most `most` tokens of the whole response. Return what is new, and the whole episode.

    Raises what `generate` and `act` raise.
    """
    pieces: list[Generation] = []
    token_ids, starts, steps = before.token_ids, [*before.starts], [*before.steps]

    def ending(ended: Ending) -> tuple[Generation, Episode]:
        new = joined(*pieces) if pieces else read(token_ids[:0])
        if ended == "tokens":
            new = msgspec.structs.replace(new, finish_reason="length")
        counted = np.concatenate([before.counted, counted_tokens(new)])
        return new, Episode(token_ids=token_ids, counted=counted, starts=tuple(starts), steps=tuple(steps), ended=ended)

    while True:
        if not (len(token_ids) > starts[-1] and token_ids[-1] == rules.turn_end):  # a branch's token may end its turn
            pieces.append(await generate(token_ids))
            token_ids = np.concatenate([token_ids, pieces[-1].token_ids], dtype=np.int32)
            if pieces[-1].finish_reason == "length":
                return ending("tokens")
        if token_ids[-1] != rules.turn_end:  # the model ended the conversation
            return ending("answer")
        text = rules.vocabulary.whole_text(token_ids[starts[-1] : -1])
        try:
            calls = () if rules.read_calls is None else tuple(await rules.read_calls(text))
        except ValueError as error:
            action, observation = Action(text=text), Observation(texts=(str(error),), kind="unreadable")
        else:
            if rules.read_calls is not None and not calls:
                return ending("answer")
            action = Action(text=text, calls=calls)
            observation = await act(tuple(steps), action)
        steps.append(Step(action=action, observation=observation))
        if observation.is_done:
            return ending("done")
        if len(starts) >= rules.max_turns:
            return ending("turns")
        bridge = rules.between(rules.shortened(observation.texts))
        if len(token_ids) + len(bridge) >= most:
            return ending("tokens")
        pieces.append(read(bridge, top_k))
        token_ids = np.concatenate([token_ids, bridge], dtype=np.int32)
        starts.append(len(token_ids))
