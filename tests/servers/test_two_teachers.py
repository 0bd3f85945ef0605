"""vLLM and SGLang as two teachers of one run, each killed and started again: nothing is lost, and both bills agree."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import faulty_proxy
import pytest
import yaml
from conftest import StartServer, TinyModels
from server_process import RunningServer
from test_runs import problems, read_lines, run, write_config

from spot_async.backends.shared.launch import free_port

__all__ = ["problems"]  # a fixture

ITERATIONS = 12
PRICES = {"prompt": 3.0, "completion": 12.0, "request": 0.0002}
POLL_S = 0.2
TIMEOUT_S = 600.0


class Bill(faulty_proxy.FaultyProxy):
    """A proxy that counts what the server says of each request that it answered."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port))
        self.answered = self.prompt_tokens = 0

    async def _ask(self, request: bytes) -> bytes:
        reply = await super()._ask(request)
        counted = [int(tokens) for tokens in re.findall(rb'"prompt_tokens": ?(\d+)', reply)]
        self.answered += bool(counted)
        self.prompt_tokens += sum(counted)
        return reply


async def rows_reach(folder: Path, number: int, going: asyncio.Task[tuple[bytes, bytes]]) -> int:
    """Wait until so many iterations have finished, and return how many have."""
    path = folder / "run" / "metrics.jsonl"
    async with asyncio.timeout(TIMEOUT_S):
        while not path.exists() or len(path.read_text().splitlines()) < number:
            assert not going.done(), going.result()[1].decode()
            await asyncio.sleep(POLL_S)
    return len(path.read_text().splitlines())


@pytest.mark.nightly
async def test_two_teachers_are_killed_by_turns_and_bill_what_the_run_says(
    models: TinyModels, problems: Path, tmp_path: Path, start_vllm: StartServer, start_sglang: StartServer
) -> None:
    starts = {"vllm": start_vllm, "sglang": start_sglang}
    ports = {kind: free_port() for kind in starts}
    path = write_config(tmp_path, models, problems, {"kind": "local"}, {})
    with ExitStack() as servers:

        async def start(kind: str) -> None:
            running[kind] = await asyncio.to_thread(
                servers.enter_context, starts[kind](models.teacher, port=ports[kind])
            )

        running: dict[str, RunningServer] = {}
        for kind in starts:
            await start(kind)
        async with Bill(ports["vllm"]) as of_vllm, Bill(ports["sglang"]) as of_sglang:
            bills = {"vllm": of_vllm, "sglang": of_sglang}
            config = yaml.safe_load(path.read_text())
            del config["teacher"]
            config["teachers"] = {
                kind: {
                    "model": str(models.teacher),
                    "backend": {"kind": kind, "url": bill.url, "prices": PRICES},
                    "serving": {"stall_s": 5.0},
                }
                for kind, bill in bills.items()
            }
            training = config["training"] | {"iterations": ITERATIONS}
            path.write_text(yaml.safe_dump(config | {"policy": "opd", "evaluation": None, "training": training}))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "spot_async", "train", str(path)),
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            going = asyncio.create_task(process.communicate())
            done = 2
            for kind in starts:
                done = await rows_reach(tmp_path, done, going) + 2
                running[kind].signal_group(signal.SIGKILL)
                await start(kind)
            _, said = await asyncio.wait_for(going, TIMEOUT_S)
            assert process.returncode == 0, said.decode()
    run("verify-run", str(tmp_path / "run"))
    spending = json.loads((tmp_path / "run" / "summary.json").read_text())["spending"]
    for kind, bill in bills.items():
        spent = spending[f"teachers.{kind}"]
        assert spent["answered"] == pytest.approx(bill.answered, rel=0.02)
        assert spent["prompt_tokens"] == pytest.approx(bill.prompt_tokens, rel=0.02)
        billed = bill.answered * PRICES["request"] + bill.prompt_tokens * PRICES["prompt"] / 1e6
        assert spent["money"] == pytest.approx(billed, rel=0.2)
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [*range(1, ITERATIONS + 1)]
    for kind in starts:
        failed = sum(row.get(f"stage/score.{kind}/transient", 0.0) for row in rows)
        assert failed > 0, f"{kind} was killed while nothing was asked"
