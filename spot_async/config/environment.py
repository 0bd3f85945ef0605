"""The `environment` section: what answers the student's turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from spot_async.config.base import PositiveFloat, PositiveInt, Section


class EnvironmentConfig(Section):
    """Tools, or a world that reads the text. A Python class or functions of yours, in processes that are shut in."""

    object: str | list[str] = Field(
        description="`module:name` or `FILE.py:name` of a class whose public methods are tools, of one with a method "
        "`step`, or of a function; a list of functions"
    )
    arguments: dict[str, Any] = Field({}, description="what the class is made with")
    columns: list[str] = Field([], description="further columns of the problem files that `reset` gets")
    python: str | None = Field(None, description="interpreter that imports it; default: this program's")
    role: Literal["auto", "tool", "user"] = Field(
        "auto", description="of the messages that show its answers; `auto`: `tool` of tools, `user` of a `step`"
    )
    history: Literal["exact", "kept"] = Field(
        "exact",
        description="`kept` trains on earlier turns as they were sampled, though the chat template would show them "
        "otherwise; `exact` refuses such templates",
    )
    calls: Path | None = Field(
        None,
        description="response template in JSON that reads calls; default: the tokenizer's, or one that is known",
    )
    max_turns: PositiveInt = Field(4, ge=2, description="turns of the model's in one response")
    max_observation_tokens: PositiveInt = Field(
        512, description="tokens of what is answered to a turn; what is longer loses its middle"
    )
    timeout_s: PositiveFloat = Field(10.0, description="longest time of one answer, after which it is ended")
    memory_limit_bytes: PositiveInt = Field(1 << 30, description="memory of one process in an episode")
    workers: PositiveInt = Field(2, description="processes that play episodes, each of them many")
    sandbox: Literal["namespaces", "none"] = Field(
        "namespaces", description="`namespaces` shuts each episode in, against accidents of what a model's code does"
    )
    network: bool = Field(False, description="lets episodes reach the network")
    judge: Literal["verifier", "environment"] = Field(
        "verifier", description="`verifier` judges the last turn; `environment` gives the reward"
    )
    replayable: bool = Field(
        True,
        description="whether an episode that is played again is answered as before; `false` refuses policies that "
        "probe, and resuming is not exact",
    )

    def that_decide(self) -> dict[str, Any]:
        """Return the values on which figures depend, in JSON's types: not how episodes are served."""
        others = {"python", "workers", "timeout_s", "memory_limit_bytes", "sandbox", "replayable"}
        return self.model_dump(mode="json", exclude=others)
