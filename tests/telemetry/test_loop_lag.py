"""How late the event loop is: true percentiles, whatever blocks it."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from spot_async.telemetry.meters import LoopLag


def test_percentiles_are_those_of_the_lags():
    lags_s = np.random.default_rng(0).lognormal(mean=-6.0, sigma=1.0, size=20_000).clip(2e-5, 0.04)
    lag = LoopLag()
    for lag_s in lags_s:
        lag.add(float(lag_s))
    found = lag.take()
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        assert found[f"loop/lag_{name}_s"] == pytest.approx(float(np.quantile(lags_s, share)), rel=1e-3)


def test_one_long_block_counts_for_everything_that_waited_meanwhile():
    lag = LoopLag()
    for _ in range(1000):  # 50 s without any lag to speak of, then 10 s blocked: a sixth of all events
        lag.add(0.0001)
    lag.add(10.0)
    found = lag.take()
    assert found["loop/lag_p50_s"] < 0.001
    assert found["loop/lag_p99_s"] == pytest.approx(9.4, rel=0.01)  # of those that waited, six in a hundred for longer
    assert found["loop/lag_max_s"] == 10.0


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
