"""Twenty weight updates of a real server under a load of long rollouts, through a pool and stages as in a run.

For every token its version and its log-probability are checked: the version that its span names, and the
log-probability that a plain forward over the whole sequence gives with those weights. So nothing of other weights may
be left in a cache. Nothing may be lost either.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TinyModels
from parity import Dense, decisions
from server_process import RunningServer
from under_load import CANDIDATES, POSITIONS, RESPONSE, expect_rounding, nats_off_spans, prompt_of, under_load

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.types import FloatArray, WeightVersion

UPDATES = 20
TOKENS = 600
KINDS = {"vllm": VllmBackend, "vllm_v2": VllmBackend, "sglang": SglangBackend}


@pytest.mark.parametrize("kind", ["vllm", pytest.param("vllm_v2", marks=pytest.mark.nightly), "sglang"])
async def test_no_token_of_twenty_updates_is_lost_or_of_other_weights_than_it_names(
    kind: str, request: pytest.FixtureRequest, models: TinyModels, tmp_path: Path, dense_logprobs: Dense
) -> None:
    server: RunningServer = request.getfixturevalue(f"{kind}_student")
    held = {WeightVersion(0, step): (models.student, models.other)[step % 2] for step in range(UPDATES + 1)}
    load = await under_load(lambda: _backend(kind, server, tmp_path), held, TOKENS)

    assert len(load.replies) == load.asked
    met, nats = set(), []
    for prompt, reply in load.replies:
        met |= {(before.version.step, after.version.step) for before, after in pairwise(reply.version_spans)}
        nats.append(nats_off_spans(prompt, reply, held, dense_logprobs))
    # Each update met a response, if one was in flight all along, and none met it twice.
    assert load.in_flight <= met <= set(pairwise(range(UPDATES + 1)))
    assert len(load.in_flight) > UPDATES / 2
    expect_rounding(np.concatenate(nats))

    assert len(load.candidates) == UPDATES
    expect_rounding(np.concatenate([_of_one_model(each, models, dense_logprobs) for each in load.candidates]))


def _backend(kind: str, server: RunningServer, directory: Path) -> Any:
    backend = KINDS[kind]
    settings = backend.Settings(url=server.url)
    return backend(settings, role="student", model=str(server.model), run_directory=directory)


def _of_one_model(served: FloatArray, models: TinyModels, dense: Dense) -> FloatArray:
    """How far off a whole answer about candidates is from the model that it is nearest to."""
    prompt, off = prompt_of(0), []
    for model in (models.student, models.other):
        rows = decisions(dense(model, [*prompt.tolist(), *RESPONSE.tolist()]), prompt, RESPONSE)
        off.append(np.abs(served - np.take_along_axis(rows[POSITIONS], CANDIDATES.astype(np.int64), axis=1)).ravel())
    return min(off, key=np.max)
