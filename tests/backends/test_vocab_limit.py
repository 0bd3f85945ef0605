"""Servers that are told by a bias to leave ids out: what they are sent, and how their answers are read."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from spot_async.backends.sglang.generation import generate_below
from spot_async.backends.sglang.replies import NextToken, TopK
from spot_async.backends.shared.request_limits import logit_bias
from spot_async.types import Generation, SamplingSettings, VersionSpan, WeightVersion

V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)


def test_a_request_bans_the_ids_beyond_the_limit_and_says_nothing_where_there_are_none() -> None:
    sampling = SamplingSettings(max_tokens=1, stop_token_ids=(), seed=0)
    assert logit_bias(sampling, 50) == {}
    assert logit_bias(msgspec.structs.replace(sampling, vocab_limit=50), 50) == {}
    limited = logit_bias(msgspec.structs.replace(sampling, vocab_limit=48), 50)
    assert limited == {"logit_bias": {"48": -1e4, "49": -1e4}}


class BiasedServer:
    """A server whose bias changes the log-probabilities; its model is a table of next-token distributions.

    It switches to other weights after `switch` requests for single tokens.
    """

    def __init__(self, width: int, switch: int | None = None) -> None:
        draw = np.random.default_rng(0)
        self.tables = {version: draw.normal(scale=2.0, size=(width, width)) for version in (V0, V1)}
        self.width, self.switch, self.asked, self.requests = width, switch, 0, 0

    @property
    def version(self) -> WeightVersion:
        return V0 if self.switch is None or self.asked < self.switch else V1

    def row(self, last: int, temperature: float, version: WeightVersion) -> np.ndarray:
        logits = self.tables[version][last] / temperature
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    async def sample(self, prompt_ids: Any, sampling: SamplingSettings, *, top_k: int, deadline: float) -> Generation:
        self.requests += 1
        draw = np.random.default_rng(sampling.seed)
        version, last, ids, logprobs = self.version, int(prompt_ids[-1]), [], []
        tops = []
        while len(ids) < sampling.max_tokens and (not ids or ids[-1] not in sampling.stop_token_ids):
            row = self.row(last, sampling.temperature, version)
            tops.append(row)
            if sampling.vocab_limit is not None:
                row = np.where(np.arange(self.width) < sampling.vocab_limit, row, -np.inf)
                row = row - np.log(np.exp(row).sum())
            last = int(draw.choice(self.width, p=np.exp(row)))
            ids.append(last)
            logprobs.append(row[last])
        best = np.argsort(-np.array(tops), axis=1)[:, :top_k].astype(np.int32)
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reason="length",
            version_spans=(VersionSpan(0, len(ids), version),),
            topk_ids=best if top_k else None,
            topk_logprobs=np.take_along_axis(np.array(tops), best, 1).astype(np.float32) if top_k else None,
        )

    async def next_tokens(self, asked: Any, top_k: int, temperature: float, deadline: float) -> list[NextToken]:
        found = []
        for prefix, chosen in asked:
            self.asked += 1
            row = self.row(int(prefix[-1]), temperature, self.version).astype(np.float32)
            best = np.argsort(-row)[None, :top_k].astype(np.int32)
            top = None if chosen is not None else TopK(best, row[best])
            found.append(NextToken(top, None if chosen is None else row[chosen], self.version))
        return found


def limited(seed: int, **more: Any) -> SamplingSettings:
    return SamplingSettings(
        **{"max_tokens": 100, "stop_token_ids": (3,), "seed": seed, "vocab_limit": 8, "temperature": 0.8, **more}
    )


@pytest.mark.parametrize("switch", [None, 40])
async def test_a_server_whose_bias_changes_log_probabilities_still_gives_those_of_the_whole_softmax(
    switch: int | None,
) -> None:
    prompt, versions = np.array([5], np.int32), set()
    for seed in range(20):
        server = BiasedServer(12, switch)
        reply = await generate_below(server, prompt, limited(seed), 12, top_k=4, deadline=0.0)
        again = await generate_below(BiasedServer(12, switch), prompt, limited(seed), 12, top_k=4, deadline=0.0)
        np.testing.assert_array_equal(reply.token_ids, again.token_ids)
        assert reply.token_ids.max() < 8
        assert reply.finish_reason == ("stop" if reply.token_ids[-1] == 3 else "length")
        before = np.concatenate([prompt, reply.token_ids[:-1]])
        for span in reply.version_spans:
            versions.add(span.version)
            for t in range(span.start, span.end):
                row = server.row(int(before[t]), 0.8, span.version)
                assert reply.logprobs[t] == pytest.approx(row[reply.token_ids[t]], abs=1e-5)
                assert reply.topk_ids is not None
                assert reply.topk_ids[t].tolist() == np.argsort(-row)[:4].tolist()
    assert versions == ({V0} if switch is None else {V0, V1})


async def test_tokens_that_are_drawn_again_have_the_odds_that_a_mask_would_leave_them() -> None:
    server, prompt = BiasedServer(12), np.array([5], np.int32)
    count = 4000
    drawn = [
        int((await generate_below(server, prompt, limited(seed, max_tokens=1), 12, top_k=0, deadline=0.0)).token_ids[0])
        for seed in range(count)
    ]
    odds = np.exp(server.row(5, 0.8, V0))[:8]
    odds /= odds.sum()
    off = (np.bincount(drawn, minlength=8) - count * odds) / np.sqrt(count * odds * (1 - odds))
    assert np.abs(off).max() < 5


async def test_a_response_without_a_left_out_id_takes_one_request_with_its_own_seed() -> None:
    server, prompt = BiasedServer(12), np.array([5], np.int32)
    for table in server.tables.values():
        table[:, 8:] = -40.0
    reply = await generate_below(server, prompt, limited(7), 12, top_k=0, deadline=0.0)
    plain = await server.sample(prompt, limited(7, vocab_limit=None), top_k=0, deadline=0.0)
    np.testing.assert_array_equal(reply.token_ids, plain.token_ids)
    assert server.requests == 2
