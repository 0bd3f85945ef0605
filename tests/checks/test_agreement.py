"""`agreement` of a role's servers, which are tables of numbers here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from spot_async.checks.agreement import agreement
from spot_async.checks.questions import Asked
from spot_async.errors import TransientError
from spot_async.testing.services import capabilities, token_scores
from spot_async.types import ScoreRequest, TokenScores, WeightVersion

V0 = WeightVersion(0, 0)
SAID = capabilities(
    9,
    model="m",
    vocab_fingerprint="v",
    exact_entropy=False,
    candidate_logprobs="none",
    generation=False,
    logprob_noise_nats=0.01,
    dtype="float32",
)
IDS = np.arange(4, dtype=np.int32)
ASKED = Asked([IDS, IDS], [IDS, IDS], ())


class Server:
    """Scores with fixed numbers, moved by some nats; `unknown` positions hold nonsense."""

    def __init__(
        self, nats: float = 0.0, *, unknown: int | None = None, change: Callable[[Any], Any] = lambda rows: rows
    ) -> None:
        self.nats, self.unknown, self.change = nats, unknown, change

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        rows = -np.arange(1.0, 5.0, dtype=np.float32) - np.float32(self.nats)
        valid = None
        if self.unknown is not None:
            valid = np.arange(4) != self.unknown
            rows[self.unknown] = -99.0
        values = self.change(np.repeat(rows[:, None], 1 + top_k, 1)).astype(np.float32)
        top = values[:, 1:]
        return token_scores(values[:, 0], topk_ids=np.zeros_like(top), topk_logprobs=top, valid=valid)


@pytest.mark.parametrize(
    ("nats", "refused", "warned", "noise"),
    [(0.0, 0, 0, 0.01), (0.004, 0, 0, 0.01), (0.02, 0, 0, 0.04), (0.2, 0, 1, 0.4), (3.0, 1, 0, 6.0)],
)
async def test_what_lies_between_servers_counts_as_noise_until_it_is_too_much(
    nats: float, refused: int, warned: int, noise: float
) -> None:
    servers = {"teacher-1": Server(), "teacher-2": Server(), "teacher-3": Server(nats)}
    found = await agreement("teacher", servers, dict.fromkeys(servers, SAID), ASKED)
    assert (len(found.refusals), len(found.warnings)) == (refused, warned)
    assert all("teacher.backend: teacher-3 gives" in line for line in (*found.refusals, *found.warnings))
    assert found.together.logprob_noise_nats == pytest.approx(noise, abs=1e-5)


async def test_servers_are_compared_with_each_other_and_not_with_the_first_alone() -> None:
    servers = {"teacher-1": Server(), "teacher-2": Server(0.75), "teacher-3": Server(-0.75)}
    found = await agreement("teacher", servers, dict.fromkeys(servers, SAID), ASKED)
    (refusal,) = found.refusals
    assert refusal.startswith(
        "teacher.backend: teacher-3 gives log-probabilities up to 1.5 nats from those of teacher-2"
    )
    assert [line.partition(":")[2].split()[0] for line in found.warnings] == ["teacher-2"]
    assert found.largest_nats == pytest.approx(1.5, abs=1e-5)
    assert found.together.logprob_noise_nats == pytest.approx(3.0, abs=1e-5)


def rounded(rows: Any) -> Any:
    """Log-probabilities as another computation in 16 bits gives them; one unlikely token is 0.56 nats off."""
    moved = rows + np.random.default_rng(0).uniform(-0.15, 0.15, rows.shape)
    moved[-1, -1] = rows[-1, -1] - 0.56
    return moved


def of_another_model(rows: Any) -> Any:
    return rows - np.random.default_rng(0).exponential(2.0, rows.shape)


@pytest.mark.parametrize(
    ("change", "refused", "warned"),
    [
        (rounded, 0, 0),
        (lambda rows: rows - 0.25, 0, 1),  # all of them one way: no rounding does so
        (lambda rows: rows / 0.8, 0, 1),  # at another temperature
        (of_another_model, 1, 0),
    ],
)
async def test_servers_in_16_bits_are_judged_by_what_their_rounding_makes(
    change: Callable[[Any], Any], refused: int, warned: int
) -> None:
    said = msgspec.structs.replace(SAID, dtype="bfloat16")
    servers = {"teacher-1": Server(), "teacher-2": Server(change=change)}
    found = await agreement("teacher", servers, dict.fromkeys(servers, said), ASKED)
    assert (len(found.refusals), len(found.warnings)) == (refused, warned)


async def test_positions_that_a_server_does_not_know_are_not_compared() -> None:
    servers = {"teacher-1": Server(unknown=1), "teacher-2": Server(0.1, unknown=2)}
    found = await agreement("teacher", servers, dict.fromkeys(servers, SAID), ASKED)
    assert found.largest_nats == pytest.approx(0.1, abs=1e-5)


async def test_servers_of_other_names_are_told() -> None:
    other = msgspec.structs.replace(SAID, model="n")
    found = await agreement("teacher", {"a": Server(), "b": Server()}, {"a": SAID, "b": other}, ASKED)
    assert found.warnings == ["teacher.backend: its servers have models of different names: a m, b n"]


async def test_servers_that_cannot_be_compared_are_refused() -> None:
    class Down(Server):
        async def score(self, *arguments: Any, **more: Any) -> TokenScores:
            raise TransientError("b/score: connection refused")

    servers = {"a": Server(), "b": Down()}
    found = await agreement("teacher", servers, dict.fromkeys(servers, SAID), replace(ASKED, timeout_s=0.05))
    assert found.refusals == ["teacher.backend: its servers could not be compared: b/score: connection refused"]
    unknown = msgspec.structs.replace(SAID, weight_update=True, version=None)
    found = await agreement("student", servers, dict.fromkeys(servers, unknown), ASKED)
    assert (found.largest_nats, found.refusals) == (None, [])
    assert "hold unknown weights until the first are sent" in found.warnings[0]


async def test_a_single_server_is_compared_with_nothing() -> None:
    found = await agreement("teacher", {"teacher": None}, {"teacher": SAID}, ASKED)
    assert (found.together, found.largest_nats, found.refusals, found.warnings) == (SAID, None, [], [])
