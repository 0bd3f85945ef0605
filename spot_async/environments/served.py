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
from spot_async.base.tasks import Opened
from spot_async.config import EnvironmentConfig
from spot_async.errors import ConfigError, DeadlineExceededError, PermanentError, TransientError
from spot_async.models.episodes import Action, Observation, Step
from spot_async.types import Problem

WORDS = Words("environment worker", "die while episodes are played", "`environment.workers`")
MAX_REPLY_BYTES = 1 << 22
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
        given = {
            "objects": [settings.object] if isinstance(settings.object, str) else [*settings.object],
            "arguments": settings.arguments,
            "timeout_s": settings.timeout_s,
            "limits": {
                "memory_bytes": settings.memory_limit_bytes,
                "in_namespaces": settings.sandbox == "namespaces",
                "network": settings.network,
            },
        }
        worker = str(Path(__file__).with_name("worker.py"))
        command = (*_SAME, settings.python or sys.executable, worker, json.dumps(given))
        # A pool each, so that an episode's turns find the worker that has played it.
        self._pools = [
            WorkerPool(command, size=1, words=WORDS, max_reply_bytes=MAX_REPLY_BYTES) for _ in range(settings.workers)
        ]

    async def _open(self, stack: AsyncExitStack) -> None:
        """Start the workers, and ask one what the environment is. Raises ConfigError, ProcessDiedError."""
        python = self.settings.python
        if python is not None and shutil.which(python) is None:
            raise ConfigError(f"environment.python={python}: there is no such program")
        for pool in self._pools:
            await stack.enter_async_context(pool)
        deadline = asyncio.get_running_loop().time() + STARTUP_TIMEOUT_S
        about = await self._pools[0].ask({"do": "describe"}, timeout_s=math.inf, deadline=deadline)
        if "refusal" in about:
            raise ConfigError(
                f"this machine allows no user namespaces ({about['refusal']}), so what a model's code does cannot be "
                "shut in: set environment.sandbox=none for tools that run none"
            )
        if "error" in about:
            raise ConfigError(f"environment.object={self._name}: {about['error']}")
        self.reads_text: bool = about["reads_text"]
        self.resets: bool = about["resets"]  # whether it may say something of a problem
        self._tools = [] if self.reads_text else [self._schema(*tool) for tool in about["tools"]]

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools' JSON schemas, as chat templates take them; none if the environment reads text."""
        return self._tools

    async def opening(self, problem: Problem, *, seed: int, deadline: float) -> str:
        """Return what follows the problem's text in its prompt, each time from an episode that has just begun."""
        text: str = (await self._ask("opening", problem, [], seed, deadline))["text"]
        return text

    async def act(
        self, problem: Problem, steps: Sequence[Step], action: Action, *, seed: int, deadline: float
    ) -> Observation:
        """See `protocols.Environment`. A turn that takes too much time or memory is answered as `killed`."""
        reply = await self._ask("act", problem, [*steps], seed, deadline, action)
        try:
            return msgspec.convert(reply["observation"], Observation)
        except msgspec.ValidationError as error:
            raise PermanentError(f"environment.object={self._name}: {error}") from None

    async def reward(self, problem: Problem, steps: Sequence[Step], *, seed: int, deadline: float) -> float | None:
        """See `protocols.Environment`. Where only steps have rewards, it is their sum."""
        worth: float | None = (await self._ask("reward", problem, [*steps], seed, deadline))["reward"]
        given = [step.observation.reward for step in steps if step.observation.reward is not None]
        return sum(given) if worth is None and given else worth

    async def _ask(
        self, do: str, problem: Problem, steps: list[Step], seed: int, deadline: float, action: Action | None = None
    ) -> dict[str, Any]:
        """Ask the worker to which the episode's first turn leads."""
        fields = ("id", "answer", "solution", "tier", "category")
        row = {"problem": problem.text, **{name: getattr(problem, name) for name in fields}}
        request = {"do": do, "row": row, "seed": seed}
        if do != "opening":
            request["steps"] = msgspec.to_builtins(steps)
        if action is not None:
            request["action"] = msgspec.to_builtins(action)
        first = steps[0].action if steps else action
        pool = self._pools[zlib.crc32(msgspec.json.encode([row, seed, first])) % len(self._pools)]
        try:
            reply = await pool.ask(request, timeout_s=math.inf, deadline=deadline)
        except TimeoutError:
            raise DeadlineExceededError(f"environment.object={self._name} did not answer before the deadline") from None
        except WorkerDiedError as died:
            raise TransientError(str(died)) from None
        if "error" in reply:
            kind = TransientError if reply["is_passing"] else PermanentError
            raise kind(f"environment.object={self._name}: {reply['error']}")
        self.replayed_steps += reply.get("replayed_steps", 0)
        return reply

    def _schema(self, name: str, signature: str, documentation: str | None) -> dict[str, Any]:
        """Return a tool's schema as transformers makes it, of a function that looks the same. Raises ConfigError."""
        from transformers.utils import get_json_schema  # which takes seconds

        looks_the_same = {**vars(typing)}  # the tool's own function may be another interpreter's
        try:
            exec(f"def {name}{signature}: ...", looks_the_same)
            looks_the_same[name].__doc__ = documentation
            schema: dict[str, Any] = get_json_schema(looks_the_same[name])
        except Exception as error:  # noqa: BLE001 - of the user's types, or transformers' own
            what = f"has no schema: {error}"
            if missing := re.search(r"no docstring|no description for the argument '(\w+)'", str(error)):
                where = f" for {missing[1]}" if missing[1] else ""
                what = f"has no docstring{where}: describe it (it is shown to the model)"
            raise ConfigError(f"environment.object={self._name}: tool {name} {what}") from None
        return schema
