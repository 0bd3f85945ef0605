"""Weights over a process group, between two real processes: the sender, and a receiver as servers have one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from deadlines import soon
from hypothesis import given
from hypothesis import strategies as st

from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.shared.weight_transport import WeightSender, WeightSettings, buckets
from spot_async.base.tasks import both
from spot_async.config.loading import validate_as
from spot_async.errors import ConfigError, DeadlineExceededError, TransientError
from spot_async.models.weight_files import Header, file_headers, weight_files

# Rank 1, with what servers join by; prints the sum of each tensor that it receives.
RECEIVER = """
import sys, torch, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
port, group, *shapes = sys.argv[1:]
store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
pg, _ = c10d._new_process_group_helper(
    2, 1, [], dist.Backend("gloo"), dist.PrefixStore(group, store), group_name=group, timeout=c10d.default_pg_timeout
)
c10d._world.pg_group_ranks[pg] = {0: 0, 1: 1}
for shape in shapes:
    tensor = torch.empty([int(n) for n in shape.split("x")])
    dist.broadcast(tensor, 0, group=pg)
    print(float(tensor.double().sum()), flush=True)
"""


def test_a_server_elsewhere_is_not_told_to_find_us_on_its_own_machine() -> None:
    def settings(url: str, **weights: str) -> SglangBackend.Settings:
        return validate_as(SglangBackend.Settings, {"url": url, "weights": {"transport": "distributed", **weights}})

    for address in ("127.0.0.1", "localhost"):
        with pytest.raises(ConfigError, match=rf"weights\.address={address} .* to 10\.0\.0\.5: give"):
            settings("http://10.0.0.5:30000", address=address)
    with pytest.raises(ConfigError, match=r"weights\.address=127\.0\.0\.1"):
        settings("http://gpu-box:30000")
    assert settings("http://10.0.0.5:30000", address="10.0.0.2").weights.address == "10.0.0.2"
    assert settings("http://10.0.0.5:30000", transport="disk").weights.address == "127.0.0.1"
    for here in ("http://127.0.0.1:30000", "http://localhost:30000", "http://[::1]:30000"):
        assert settings(here).weights.address == "127.0.0.1"


@asynccontextmanager
async def started(tmp_path: Path) -> AsyncIterator[tuple[WeightSender, int]]:
    sender = WeightSender(WeightSettings(device="cpu"), name="student", log_directory=tmp_path)
    try:
        yield sender, await sender.start(deadline=soon())
    finally:
        await sender.stop()


async def receive(port: int, group: str, *shapes: tuple[int, ...]) -> list[float]:
    texts = ["x".join(map(str, shape)) for shape in shapes]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RECEIVER, str(port), group, *texts, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return [float(line) for line in output.split()]


@pytest.mark.long
async def test_a_snapshots_tensors_arrive_in_the_order_that_was_agreed(model: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    [file] = weight_files(model)
    wanted = {name: tensor.astype(np.float64).sum() for name, tensor in load_file(file).items()}
    [tensors] = buckets(file_headers(file))
    async with started(tmp_path) as (sender, port):

        async def send() -> None:
            await sender.join("weights", world_size=2, deadline=soon())
            await sender.broadcast(str(model), tensors, deadline=soon())

        _, sums = await both(send(), receive(port, "weights", *(tensor.shape for tensor in tensors)))
    np.testing.assert_allclose(sums, [wanted[tensor.name] for tensor in tensors], rtol=1e-6, atol=1e-6)


def own_addresses() -> set[str]:
    """Of this machine, as far as it knows its own name."""
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except socket.gaierror:
        return set()


@pytest.mark.long
async def test_what_a_sender_cannot_do_is_one_line(model: Path, tmp_path: Path) -> None:
    async with started(tmp_path) as (sender, port):
        for address in own_addresses():
            if not address.startswith("127."):
                with pytest.raises(ConnectionRefusedError):  # it listens on one address
                    socket.create_connection((address, port), timeout=5.0)
        [tensors] = buckets({"no.such.weight": Header("F32", (2,))})
        with pytest.raises(TransientError, match=r"cannot send 1 tensors: .*no\.such\.weight"):
            await sender.broadcast(str(model), tensors, deadline=soon())
        join = asyncio.create_task(sender.join("weights", world_size=2, deadline=soon()))
        await asyncio.sleep(0.2)
        os.kill(sender._child.pid, signal.SIGKILL)
        with pytest.raises(TransientError, match=r"student-weights \(pid \d+\) was killed by SIGKILL"):
            await join

    async with started(tmp_path) as (sender, _):
        with pytest.raises(
            DeadlineExceededError, match=r"^student-weights: did not join the group before the deadline$"
        ):
            await sender.join("weights", world_size=2, deadline=soon(0.5))  # nobody else comes

    elsewhere = WeightSettings(device="cpu", address="192.0.2.1")  # reserved for documentation: nobody's
    sender = WeightSender(elsewhere, name="student", log_directory=tmp_path)
    with pytest.raises(TransientError, match=r"cannot start: cannot listen on 192\.0\.2\.1:0: "):
        await sender.start(deadline=soon())
    await sender.stop()


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    dtype=st.sampled_from(["F32", "BF16", "F8_E4M3"]),
    capacity=st.integers(1, 200),
)
def test_buckets_hold_every_tensor_once_and_no_more_than_they_may(sizes: list[int], dtype: str, capacity: int) -> None:
    element = {"F32": 4, "BF16": 2, "F8_E4M3": 1}[dtype]
    layout = {f"w{i:02}": Header(dtype, (size, 2), 0, size * 2 * element) for i, size in enumerate(sizes)}
    parts = list(buckets(layout, capacity))
    assert [tensor.name for part in parts for tensor in part] == list(layout)
    for part in parts:
        held = [tensor.shape[0] * tensor.shape[1] * element for tensor in part]
        assert sum(held) <= capacity or len(held) == 1 or sum(held[:-1]) == 0
