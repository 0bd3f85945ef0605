"""An environment as the stages ask it: by worker processes, each of which plays many episodes (`worker.py`)."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import sys
import typing
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from spot_async.base.processes.worker_pool import STARTUP_TIMEOUT_S, Words, WorkerDiedError, WorkerPool
from spot_async.base.tasks import Opened, gather
from spot_async.base.text import shortened
from spot_async.config import EnvironmentConfig
from spot_async.errors import ConfigError, DeadlineExceededError, PermanentError, TransientError
from spot_async.models.episodes import Action, Observation, Step
from spot_async.types import Problem

WORDS = Words("environment worker", "die while episodes are played", "`environment.workers`")
MAX_REPLY_BYTES = 1 << 22
FIELDS = ("id", "answer", "solution", "tier", "category")  # of a problem, which `reset` may take beside its text
# What depends on the process alone must be the same in all of them, or an episode is not played again as it was.
_SAME = ("env", "PYTHONHASHSEED=0", "OMP_NUM_THREADS=1")


class ServedEnvironment(Opened):
    """Asks workers, which it starts and ends. Implements `protocols.Environment`.

    The steps that it is given must hold the observations as it returned them.
    """

    def __init__(self, settings: EnvironmentConfig) -> None:
        self.settings = settings
        self.replayed_steps = 0  # that were played again, because no worker had their episode
        self._name = settings.object if isinstance(settings.object, str) else ",".join(settings.object)
        worker = str(Path(__file__).with_name("worker.py"))
        command = (*_SAME, settings.python or sys.executable, worker, settings.model_dump_json())
        # A pool each, so that an episode's turns find the worker that has played it.
        self._pools = [
            WorkerPool(command, size=1, words=WORDS, max_reply_bytes=MAX_REPLY_BYTES) for _ in range(settings.workers)
        ]

    async def _open(self, stack: AsyncExitStack) -> None:
        """Start the workers, and ask one what the environment is. Raises ConfigError, ProcessDiedError."""
        python = self.settings.python
        if python is not None and shutil.which(python) is None:
            raise ConfigError(f"environment.python={python}: there is no such program")
        await gather(stack.enter_async_context(pool) for pool in self._pools)
        deadline = asyncio.get_running_loop().time() + STARTUP_TIMEOUT_S
        about = await self._pools[0].ask({}, timeout_s=math.inf, deadline=deadline)
        if "refusal" in about:
            raise ConfigError(
                f"this machine allows no user namespaces ({about['refusal']}), so what a model's code does cannot be "
                "shut in: set environment.sandbox=none for tools that run none"
            )
        if "error" in about:
            raise ConfigError(f"environment.object={self._name}: {_line(about['error'])}")
        self.reads_text: bool = about["reads_text"]
        self.resets: bool = about["resets"]  # whether it may say something of a problem
        self._tools = [self._schema(*tool) for tool in about["tools"]]

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools' JSON schemas, as chat templates take them; none if the environment reads text."""
        return self._tools

    async def opening(self, problem: Problem, *, seed: int, deadline: float) -> str:
        """Return what follows the problem's text in its prompt, each time of an episode that has just begun."""
        opening: str = await self._ask(problem, {"do": "opening", "seed": seed, "steps": []}, deadline, str)
        return opening

    async def act(
        self, problem: Problem, steps: Sequence[Step], action: Action, *, seed: int, deadline: float
    ) -> Observation:
        """See `protocols.Environment`. A turn that takes too much time or memory is answered as `killed`."""
        request = {"do": "act", "seed": seed, "steps": steps, "action": action}
        observation: Observation = await self._ask(problem, request, deadline, Observation)
        return observation

    async def reward(self, problem: Problem, steps: Sequence[Step], *, seed: int, deadline: float) -> float | None:
        """See `protocols.Environment`. Where only steps have rewards, it is their sum."""
        request = {"do": "reward", "seed": seed, "steps": steps}
        worth: float | None = await self._ask(problem, request, deadline, float | None)
        given = [step.observation.reward for step in steps if step.observation.reward is not None]
        return sum(given) if worth is None and given else worth

    async def _ask(self, problem: Problem, request: dict[str, Any], deadline: float, kind: Any) -> Any:
        """Return what the worker answers to which the episode's first turn leads. Raises a `RequestError`."""
        own = {name: getattr(problem, name) for name in FIELDS}
        row = {"problem": problem.text, **own, **problem.columns}
        request = msgspec.to_builtins(request)
        first = request["steps"][0]["action"] if request["steps"] else request.get("action")
        pool = self._pools[zlib.crc32(json.dumps([row, request["seed"], first]).encode()) % len(self._pools)]
        what = f"environment.object={self._name}: {request['do']} of problem {problem.id!r}"
        try:
            reply = await pool.ask({**request, "row": row}, timeout_s=math.inf, deadline=deadline)
            if "error" in reply:
                error = TransientError if reply["is_passing"] else PermanentError
                raise error(f"{what}: {_line(reply['error'])}")
            self.replayed_steps += reply["replayed_steps"]
            return msgspec.convert(reply["answer"], kind)
        except TimeoutError:
            raise DeadlineExceededError(f"{what}: no answer before the deadline") from None
        except WorkerDiedError as died:
            raise TransientError(f"{what}: {died}") from None
        except msgspec.ValidationError as error:  # a model's code may have written it
            raise PermanentError(f"{what}: {error}") from None

    def _schema(self, name: str, signature: str, documentation: str | None) -> dict[str, Any]:
        """Return a tool's schema as transformers makes it, of a function that looks the same. Raises ConfigError."""
        from transformers.utils import get_json_schema  # which takes seconds

        looks_the_same = {**vars(typing)}  # the tool's own function may be another interpreter's
        try:
            exec(f"def {name}{signature}: ...", looks_the_same)
            looks_the_same[name].__doc__ = documentation
            schema: dict[str, Any] = get_json_schema(looks_the_same[name])
        except Exception as error:  # noqa: BLE001 - of the user's types, or transformers' own
            what = f"has no schema: {_line(str(error))}"
            if missing := re.search(r"no docstring|no description for the argument '(\w+)'", str(error)):
                where = f" for {missing[1]}" if missing[1] else ""
                what = f"has no docstring{where}: describe it (it is shown to the model)"
            raise ConfigError(f"environment.object={self._name}: tool {name} {what}") from None
        return schema


def _line(text: str) -> str:
    return shortened(" ".join(text.split()), 500)
