"""Keys in a run's environment are in no output, in no file, and in no child process that does not need them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from key_spellings import SPELLINGS, shown
from kill_drill import ROOT, command, descendants, rows
from problem_files import FEW

TEACHER, TEAM, STUDENT = "tk-4f1Dq9/TeacherKey+77", "team-93.Zx~HeaderValue", "studentKey-0aB1cD2eF3"
PLANTED = {
    "TEACHER_KEY": TEACHER,
    "TEAM_HEADER": TEAM,
    "SPOT_ASYNC_API_KEY": STUDENT,
    "HF_TOKEN": "hf_plantedTOKENabcdefghijkl",
    "WANDB_API_KEY": "0123456789abcdefplanted0123456789abcdef01",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/plantedEXAMPLE",
    "HTTPS_PROXY": "http://me:proxyPassw0rd-planted@127.0.0.1:9",
}
KEYS = {**PLANTED, "HTTPS_PROXY": "proxyPassw0rd-planted"}
# Our own server learns from its environment for which key it has to ask. W&B's helpers go through proxies.
NEEDED = {"SPOT_ASYNC_API_KEY": "-m spot_async.serving", "WANDB_API_KEY": "/wandb-", "HTTPS_PROXY": "/wandb-"}


class Repeating:
    """A proxy that repeats keys in errors: some requests fail once it `fails`, and all once it `refuses`."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._numbers = itertools.count()
        self._spelling = itertools.cycle(SPELLINGS.values())
        self.fails = self.refuses = False
        self.repeated = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = [
                line.partition(":")[2] for line in head.split("\r\n") if line.lower().startswith("content-length:")
            ]
            body = await reader.readexactly(int(sizes[0])) if sizes else b""
            assert TEACHER in head
            assert TEAM in head
            if self.refuses or (self.fails and next(self._numbers) % 4 == 3):
                self._repeat(writer)
            else:
                await self._pass_on(head, body, writer)
        writer.close()

    def _repeat(self, writer: asyncio.StreamWriter) -> None:
        self.repeated += 1
        spell = next(self._spelling)
        said = f'{{"error": {{"message": "bad key {spell(TEACHER)} of {spell(TEAM)}"}}}}'.encode()
        status = "401 Unauthorized" if self.refuses else "500 Internal Server Error"
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + said)

    async def _pass_on(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        far, out = await asyncio.open_connection("127.0.0.1", self._upstream)
        lines = [line for line in head.split("\r\n") if line and not line.lower().startswith("connection:")]
        out.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        writer.write(await far.read())
        out.close()


@contextlib.asynccontextmanager
async def teacher() -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        *command("serve", "examples/running_sum/teacher", "--port", "0"),
        cwd=ROOT,
        env={**os.environ, "SPOT_ASYNC_API_KEY": TEACHER},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        yield int((await process.stderr.readline()).split()[-1])
    finally:
        process.kill()
        await process.wait()


def in_children(pid: int, copies: set[int]) -> set[str]:
    """Return which keys a process below has in its environment or on its command line, but for those it needs.

    A child that is forked and has not begun its own program yet is still a copy of its parent. One that is seen as a
    copy for the first time is added to `copies`, and is looked at the next time.
    """
    found = set()
    for child, line in descendants(pid):
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            if line == parent and child not in copies:
                copies.add(child)
                continue
            environment = Path(f"/proc/{child}/environ").read_bytes()
            for name, key in KEYS.items():
                is_needed = name in NEEDED and NEEDED[name] in line
                if shown(line.encode(), key) or (not is_needed and shown(environment, key)):
                    found.add(f"{name} in {line[:100]}")
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_a_run_shows_and_saves_no_key_and_gives_none_to_who_does_not_need_it(tmp_path: Path) -> None:
    run, leaks, copies = tmp_path / "run", set[str](), set[int]()
    async with asyncio.timeout(200), teacher() as upstream:
        repeating = Repeating(upstream)
        async with await asyncio.start_server(repeating.serve, "127.0.0.1", 0) as proxy:
            url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/v1"
            keys = "api_key_env: TEACHER_KEY, secret_headers: {X-Team: TEAM_HEADER}"
            backend = f"{{kind: openai, url: '{url}', {keys}}}"
            process = await asyncio.create_subprocess_exec(
                *command("train", "configs/running_sum/opd.yaml", f"run.directory={run}", "training.iterations=400"),
                *(FEW, f"teacher.backend={backend}", "training.ranks=2", "training.batch_size=8"),
                *("training.mini_batch_size=8", "evaluation=null", "telemetry.wandb={project: p}"),
                *("telemetry.tensorboard=true", "training.checkpoint_every=2"),
                cwd=ROOT,
                env={**os.environ, **PLANTED, "NO_PROXY": "127.0.0.1", "WANDB_MODE": "offline"},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            saying = asyncio.ensure_future(process.communicate())
            while repeating.repeated <= len(SPELLINGS) and not saying.done():
                repeating.fails = rows(run) > 0  # by then the servers are checked
                leaks |= in_children(process.pid, copies)
                await asyncio.sleep(0.3)
            repeating.refuses = True
            said, _ = await saying
    assert process.returncode == 1, said.decode()
    assert b"HTTP 401" in said, said.decode()
    assert leaks == set()
    texts = {"output": said} | {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.suffix != ".safetensors"
    }
    assert "logs/run.jsonl" in texts
    assert "config.yaml" in texts
    assert any(name.startswith("wandb/") for name in texts)
    found = {(place, name) for place, text in texts.items() for name, key in KEYS.items() if shown(text, key)}
    assert found == set()
