"""Asks policies and verifiers, and checks what they return before the core relies on it.

Plug-ins are other people's code, and their authors see these errors first. So each breach of `protocols.py` is one line
that names the class and says what it must do. An exception that a plug-in raises by itself becomes such a line too, and
stays its cause. What is inside supervision is checked by `trainer/feed_check.py`.
"""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from spot_async.base.retry import VERIFY_ATTEMPTS
from spot_async.base.tasks import error_words, in_thread, in_time, leaves
from spot_async.base.waiting_room import Priority
from spot_async.base.wire import ARRAY_DTYPES
from spot_async.errors import (
    ConfigError,
    ContractError,
    DeadlineExceededError,
    PluginError,
    PoisonedReplyError,
    SpotError,
)
from spot_async.protocols import Observer, Policy, PromptStages, Reviser, Verifier
from spot_async.stages.stage import Stage
from spot_async.trainer.feed_check import teacher_versions
from spot_async.types import (
    IterationReport,
    Judgement,
    LiveBatch,
    PolicyNeeds,
    Problem,
    Prompt,
    Pull,
    Sample,
    SoftTargets,
    Supervision,
    Verdict,
)

T = TypeVar("T")
LATE = Judgement(Verdict.TIMEOUT)
OBSERVING = ("observe", "state_dict", "load_state_dict")


def is_ours(plugin: object) -> bool:
    """Return whether a plug-in is part of spot-async, so that its mistakes are bugs of ours."""
    return type(plugin).__module__.partition(".")[0] == "spot_async"


def check_policy(policy: Any, kind: str) -> None:
    """Raise ConfigError unless a policy has `needs` and a method `supervise`, and what it may have is as it must be."""
    name = f"policy.kind={kind}: {type(policy).__name__}"
    needs = getattr(policy, "needs", None)
    if not isinstance(needs, PolicyNeeds):
        raise ConfigError(f"{name}.needs is {_shown(needs)}: give it a property `needs` that returns PolicyNeeds(...)")
    if not callable(getattr(policy, "supervise", None)):
        raise ConfigError(f"{name} has no method `supervise`: give it `async def supervise(self, prompt, stages)`")
    for method in ("revise", *OBSERVING):
        if inspect.iscoroutinefunction(getattr(policy, method, None)):
            raise ConfigError(f"{name}.{method} is a coroutine; it asks no server: write it as `def`")
    lacking = [method for method in OBSERVING if not callable(getattr(policy, method, None))]
    if hasattr(policy, "observe") and lacking:
        raise ConfigError(f"{name} has `observe` and no `{lacking[0]}`: a run that goes on needs its state")
    state_of(policy)


async def supervise(policy: Policy, prompt: Prompt, stages: PromptStages) -> Sequence[Sample]:
    """Return the samples that the policy makes of the prompt. Failed requests are raised as they are.

    Raise PluginError if the policy asks for more than its needs state, returns anything but a list of samples, or
    raises an exception by itself.
    """
    name = f"policy {type(policy).__name__}.supervise"
    try:
        samples = await _awaitable(name, policy.supervise(prompt, stages))
    except Exception as error:
        for leaf in leaves(error):
            if isinstance(leaf, ContractError):
                raise PluginError(f"{name}: {leaf}{_place(policy, leaf)}") from leaf
        _check_fault(policy, name, error)
        raise
    if not isinstance(samples, Sequence):
        raise PluginError(f"{name} returned {_shown(samples)}; return a list of Samples")
    for sample in samples:
        if not isinstance(sample, Sample):
            raise PluginError(f"{name} returned a list with {_shown(sample)} in it; return a list of Samples")
        _check_supervision(name, sample.supervision)
        for key, note in sample.notes.items():
            if not isinstance(note, np.ndarray) or note.dtype.str not in ARRAY_DTYPES:
                raise PluginError(f"{name}: notes[{key!r}] is {_shown(note)}; give an array of int32, float32 or bool")
    return samples


