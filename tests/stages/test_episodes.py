"""Turns of a model's and what an environment answers, as one response: who wrote what, where it ends, what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from recipes import simulated_recipe

from spot_async.config import SamplingConfig
from spot_async.errors import ContractError
from spot_async.models.episodes import Action, Call, Observation, Step
from spot_async.models.responses import counted_tokens
from spot_async.policies.distill import DistillPolicy
from spot_async.policies.eopd import EopdPolicy
from spot_async.policies.grpo import GrpoPolicy
from spot_async.policies.kd import KdPolicy
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.spot import SpotPolicy
from spot_async.stages.episode import NOTHING_BEFORE, Rules, play
from spot_async.testing import generation, make_policy, make_run, policy_context, simulated_run
from spot_async.testing.environments import SimulatedEnvironment, simulated_environment
from spot_async.testing.services import END_TOKEN, Latency, SimulatedStudent, SimulatedTrainer, rng_of
from spot_async.testing.simulation import simulated_prompts, simulated_vocabulary
from spot_async.testing.virtual_time import run_on_virtual_time
from spot_async.types import Generation, IntArray, Sample, SamplingSettings

VOCABULARY = simulated_vocabulary()
OTHER_END = 0


def rules(**changes: Any) -> Rules:
    def between(texts: Sequence[str]) -> IntArray:
        return np.array([50, *(int(each) for text in texts for each in text.split()), 51], np.int32)

    return Rules(**{"vocabulary": VOCABULARY, "turn_end": END_TOKEN, "between": between, **changes})


class Script:
    """A model that says its turns one after the other, and an environment that counts its answers up from 40."""

    def __init__(self, *turns: Sequence[int], answers: Sequence[Observation] = (), most: int = 100) -> None:
        self.turns, self.answers, self.most = list(turns), list(answers), most
        self.seen: list[list[int]] = []  # before each turn
        self.told: list[tuple[int, Action]] = []  # how many steps stood before each action

    async def generate(self, before: IntArray) -> Generation:
        self.seen.append(before.tolist())
        room = self.most - len(before)
        turn = self.turns.pop(0)[: max(0, room)]
        return generation(turn, finish_reason="stop" if turn and turn[-1] in (END_TOKEN, OTHER_END) else "length")

    async def act(self, steps: Sequence[Step], action: Action) -> Observation:
        self.told.append((len(steps), action))
        return self.answers.pop(0) if self.answers else Observation(texts=(str(40 + len(self.told)),))

    def play(self, before: Any = NOTHING_BEFORE, **changes: Any) -> tuple[Generation, Any]:
        return asyncio.run(play(rules(**changes), self.generate, self.act, most=self.most, before=before))


async def called(text: str) -> Sequence[Call]:
    """Read a turn of numbers: one that begins with 7 cannot be read, and each 9 is a call."""
    if text.startswith("7"):
        raise ValueError("17 71")
    return [Call("nine", {"at": at}) for at, word in enumerate(text.split()) if word == "9"]


E = END_TOKEN


@pytest.mark.parametrize(
    ("turns", "changes", "expected", "ended"),
    [
        ([[5, E], [6, E]], {"max_turns": 2}, [5, E, 50, 41, 51, 6, E], "turns"),
        ([[5, OTHER_END]], {}, [5, OTHER_END], "answer"),
        ([[5, E], [6, OTHER_END]], {}, [5, E, 50, 41, 51, 6, OTHER_END], "answer"),
        ([[5, E]], {"most": 5}, [5, E], "tokens"),  # no room for a bridge and a token behind it
        ([[5, E], [6, 6, 6]], {"most": 7}, [5, E, 50, 41, 51, 6, 6], "tokens"),
        ([[9, E], [5, E]], {"read_calls": called}, [9, E, 50, 41, 51, 5, E], "answer"),  # the second made no call
        ([[9, E], [5, E]], {"answers": [Observation(texts=("8",), is_done=True)]}, [9, E], "done"),
    ],
)
def test_an_episode_ends_where_no_turn_can_follow(
    turns: list[list[int]], changes: dict[str, Any], expected: list[int], ended: str
) -> None:
    script = Script(*turns, **{name: changes.pop(name) for name in ("most", "answers") if name in changes})
    new, episode = script.play(**changes)
    assert (new.token_ids.tolist(), episode.ended) == (expected, ended)
    assert new.finish_reason == ("length" if ended == "tokens" else "stop")
    read = [t for t in range(len(expected)) if expected[t] in (41, 50, 51)]
    assert np.flatnonzero(~counted_tokens(new)).tolist() == read
    assert episode.last_turn.tolist() == expected[max([0, *(t + 1 for t in read)]) :]


def test_what_cannot_be_read_is_an_observation_that_the_environment_does_not_make() -> None:
    script = Script([7, E], [9, 9, E], [5, E])
    new, episode = script.play(read_calls=called, between=lambda texts: np.full(len(texts), 50, np.int32))
    assert new.token_ids.tolist() == [7, E, 50, 9, 9, E, 50, 5, E]
    assert [step.observation.kind for step in episode.steps] == ["unreadable", "answer"]
    assert episode.steps[0].observation.texts == ("17 71",)
    ((before, action),) = script.told
    assert (before, [call.arguments["at"] for call in action.calls]) == (1, [0, 1])
    assert episode.metrics()["environment/unreadable"] == 1
    assert episode.failed_turns() == [(1, "unreadable", "17 71")]


def test_an_answer_is_cut_in_the_middle() -> None:
    made = rules(max_observation_tokens=4)
    assert made.shortened(["11 12 13 14"]) == ("11 12 13 14",)
    assert made.shortened(["11 12 13 14 15"]) == ("11 12\n[... 1 tokens left out ...]\n14 15",)
    assert made.shortened(["11 12 13 14 15", "2"])[0].startswith("11\n[... 3 tokens")


def test_playing_on_from_anywhere_is_playing_from_there() -> None:
    """A branch that takes the token which was there already ends as the episode did."""
    turns = [[9, 3, E], [9, E], [4, 5, E]]
    whole, episode = Script(*turns).play(max_turns=3)
    for position in np.flatnonzero(counted_tokens(whole)).tolist():
        before = episode.before(position, int(whole.token_ids[position]))
        turn = np.searchsorted(episode.starts, position, side="right") - 1
        done = position + 1 - episode.starts[turn]
        rest = [turns[turn][done:], *turns[turn + 1 :]]
        script = Script(*(each for each in rest if each))
        script.told = [(0, Action(text=""))] * int(turn)  # so that it counts on
        new, again = script.play(before, max_turns=3)
        assert [*before.token_ids, *new.token_ids] == whole.token_ids.tolist()
        assert (again.starts, again.steps, again.ended) == (episode.starts, episode.steps, episode.ended)
        assert (again.counted == episode.counted).all()


POLICIES: dict[str, Callable[[], Any]] = {
    "opd": lambda: make_policy(OpdPolicy),
    "grpo": lambda: make_policy(GrpoPolicy, policy_context(reference_kl=True), samples=4),
    "eopd": lambda: make_policy(EopdPolicy, top_k=8),
    "spot": lambda: make_policy(SpotPolicy, positions=2, probe_top_k=2, score_top_k=8),
    "distill, teacher's rows": lambda: make_policy(DistillPolicy, top_k=8, divergence="reverse_kl"),
    "distill, student's rows": lambda: make_policy(DistillPolicy, support="student", top_k=8, divergence="reverse_kl"),
    "kd": lambda: make_policy(KdPolicy),  # whose third iteration is a second epoch
    "kd, tokens alone": lambda: make_policy(KdPolicy, forward_kl_weight=0),
    "gkd": lambda: simulated_recipe("gkd"),
    "distillm_2": lambda: simulated_recipe("distillm_2"),
    "sg_opd": lambda: simulated_recipe("sg_opd"),
    "rethinking_opd": lambda: simulated_recipe("rethinking_opd"),
    "scope": lambda: simulated_recipe("scope"),
    "tip": lambda: simulated_recipe("tip"),
}


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_every_method_learns_from_episodes_as_it_is(name: str, max_staleness: int) -> None:
    def run() -> list[Sample]:
        environment = simulated_environment(VOCABULARY)
        made = simulated_run(
            POLICIES[name](), max_staleness=max_staleness, iterations=3, environments={"": environment}
        )
        return made.samples

    samples = run()
    trained = [each.supervision for each in samples if each.supervision is not None]
    several = [each for each in trained if not counted_tokens(each).all()]
    assert len(several) > len(trained) / 2
    for each in several:
        counted = counted_tokens(each)
        assert each.policy_mask is not None
        assert not each.policy_mask[~counted].any()
        for targets in each.soft_targets:
            assert counted[targets.positions].all()
    assert {"turns", "ended"} <= samples[0].record.keys()
    assert {turn[:2] for each in samples for turn in each.record["failed_turns"]} == {(2, "error")}
    assert np.mean([each.metrics["environment/turns"] for each in samples]) > 1.5
    again = [each.supervision.response_ids.tolist() for each in run() if each.supervision is not None]
    assert again == [each.response_ids.tolist() for each in trained]
    if name == "spot":
        assert sum(len(each.soft_targets) for each in trained) > 0


class Long(SimulatedStudent):
    """Says `parts` turns' worth at once. Where it `waits`, it gives replies as late as the protocol allows: those of a
    session that were asked for together come together."""

    def __init__(self, parts: int, *, waits: bool) -> None:
        super().__init__(latency=Latency(per_token_s=0.02, spread=0.0), mean_tokens=30)
        self.parts, self.waits = parts, waits
        self.asked: dict[str | None, list[asyncio.Task[Generation]]] = {}  # at this moment, by session

    async def generate(
        self, prompt_ids: IntArray, sampling: SamplingSettings, *, session: str | None = None, **others: Any
    ) -> Generation:
        if not self.waits:
            return await self._said(sampling)
        together = self.asked.setdefault(session, [])
        own = asyncio.create_task(self._said(sampling))
        together.append(own)
        await asyncio.sleep(0)
        self.asked.pop(session, None)
        await asyncio.wait(together)
        return own.result()

    async def _said(self, sampling: SamplingSettings) -> Generation:
        version, rng = self.version, rng_of(sampling.seed, self.version.step)
        tokens = int(rng.geometric(1 / self.mean_tokens, self.parts).sum())
        await self._work(tokens, rng)
        return generation([*rng.integers(2, 50, tokens), END_TOKEN], -rng.random(tokens + 1), version=version)


class Endless(SimulatedEnvironment):
    """Never says that an episode is done."""

    async def act(self, *given: Any, **others: Any) -> Observation:
        return msgspec.structs.replace(await super().act(*given, **others), is_done=False)


@pytest.mark.parametrize(("n", "max_staleness"), [(1, 2), (4, 2), (4, 0)])
def test_no_turn_waits_for_the_longest_response(n: int, max_staleness: int) -> None:
    """... whatever student it is: one turn of as many tokens is not much faster where no reply waits for another."""

    def seconds_and_tokens(turns: int) -> tuple[float, int]:
        async def timed() -> tuple[float, int]:
            played = simulated_environment(VOCABULARY, max_turns=turns) if turns > 1 else None
            run = make_run(
                make_policy(GrpoPolicy, samples=n) if n > 1 else make_policy(OpdPolicy),
                student=Long(4 // turns, waits=turns > 1),
                environments={"": replace(played, server=Endless())} if played else {},
                sampling=SamplingConfig(max_response_tokens=2000),
                trainer=SimulatedTrainer(step_s=0.1),
                **{"batch_size": 64, "iterations": 3, "max_staleness": max_staleness},
            )
            await run.orchestrator.run()
            tokens = sum(int(counted_tokens(each).sum()) for each in run.trained)
            return asyncio.get_running_loop().time(), tokens

        return run_on_virtual_time(timed())

    (alone_s, alone), (turns_s, tokens) = seconds_and_tokens(1), seconds_and_tokens(4)
    assert tokens == pytest.approx(alone, rel=0.1)
    assert turns_s < 1.3 * alone_s


async def test_a_prefix_has_no_place_in_an_episode() -> None:
    run = make_run(make_policy(OpdPolicy), environments={"": simulated_environment(VOCABULARY)})
    with pytest.raises(ContractError, match="continues a prefix, and nobody knows which turn"):
        await run.stages.for_prompt(next(simulated_prompts())).rollout(prefix_ids=[5])
    with pytest.raises(ContractError, match="continues a prefix, and nobody knows which turn"):
        await run.stages.for_prompt(next(simulated_prompts())).teacher_response(prefix_ids=[5])


def test_sets_share_the_limit_of_their_environment() -> None:
    """Of several, each has requests of its own, which are named by the first of its sets."""
    one, other = (simulated_environment(VOCABULARY) for _ in range(2))
    of_set = ["", "a", "b", "c"]
    prompts = [
        msgspec.structs.replace(each, problem=msgspec.structs.replace(each.problem, set_key=of_set[each.ordinal % 4]))
        for each in simulated_prompts(64)
    ]
    run = simulated_run(
        make_policy(OpdPolicy), prompts=prompts, iterations=1, environments={"a": one, "b": one, "c": other}
    )
    assert [each.name for each in run.stages.all if each.name.startswith("env")] == ["environment.a", "environment.c"]
    turns = {n % 4: "turns" in each.record for n, each in enumerate(run.samples)}
    assert turns == {0: False, 1: True, 2: True, 3: True}
    assert run.stages.environments["a"] is run.stages.environments["b"]
