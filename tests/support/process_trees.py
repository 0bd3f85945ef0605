"""A server whose processes are hard to find, and whether any of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

# A server that starts a worker in a session of its own, which starts another one and is then orphaned; all of them
# ignore SIGTERM when told to. They print their pids, the server's comes last.
SERVER = """
import os, signal, subprocess, sys, time
depth, stubborn = int(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth:
    below = [sys.executable, __file__, str(depth - 1), sys.argv[2]]
    child = subprocess.Popen(below, start_new_session=True, stdout=subprocess.PIPE, text=True)
    for _ in range(depth):
        print(child.stdout.readline().strip(), flush=True)
print(os.getpid(), flush=True)
if depth == 1:
    os._exit(0)  # leaves an orphan
time.sleep(600)
"""
DEPTH = 2


def write_server(directory):
    path = directory / "server.py"
    path.write_text(SERVER)
    return path


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


async def gone(pids, within_s=60.0):
    """Whether all of them are, at the latest after so long; by themselves they would not end before."""
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:  # noqa: ASYNC110 - not our children
        await asyncio.sleep(0.02)
    return not any(map(is_alive, pids))


ORCHESTRATOR = """
import asyncio, json, sys
from pathlib import Path
import spot_async.base.processes.child as processes
from spot_async.base.processes.far_side import FarPlace

async def main():
    server, prefix = Path(sys.argv[1]), json.loads(sys.argv[2])
    argv = [sys.executable, str(server), *sys.argv[3:]]
    place = FarPlace(prefix, sys.executable, 60.0) if prefix else None
    log = server.with_name("server.log")
    child = await processes.ChildProcess.start_foreign("server", argv, log_path=log, far=place)
    print(child.pid, flush=True)
    await child.watch()

processes.FOREIGN_GRACE_S = 0.5
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def orchestrated(server, manner, prefix=()):
    """The pids of the guard, and of the server and its workers. Who started them is killed at the end."""
    argv = [sys.executable, "-c", ORCHESTRATOR, str(server), json.dumps(prefix), str(DEPTH), manner]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as orchestrator:  # noqa: ASYNC220 - killed below
        try:
            guard = int(orchestrator.stdout.readline())
            yield guard, await printed(server.with_name("server.log"), DEPTH + 1)
        finally:
            orchestrator.kill()


async def printed(log_path, lines):
    while len(found := log_path.read_text().split()) < lines:  # noqa: ASYNC110 - a log tells nobody that it grew
        await asyncio.sleep(0.02)
    return list(map(int, found))
