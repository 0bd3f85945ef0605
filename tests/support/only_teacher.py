"""The only teacher of a run or of stages, as `Services` has it."""

from __future__ import annotations

from typing import Any

from spot_async.stages.services import TeacherService
from spot_async.testing.services import SimulatedTeacher
from spot_async.testing.simulation import simulated_turn_ids


def only(server: Any = None, **known: Any) -> dict[str, TeacherService]:
    """Return a server as the only teacher, a simulated one by default. `known` are other fields of it."""
    default = {"server": SimulatedTeacher() if server is None else server, "render_turns": simulated_turn_ids}
    return {"": TeacherService(**{**default, **known})}
