"""How late the event loop is: true percentiles, whatever blocks it."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from spot_async.telemetry.meters import LagHistogram, LoopLag


def test_percentiles_are_those_of_the_lags_within_a_tenth():
    lags_s = np.random.default_rng(0).lognormal(mean=-6.0, sigma=1.0, size=20_000).clip(2e-5, 0.04)
    histogram = LagHistogram()
    for lag_s in lags_s:
        histogram.add(float(lag_s), interval_s=0.05)
    for share in (0.5, 0.99):
        exact = float(np.quantile(lags_s, share))
        assert exact * 0.99 <= histogram.quantile_s(share) <= exact * 1.11
    assert histogram.max_s == lags_s.max()


def test_one_long_block_counts_for_everything_that_waited_meanwhile():
    histogram = LagHistogram()
    for _ in range(1000):  # 50 s without any lag to speak of, then 10 s blocked: a sixth of all events
        histogram.add(0.0001, interval_s=0.05)
    histogram.add(10.0, interval_s=0.05)
    assert histogram.quantile_s(0.5) < 0.001
    assert histogram.quantile_s(0.9) == pytest.approx(4.0, rel=0.15)  # of these, two in five waited for longer
    assert histogram.max_s == 10.0


def test_a_blocked_loop_is_measured_and_then_forgotten():
    async def main():
        lag = LoopLag()
        with lag.measuring():
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().call_soon(time.sleep, 0.3)
            await asyncio.sleep(0.1)
            first, second = lag.take(), lag.take()
        return first, second

    first, second = asyncio.run(main())
    assert 0.2 < first["loop/lag_max_s"] < 5.0
    assert second["loop/lag_max_s"] == 0.0