def revise(policy: Reviser, batch: LiveBatch) -> Sequence[Sample]:
    """Return the batch's samples with the terms that the policy gives them now.

    Raise PluginError if it returns others, changes more than their terms, or raises an exception by itself.
    """
    name = f"policy {type(policy).__name__}.revise"
    drafts = (
        *(sample.supervision for sample in batch.samples),
        *(tuple(sample.notes.values()) for sample in batch.samples),
    )
    for each in arrays((*drafts, *batch.live)):
        each.setflags(write=False)  # the ledger has the drafts, which a resumed run revises again
    samples = called(policy, "revise", batch)
    count = len(batch.samples)
    if not isinstance(samples, Sequence) or len(samples) != count:
        returned = f"{len(samples)} samples" if isinstance(samples, Sequence) else _shown(samples)
        raise PluginError(f"{name} returned {returned}; return the batch's {count} samples in order")
    for draft, sample in zip(batch.samples, samples, strict=True):
        if not isinstance(sample, Sample):
            raise PluginError(f"{name} returned a list with {_shown(sample)} in it; return a list of Samples")
        _check_supervision(name, sample.supervision)
        if draft.supervision is not None and sample.supervision is not None:
            _check_revision(name, draft.supervision, sample.supervision)
    return samples


def observe(policy: Observer, report: IterationReport) -> None:
    """Tell a policy of an iteration. Raise PluginError if it raises an exception by itself."""
    called(policy, "observe", report)


def state_of(policy: object) -> bytes | None:
    """Return what a policy keeps, as JSON; None for one that does not observe.

    Raise PluginError for what JSON would not give back as it is, such as a tensor, a tuple or a number as a key.
    """
    if not isinstance(policy, Observer):
        return None
    state = called(policy, "state_dict")
    try:
        kept = json.dumps(state, allow_nan=False)
        if isinstance(state, dict) and json.loads(kept) == state:
            return kept.encode()
        why = " (without tuples, and with texts as keys)" if isinstance(state, dict) else ""
    except (TypeError, ValueError) as error:
        why = f" ({error})"
    name = f"policy {type(policy).__name__}.state_dict"
    raise PluginError(f"{name} returned {_shown(state)}; give plain JSON values, in a dict{why}")


REVISED = {"pulls", "advantages", "policy_mask", "soft_targets", "entropy_bonus"}  # fields of `Supervision`


def _check_revision(name: str, draft: Supervision, found: Supervision) -> None:
    changed = [
        field
        for field in Supervision.__struct_fields__
        if field not in REVISED and not _are_equal(getattr(draft, field), getattr(found, field))
    ]
    if changed:
        raise PluginError(
            f"{name} changed {changed[0]} of {draft.problem_id}; change terms alone, and return samples in their order"
        )
    if not teacher_versions(found) <= teacher_versions(draft):
        raise PluginError(f"{name} gave {draft.problem_id} a term of other weights of a teacher that follows")


def arrays(value: object) -> Iterator[npt.NDArray[Any]]:
    """Yield the arrays in records and tuples of them."""
    match value:
        case np.ndarray():
            yield value
        case tuple():
            for each in value:
                yield from arrays(each)
        case msgspec.Struct():
            for name in value.__struct_fields__:
                yield from arrays(getattr(value, name))


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    return type(one) is type(other) and not isinstance(one, np.ndarray) and bool(one == other)


def _check_supervision(name: str, supervision: object) -> None:
    if not isinstance(supervision, Supervision | None):
        raise PluginError(
            f"{name} returned a Sample whose supervision is {_shown(supervision)}; give a Supervision, or "
            "None for a trajectory that is not trained on"
        )
    for field, kind in (("pulls", Pull), ("soft_targets", SoftTargets)):
        terms = getattr(supervision, field, ())
        if not isinstance(terms, tuple) or not all(isinstance(each, kind) for each in terms):
            raise PluginError(
                f"{name}: {field} is {_shown(terms)}; give a tuple of {kind.__name__}, also of one: (term,)"
            )


