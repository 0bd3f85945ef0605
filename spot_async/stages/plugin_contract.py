"""What policies and verifiers hand over, looked at before the core relies on it.

Plug-ins are other people's code, and their authors meet this first. So what breaks the contract of `protocols.py` is
one line that names the class and what it must do, and so is an exception that a plug-in raises by itself, which stays
its cause, trace and all. What is wrong inside supervision is `trainer/feed_check.py`'s.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from spot_async.base.tasks import error_words, leaves
from spot_async.errors import ConfigError, PluginError, SpotError
from spot_async.protocols import Policy, PromptStages, Verifier
from spot_async.types import PolicyNeeds, Problem, Prompt, Sample, Supervision, Verdict

T = TypeVar("T")


def is_ours(plugin: object) -> bool:
    """Whether its mistakes are bugs of spot-async."""
    return type(plugin).__module__.partition(".")[0] == "spot_async"


def check_policy(policy: Any, kind: str) -> None:
    """Whether it can be one at all. Raises ConfigError."""
    name = f"policy.kind={kind}: {type(policy).__name__}"
    needs = getattr(policy, "needs", None)
    if not isinstance(needs, PolicyNeeds):
        raise ConfigError(f"{name}.needs is {_shown(needs)}: give it a property `needs` that returns PolicyNeeds(...)")
    if not callable(getattr(policy, "supervise", None)):
        raise ConfigError(f"{name} has no method `supervise`: give it `async def supervise(self, prompt, stages)`")


async def supervise(policy: Policy, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
    """What the policy makes of the prompt. Raises PluginError where that is no list of samples, or an exception."""
    name = f"policy {type(policy).__name__}.supervise"
    with _at_fault(policy, name):
        samples = await _awaitable(name, policy.supervise(prompt, stages))
    if not isinstance(samples, Sequence):
        raise PluginError(f"{name} returned {_shown(samples)}; return a list of Samples")
    for sample in samples:
        if not isinstance(sample, Sample):
            raise PluginError(f"{name} returned a list with {_shown(sample)} in it; return a list of Samples")
        if not isinstance(sample.supervision, Supervision | None):
            raise PluginError(
                f"{name} returned a Sample whose supervision is {_shown(sample.supervision)}; give a Supervision, or "
                "None for a trajectory that is not trained on"
            )
    return samples


async def verify(verifier: Verifier, problem: Problem, response_text: str, *, deadline: float) -> Verdict:
    """The verifier's verdict. Raises PluginError where it is none, or an exception that is not TimeoutError."""
    name = f"verifier {type(verifier).__name__}.verify"
    with _at_fault(verifier, name, passes=(TimeoutError,)):
        verdict = await _awaitable(name, verifier.verify(problem, response_text, deadline=deadline))
    if not isinstance(verdict, Verdict):
        raise PluginError(f"{name} returned {_shown(verdict)}; return a Verdict, such as Verdict.CORRECT")
    return verdict


@contextmanager
def _at_fault(plugin: object, name: str, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns what somebody else's plug-in raises into a PluginError; failed requests, and ours, go on as they are."""
    try:
        yield
    except passes:
        raise
    except Exception as error:
        bugs = [leaf for leaf in leaves(error) if not isinstance(leaf, SpotError)]
        if is_ours(plugin) or not bugs:
            raise
        raise PluginError(f"{name} raised {error_words(bugs[0])}{_place(plugin, bugs[0])}") from bugs[0]


def _place(plugin: object, error: BaseException) -> str:
    """Where in the plug-in's own file it was raised, or was called what raised it; empty where no line is of it."""
    try:
        own = inspect.getsourcefile(type(plugin))
    except (OSError, TypeError):  # typed into a prompt, for example
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f", at {own}:{lines[-1]}" if lines else ""


def _awaitable(name: str, returned: Awaitable[T]) -> Awaitable[T]:
    if not inspect.isawaitable(returned):
        raise PluginError(f"{name} returned {_shown(returned)} at once; write it as `async def`")
    return returned


def _shown(value: object) -> str:
    """A value in few words, whatever it holds."""
    return repr(value) if value is None or isinstance(value, bool) else f"a {type(value).__name__}"
