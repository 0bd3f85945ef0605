"""Checks weight updates: what is served afterwards, what happens to responses under way, and what must be refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from spot_async.base.tasks import gather
from spot_async.errors import RequestError, SpotError, ThrottledError, TransientError, VersionMismatchError
from spot_async.testing.conformance.contract import (
    INNER,
    PARITY,
    UPDATES,
    Finding,
    Violation,
    check,
    chosen,
    largest,
    not_offered,
    of_tokens,
    require,
    require_close,
    require_refusal,
    scored,
)
from spot_async.testing.conformance.subject import RESPONSE_TOKENS, Subject
from spot_async.types import Generation, IntArray, WeightVersion

if TYPE_CHECKING:
    from spot_async.testing.conformance.reference import Reference

IN_FLIGHT = 4
MEETINGS = 3
VISIBLE_NATS = 0.01  # weights whose log-probabilities differ by less cannot be told apart


@check(UPDATES, after=[*PARITY, "versions"])
async def test_refused_snapshot(subject: Subject) -> Finding:
    """Broken weights are refused, and the old ones stay served under their own version."""
    from spot_async.testing.conformance.reference import write_broken

    version = _known(subject)
    original = subject.files.directory
    broken = await asyncio.to_thread(write_broken, original, subject.scratch / "broken")
    for what, directory in broken.items():
        snapshot = subject.snapshot(directory, _next(version))
        try:
            await subject.backend.update_weights(snapshot, deadline=subject.deadline())
        except (TransientError, ThrottledError) as error:
            raise Violation(f"weights with {what}: {type(error).__name__}, so they would be sent again") from None
        except SpotError:
            await _serves_only(subject, version, f"after weights with {what} were refused")
        else:
            raise Violation(f"weights with {what} were taken")
    return Finding(f"refused: {', '.join(broken)}; weights {version} serve on")


@check(UPDATES, after=[*PARITY, "versions"])
async def test_weight_update(subject: Subject) -> Finding:
    """After an update, generations, scores and candidates are the new weights', and say so; and back again."""
    old = _known(subject)
    original, changed = subject.files.directory, await _changed(subject)
    prompt, response = subject.prompt(0), subject.tokens(RESPONSE_TOKENS, seed=0)
    before = of_tokens(await subject.exact(prompt, response), response)
    await subject.update(changed, _next(old))
    try:
        moved = largest(before, of_tokens(await subject.exact(prompt, response), response))
        require(moved > VISIBLE_NATS, f"the changed weights differ by {moved:.2g} nats only: use another model")
        nats = await _serves_only(subject, _next(old), "after an update")
        await _refuses_candidates_of(subject, old)
    finally:
        await subject.update(original, _next(_next(old)))
    nats = max(nats, await _serves_only(subject, _next(_next(old)), "after an update back"))
    return Finding(f"{old} to {_next(old)} (log-probabilities move by {moved:.2g} nats) and back", nats)


@check(UPDATES, after=["weight_update"])
async def test_update_under_way(subject: Subject) -> Finding:
    """A response that an update interrupts says which weights each token is of, and its log-probabilities agree."""
    tokens = subject.long_response_tokens
    for _ in range(MEETINGS):  # on a busy machine, an update may come too late to meet a response
        switched, given_up, nats = await _meet(subject, tokens)
        if switched:
            require_close(nats, subject.tolerance_nats, "log-probabilities of tokens before and after the switch")
            return Finding(f"{switched} of {IN_FLIGHT} responses of {tokens} tokens have tokens of both", nats)
    if given_up:
        require(not subject.capabilities.in_flight_updates, "in_flight_updates is said, but responses are given up")
        raise not_offered("responses under way are given up when weights come, to be asked for again")
    raise not_offered(f"responses of {tokens} tokens were over before new weights came")


async def _meet(subject: Subject, tokens: int) -> tuple[int, int, float]:
    """Update while responses are sampled, and put the weights back.

    Return how many have tokens of both weights, how many were given up, and the largest difference to the weights that
    each token says it is of, in nats.
    """
    old = _known(subject)
    new = _next(old)
    changed, before = await _changed(subject), subject.reference
    prompts = [subject.prompt(200 + i) for i in range(IN_FLIGHT)]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(_attempt(subject, prompt, tokens)) for prompt in prompts]
        await subject.generate(prompts[0], max_tokens=1)  # once this is answered, those sent before are under way
        await subject.update(changed, new)
    nats, switched, given_up = 0.0, 0, 0
    rows_of: dict[WeightVersion | None, Reference] = {old: before, new: subject.reference}
    try:
        for prompt, task in zip(prompts, running, strict=True):
            reply = task.result()
            if isinstance(reply, RequestError):
                given_up += 1
                continue
            versions = [span.version for span in reply.version_spans]
            require(
                versions in ([old], [old, new], [new]),
                f"tokens of a response are of {', '.join(map(str, versions))} while {new} replaced {old}",
            )
            switched += len(versions) == 2
            for span in reply.version_spans:
                here = slice(span.start, span.end)
                exact = await rows_of[span.version].logprobs(prompt, reply.token_ids)
                nats = max(nats, largest(reply.logprobs[here], of_tokens(exact, reply.token_ids)[here]))
    finally:
        await subject.update(subject.files.directory, _next(new))
    return switched, given_up, nats


async def _attempt(subject: Subject, prompt: IntArray, tokens: int) -> Generation | RequestError:
    try:
        return await subject.generate(prompt, max_tokens=tokens)
    except TransientError as error:
        return error


async def _changed(subject: Subject) -> Path:
    from spot_async.testing.conformance.reference import write_changed

    target = subject.scratch / "changed"
    if not target.exists():
        await asyncio.to_thread(write_changed, subject.files.directory, target)
    return target


async def _serves_only(subject: Subject, version: WeightVersion, when: str) -> float:
    """Return the largest difference to the reference, in nats. Raises `Violation` for other weights or versions."""
    nats, seen = 0.0, set()
    prompts = [subject.prompt(i) for i in range(4)]
    for prompt, reply in zip(prompts, await gather(subject.generate(prompt) for prompt in prompts), strict=True):
        exact = await subject.exact(prompt, reply.token_ids)
        nats = max(nats, largest(reply.logprobs[INNER], of_tokens(exact, reply.token_ids)[INNER]))
        seen |= {span.version for span in reply.version_spans}
    require(
        seen == {version}, f"{when} tokens say they are of weights {', '.join(sorted(map(str, seen)))}, not {version}"
    )
    if subject.capabilities.max_top_k:
        nats = max(nats, await scored(subject, 9))
    if subject.capabilities.candidate_logprobs != "none":
        nats = max(nats, await chosen(subject, 9))
    require_close(nats, subject.tolerance_nats, f"{when} log-probabilities")
    return nats


async def _refuses_candidates_of(subject: Subject, version: WeightVersion) -> None:
    if subject.capabilities.candidate_logprobs == "none":
        return
    response, at = subject.tokens(4, seed=1), np.array([1], np.int32)
    request = subject.candidates(subject.prompt(0), response, at, response[at][:, None], version=version)
    answered = f"candidates of the replaced weights {version} were answered: raise VersionMismatchError"
    await require_refusal(request, VersionMismatchError, answered)


def _known(subject: Subject) -> WeightVersion:
    """Return the version being served. It is known, since `make_subject` has sent the first weights."""
    assert subject.version is not None
    return subject.version


def _next(version: WeightVersion) -> WeightVersion:
    return WeightVersion(version.lineage, version.step + 1)
