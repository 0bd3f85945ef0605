"""Groups of ranks form though a stranger speaks gloo's language to all their ports, and have no stranger in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Two ranks, as forks, the second of which comes late to each group. A third process says to each port of theirs what
# the other rank would say first: its small number. So does nobody else whom gloo takes for a rank.
DISTURBED = """
import os, re, socket, struct, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from spot_async.trainer import groups, parallel

def listening(pid):
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2]
    own = {link[8:-1] for link in links if link.startswith("socket:")}
    lines = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and line[9] in own}

def disturb(pids):
    spoken, connections = set(), []
    while True:
        for pid in pids:
            try:
                ports = listening(pid) - spoken
                for port in ports:
                    for number in range(3):
                        connections.append(socket.create_connection(("127.0.0.1", port)))
                        connections[-1].sendall(struct.pack("<q", number))
            except OSError:
                continue
            spoken |= ports
        time.sleep(0.02)

parallel.TRAINING_TIMEOUT = parallel.IDLE_TIMEOUT = timedelta(seconds=10)
groups.PROOF_TIMEOUT = timedelta(seconds=3)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
first = os.getpid()
rank = 0 if (second := os.fork()) else 1
if rank == 0 and os.fork() == 0:
    disturb([first, second])
os.environ.update(RANK=str(rank), WORLD_SIZE="2")
is_ours, mistakes = groups._is_ours, iter([False])
with parallel.process_group(sys.argv[1], torch.device("cpu"), "none"):
    for name in ("quiet", "with somebody else in it, as one rank finds"):
        if rank == 1:
            time.sleep(1)
            if name != "quiet":
                groups._is_ours = lambda group, key: is_ours(group, key) and next(mistakes, True)
        dist.barrier(parallel.idle_group())
    total = torch.ones(1)
    dist.all_reduce(total)
    if rank == 0:
        sys.stdout.write(f"{total.item():g} ranks")
        sys.stdout.flush()
    dist.barrier()
    os.killpg(0, 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
def test_a_group_forms_without_the_stranger_who_speaks_first_and_is_formed_again_where_there_was_one(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISTURBED, str(tmp_path)], capture_output=True, timeout=120, start_new_session=True
    )
    assert done.stdout == b"2 ranks", done.stderr.decode()[-2000:]
    assert b"it is formed again" in done.stderr
