"""Defines what a check is, and runs many of them. It knows nothing of what is checked.

An unexpected exception from a check counts as the backend's failure, since the backend is third-party code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from spot_async.errors import SpotError
from spot_async.tools.conformance.findings import Finding, NotOffered, Violation
from spot_async.tools.conformance.subject import Subject
from spot_async.types import Capabilities

# A difference up to this many times the tolerance is looked at once more. In float32, rounding alone takes one of some
# 200,000 log-probabilities beyond 2e-5 nats (2.4e-5 is the largest seen), and some checks compare 8,000. A real error
# is far off, or a little off every time.
A_LITTLE = 2.5

Status = Literal["passed", "failed", "not offered", "not checked"]


@dataclass(frozen=True)
class Feature:
    """A part of the contract that a backend may leave out, if its capabilities say so."""

    is_offered: Callable[[Capabilities], bool]
    otherwise: str


@dataclass(frozen=True)
class Check:
    """One clause of the contract. It is left out if a check that it builds on did not pass."""

    name: str
    run: Callable[[Subject], Awaitable[Finding]]
    of: Feature | None = None  # the feature that it checks; None if every backend must have it
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How a check ended: a row of the table."""

    name: str
    status: Status
    note: str
    nats: float | None = None


async def run_checks(
    subject: Subject, checks: Iterable[Check], on_outcome: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run checks in order and return their outcomes; `on_outcome` is called after each."""
    outcomes: dict[str, Outcome] = {}
    for check in checks:
        broken = [
            name for name in check.after if name in outcomes and outcomes[name].status in ("failed", "not checked")
        ]
        if check.of is not None and not check.of.is_offered(subject.capabilities):
            outcome = Outcome(check.name, "not offered", check.of.otherwise)
        elif broken:
            outcome = Outcome(check.name, "not checked", f"builds on {broken[0]}")
        else:
            outcome = await _outcome(check, subject)
        outcomes[check.name] = outcome
        on_outcome(outcome)
    return list(outcomes.values())


async def _outcome(check: Check, subject: Subject) -> Outcome:
    """Run a check, and run it again on new samples if it is only a little beyond the tolerance."""
    outcome = await _run(check, subject)
    nats = outcome.nats
    if outcome.status != "failed" or nats is None or nats > A_LITTLE * subject.tolerance_nats:
        return outcome
    again = await _run(check, subject)
    return replace(again, note=f"{again.note}; up to {nats:.2g} nats off the first time")


async def _run(check: Check, subject: Subject) -> Outcome:
    try:
        finding = await check.run(subject)
    except NotOffered as reason:
        return Outcome(check.name, "not offered", str(reason))
    except Violation as broken:
        return Outcome(check.name, "failed", str(broken), broken.nats)
    except SpotError as error:
        return Outcome(check.name, "failed", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a backend is someone else's program
        return Outcome(check.name, "failed", f"raised {type(error).__name__}, which is none of ours: {error}")
    return Outcome(check.name, "passed", finding.note, finding.nats)
