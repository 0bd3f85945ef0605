"""What looks at a run from beside it, put together: the phases it goes through, and what holds it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from spot_async.config import Config
from spot_async.loop.orchestrator import Orchestrator
from spot_async.stages.stage import Stage
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.live_verdict import LiveVerdict, replica_lines, replica_states
from spot_async.telemetry.totals import roles_with_room, stage_slots
from spot_async.watchdog.monitor import Watchdog


class Phases:
    """What the run is at, for the screen and for the watchdog."""

    def __init__(
        self,
        screen: RunConsole,
        watchdog: Watchdog,
        response_judged: Callable[[int, int], None] = lambda finished, total: None,
    ) -> None:
        """`response_judged` is told of each response of an evaluation too."""
        self._screen = screen
        self._watchdog = watchdog
        self._response_judged = response_judged

    def begin(self, name: str, orchestrator: Orchestrator | None = None) -> None:
        self._screen.phase(name, orchestrator)
        self._watchdog.phase_began(name, orchestrator)

    def servers_starting(self, backends: Mapping[str, object]) -> None:
        """Told of the backends, by role, before the first of them is entered."""
        replicas = partial(replica_lines, backends)
        self._screen.servers_starting(replicas)
        self._watchdog.servers_starting(replicas)

    def judged(self, finished: int, total: int) -> None:
        """Told of one more response of an evaluation."""
        self._screen.progress(finished, total)
        self._watchdog.response_judged(finished, total)
        self._response_judged(finished, total)

    def evaluates_with(self, stages: Sequence[Stage[Any]]) -> None:
        self._watchdog.evaluation_began(stages)


def make_live_verdict(
    config: Config, orchestrator: Orchestrator, backends: Mapping[str, object], screen: RunConsole, cores: int | None
) -> LiveVerdict:
    """The live verdict of a run that is about to begin; `backends` by role, `cores` that the run may use."""
    tree = config.model_dump()
    return LiveVerdict(
        orchestrator,
        screen.say,
        every_s=config.run.verdict_every_s,
        batch_size=config.training.batch_size,
        replicas=partial(replica_states, backends),
        slots=partial(stage_slots, tree),
        roles_with_room=roles_with_room(tree, cores),
    )