async def verify(verifier: Verifier, problem: Problem, response_text: str, *, deadline: float) -> Judgement:
    """Return the verifier's judgement. A TimeoutError or a failed request is raised as it is.

    Raise PluginError if the verifier returns anything but a verdict or a judgement, or raises another exception.
    """
    name = f"verifier {type(verifier).__name__}.verify"
    try:
        judged = await _awaitable(name, verifier.verify(problem, response_text, deadline=deadline))
    except TimeoutError:
        raise
    except Exception as error:
        _check_fault(verifier, name, error)
        raise
    if isinstance(judged, Judgement):
        return judged
    if not isinstance(judged, Verdict):
        raise PluginError(
            f"{name} returned {_shown(judged)}; return a Verdict, such as Verdict.CORRECT, or a Judgement"
        )
    return Judgement(judged)


async def ask_judgement(stage: Stage[Verifier], priority: Priority, problem: Problem, response_text: str) -> Judgement:
    """Return a judgement. A missing verdict is asked for once more. When the deadline passes, it counts as missing.

    So does one that cannot be read.
    """
    judgement = LATE
    for _ in range(VERIFY_ATTEMPTS):
        try:
            judgement = await stage.ask(
                priority,
                lambda verifier, deadline: verify(verifier, problem, response_text, deadline=deadline),
                kind=problem.set_key,
            )
        except DeadlineExceededError:
            judgement = LATE
        except PoisonedReplyError:  # a server that judges said what is no judgement, and was asked again
            return Judgement(Verdict.ERROR)
        else:
            if not judgement.verdict.is_missing:
                return judgement
            stage.note_missing(f"verdict {judgement.verdict}")
    return judgement


async def computed(timeout_s: float, hook: Callable[..., T], policy: object, *given: Any) -> T:
    """Do as `bounded`, beside the loop."""
    return await in_thread(bounded, timeout_s, hook, policy, *given)


def bounded(timeout_s: float, hook: Callable[..., T], policy: object, *given: Any) -> T:
    """Return what a hook of a policy returns.

    Raise PluginError if it takes longer than `timeout_s`. Nothing can end it then, and it does not keep the process.
    """
    done: Future[T] = Future()

    def work() -> bool:
        try:
            done.set_result(hook(policy, *given))
        except Exception as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)
        return True

    if not in_time(work, timeout_s):
        name = f"policy {type(policy).__name__}.{hook.__name__}"
        raise PluginError(f"{name} took longer than training.step_timeout_s={timeout_s:g}: raise that, or do less")
    return done.result()


def called(policy: Any, method: str, *given: Any) -> Any:
    """Return what a method that asks nobody returns. Raise PluginError if it raises an exception by itself."""
    try:
        return getattr(policy, method)(*given)
    except Exception as error:
        _check_fault(policy, f"policy {type(policy).__name__}.{method}", error)
        raise


def _check_fault(plugin: object, name: str, error: Exception) -> None:
    """Raise PluginError if a plug-in of somebody else raised this error by itself, so that no request failed."""
    bugs = [leaf for leaf in leaves(error) if not isinstance(leaf, SpotError)]
    if bugs and not is_ours(plugin):
        raise PluginError(f"{name} raised {error_words(bugs[0])}{_place(plugin, bugs[0])}") from bugs[0]


def _place(plugin: object, error: BaseException) -> str:
    """Return the last line of the plug-in's own file in the trace, in words; empty where the trace has none."""
    try:
        own = inspect.getsourcefile(type(plugin))
    except (OSError, TypeError):  # a class that was typed at a prompt has no file
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own]
    return f", at {own}:{lines[-1]}" if lines else ""


def _awaitable(name: str, returned: Awaitable[T]) -> Awaitable[T]:
    if not inspect.isawaitable(returned):
        raise PluginError(f"{name} returned {_shown(returned)} at once; write it as `async def`")
    return returned


def _shown(value: object) -> str:
    """Return a value in few words, whatever it holds."""
    return repr(value) if value is None or isinstance(value, bool) else f"a {type(value).__name__}"
