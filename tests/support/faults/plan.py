"""Plans what goes wrong in a simulated run: with servers, replies, weight updates, the trainer and the verifier.

Every fault has a seed of its own. So the others stay as they are when one is left out, and a failing run can be
shrunk to the faults that matter.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from faults.environment import AnswerFault, FaultyEnvironment
from faults.servers import ReplyFault, SimulatedServer, UpdateFault
from faults.stateful_trainer import StatefulTrainer, TrainerFault
from spot_async.base.seeds import derive_seed
from spot_async.errors import SpotError
from spot_async.testing.services import SimulatedVerifier
from spot_async.types import Problem, Verdict

MEAN_S = 20.0  # after the start of a run
MOST_FAULTS = 6  # of a run
FOREIGN_WEIGHTS = "foreign"  # what a server holds that somebody else has started again


class FaultyVerifier(SimulatedVerifier):
    """A verifier whose next verdicts are that it reached none."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: deque[Verdict] = deque()

    async def verify(self, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
        verdict = await super().verify(problem, response_text, deadline=deadline)
        return self.faults.popleft() if self.faults else verdict


@dataclass
class Scene:
    """What faults can strike, and what those that struck did."""

    students: Sequence[SimulatedServer]
    teachers: Sequence[SimulatedServer]
    trainer: StatefulTrainer
    verifier: FaultyVerifier
    teachers_follow: bool = False  # so they get weights too
    environment: FaultyEnvironment | None = None  # which the student takes turns with
    interrupt: Callable[[], object] = lambda: None  # as a person would
    struck: dict[Fault, str] = field(default_factory=dict)

    @property
    def servers(self) -> Sequence[SimulatedServer]:
        return [*self.students, *self.teachers]


# Strikes, and says what it does first.
Strike = Callable[[Scene, random.Random, Callable[[str], None]], Awaitable[None]]


async def _kill(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    server = rng.choice(scene.servers)
    say(f"{server.name} is killed")
    server.kill()


async def _freeze(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    server, seconds = rng.choice(scene.servers), rng.choice([1.0, 8.0, 15.0, 40.0, 200.0])
    if server.is_running:
        say(f"{server.name} is frozen for {seconds:g} s")
        server.freeze()
        await asyncio.sleep(seconds)
        server.thaw()


async def _storm(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    server, most, seconds = rng.choice(scene.servers), rng.choice([0, 1, 3]), rng.choice([2.0, 10.0, 30.0])
    say(f"{server.name} takes {most} requests for {seconds:g} s")
    server.most_in_flight = most
    await asyncio.sleep(seconds)
    server.most_in_flight = None


async def _reply(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    kind: ReplyFault = rng.choice(get_args(ReplyFault))
    server, times = rng.choice(scene.servers), rng.choice([1, 1, 2, 6])
    say(f"{times} replies of {server.name}: {kind}")
    server.reply_faults.extend([kind] * times)


async def _update(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    kind: UpdateFault = rng.choice(get_args(UpdateFault))
    updated = [*scene.students, *(scene.teachers if scene.teachers_follow else ())]
    servers = updated if rng.random() < 0.3 else [rng.choice(updated)]
    times = rng.choice([1, 1, 2])
    say(f"{times} updates of {', '.join(each.name for each in servers)}: {kind}")
    for server in servers:
        server.update_faults.extend([kind] * times)


async def _verdict(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    kind, times = rng.choice([Verdict.TIMEOUT, Verdict.ERROR]), rng.choice([1, 2, 60])
    say(f"{times} verdicts: {kind}")
    scene.verifier.faults.extend([kind] * times)


async def _step(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    kind: TrainerFault = rng.choices(get_args(TrainerFault), [1, 1, 6])[0]
    say(f"the next step: {kind}")
    scene.trainer.faults.append(kind)


async def _answer(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    kind: AnswerFault = rng.choice(get_args(AnswerFault))
    times = rng.choice([1, 2, 6, 60])
    say(f"{times} answers: the environment {kind}")
    assert scene.environment is not None
    scene.environment.faults.extend([kind] * times)


async def _budget(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    say("the budget for the teacher is spent")
    for server in scene.teachers:
        server.is_unpaid = True


async def _interrupt(scene: Scene, rng: random.Random, say: Callable[[str], None]) -> None:
    say("the run is interrupted")
    scene.interrupt()


SHARES: dict[Strike, float] = {
    _kill: 3,
    _freeze: 3,
    _storm: 2,
    _reply: 5,
    _update: 4,
    _verdict: 2,
    _step: 1.3,
    _budget: 0.5,
    _interrupt: 0.5,
}
# By what a fault does, the errors with which a run may then end early: patterns of both.
MAY_END = {
    r".*(killed|frozen|takes|replies)": "SpotError: 3 prompts in a row went unanswered",
    r".*answers: ": "SpotError: 3 prompts in a row went unanswered",
    r".*updates .*: hangs": "DeadlineExceededError",
    r".*updates .*: refused": "TransientError",
    r"the next step: disk full": "TrainerError: cannot publish",
    r"the next step: killed": "TrainerError: trainer was killed",
}


# The errors for which a prompt may be given up then. New weights are no reason.
MAY_KILL = {
    r".*(killed|frozen|: dies)": "PermanentError: .* times a server ended or froze|(DeadlineExceeded|Transient)Error",
    r".*takes": "(DeadlineExceeded|Throttled)Error",
    r".*replies .*: bad request": "PermanentError: .*HTTP 400",
    r".*replies .*: nonsense": "PoisonedReplyError",
    r".*replies .*: (server error|reset|cut off)": "TransientError",
    r".*replies .*: (never|late|throttled)": "DeadlineExceededError",
    r".*answers: .*(dies|is not heard)": "TransientError: the environment",
    r".*answers: .*hangs": "DeadlineExceededError: environment",
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, as its seed decides. `number` is its place in the plan of its run."""

    number: int
    seed: int

    async def strike(self, scene: Scene) -> None:
        """Wait for its time, and do what it does."""
        rng = random.Random(self.seed)
        strike = self._choose(rng)
        await asyncio.sleep(rng.expovariate(1.0 / MEAN_S))
        began_s = asyncio.get_running_loop().time()

        def say(what: str) -> None:
            scene.struck[self] = f"{what} (fault {self.number}, at {began_s:.1f} s)"

        await strike(scene, rng, say)

    def _choose(self, rng: random.Random) -> Strike:
        (strike,) = rng.choices([*SHARES], [*SHARES.values()])
        return strike


class AnswersFault(Fault):
    """One thing that goes wrong with the environment."""

    def _choose(self, rng: random.Random) -> Strike:
        return _answer


def explained(error: SpotError, struck: Iterable[str], by: Mapping[str, str]) -> bool:
    """Return whether this error may come of what struck, by one of these pairs of patterns."""
    words = f"{type(error).__name__}: {error}"
    return any(re.match(what, each) and re.match(pattern, words) for each in struck for what, pattern in by.items())


def planned_faults(seed: int, most: int = MOST_FAULTS) -> list[Fault]:
    """Return the faults of a run's seed."""
    number = random.Random(derive_seed(seed, "faults")).randint(0, most)
    return [Fault(i, derive_seed(seed, "fault", i)) for i in range(number)]


def planned_answers(seed: int, most: int = MOST_FAULTS) -> list[Fault]:
    """Return the faults of a run that plays episodes: at least one of its environment, in half of the runs no other."""
    others = planned_faults(seed, most) if seed % 2 else []
    number = random.Random(derive_seed(seed, "answers")).randint(1, max(1, most))
    return others + [AnswersFault(len(others) + i, derive_seed(seed, "answer", i)) for i in range(number)]


async def kept_running(server: SimulatedServer, rng: random.Random) -> None:
    """Start a server again whenever it has ended, as somebody else would, with weights that are not the run's."""
    while True:
        await server.ended.wait()
        await asyncio.sleep(rng.choice([0.0, 5.0, 30.0, 100.0]))
        await server.start(FOREIGN_WEIGHTS)
