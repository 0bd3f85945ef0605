"""Programs on the far side of a prefix: whatever ends first, nothing is left there, and no secret is seen.

The prefixes are real: `env`, a shell that reads words again as ssh's does, `ip netns exec`, and ssh to an sshd here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_namespaces import linked, namespace, run
from process_trees import DEPTH, gone, is_alive, orchestrated, printed, write_server
from ssh_server import ssh_server

from spot_async.backends.shared.launch import free_port
from spot_async.base.processes.child import ChildProcess
from spot_async.base.processes.far_side import FarPlace
from spot_async.base.processes.guard import process_tree
from spot_async.errors import ProcessDiedError

PREFIXES = {
    "env": ["env", "PASSED=on"],  # becomes the far shell
    "joined": ["sh", "-c", 'eval "$*"; exit $?', "-"],  # as ssh does: the words are joined and read again
}


@pytest.fixture(scope="module")
def ssh(tmp_path_factory) -> Iterator[list[str]]:
    with ssh_server(tmp_path_factory.mktemp("ssh"), free_port()) as client:
        yield ["ssh", "-F", str(client), "there"]


@pytest.fixture(params=["env", "joined", "netns", "ssh"])
def prefix(request):
    if request.param == "ssh":
        yield request.getfixturevalue("ssh")
    elif request.param == "netns":
        with namespace("far") as name:
            yield ["ip", "netns", "exec", name]
    else:
        yield PREFIXES[request.param]


@pytest.fixture
def server(tmp_path):
    return write_server(tmp_path)


def place(prefix, **changes):
    return FarPlace(prefix, **{"python": sys.executable, "silence_s": 60.0, **changes})


async def start(prefix, server, *arguments, name="server", **changes):
    """The child, the pids of the server and its workers (the server's is last), and that of the far guard."""
    argv = [sys.executable, str(server), *arguments]
    log = server.with_name(f"{name}.log")
    child = await ChildProcess.start_foreign(name, argv, log_path=log, far=place(prefix, **changes))
    pids = await printed(log, DEPTH + 1)
    return child, pids, parent_of(pids[-1])


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def prefix_of(child):
    """The process below the guard here: ssh, or what the prefix became."""
    tree = process_tree(child.pid)
    return next(pid for pid, fields in tree.items() if int(fields[1]) == child.pid)


async def test_a_stop_ends_all_of_the_far_side_before_it_returns(prefix, server):
    child, pids, far_guard = await start(prefix, server, str(DEPTH), "polite")
    assert is_alive(far_guard)
    watching = asyncio.create_task(child.watch())
    await child.stop()
    await watching  # on purpose: no error
    assert not any(map(is_alive, [*pids, far_guard, child.pid]))


@pytest.mark.parametrize("killed", ["guard", "prefix", "server"])
async def test_nothing_is_left_whichever_of_its_processes_is_killed(prefix, server, killed):
    child, pids, far_guard = await start(prefix, server, str(DEPTH), "polite")
    victim = {"guard": child.pid, "prefix": prefix_of(child), "server": pids[-1]}[killed]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ProcessDiedError) as raised:
        await child.watch()
    assert await gone([*pids, far_guard])
    if killed == "server":
        assert "exited with code 137: error: the server was killed by SIGKILL (log: " in str(raised.value)


async def test_nothing_outlives_an_orchestrator_that_is_killed(ssh, server):
    async with orchestrated(server, "stubborn", prefix=ssh) as (guard, pids):
        far_guard = parent_of(pids[-1])
    assert await gone([guard, far_guard, *pids])


@pytest.mark.long
async def test_the_far_side_ends_by_itself_when_it_hears_nothing_and_not_before(server):
    child, pids, far_guard = await start(PREFIXES["joined"], server, str(DEPTH), "polite", silence_s=0.6)
    await asyncio.sleep(1.5)
    assert all(map(is_alive, (pids[0], pids[2])))  # the guard here is heard
    os.kill(child.pid, signal.SIGSTOP)  # nobody closes the input, and nobody writes
    assert await gone([*pids, far_guard])
    os.kill(child.pid, signal.SIGCONT)
    with pytest.raises(ProcessDiedError):
        await child.watch()
    assert "stopping: nothing heard from the run for 0.6 s" in child.log_tail()


@pytest.mark.long
async def test_what_a_cut_link_leaves_there_ends_while_it_is_still_cut(server, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys")
    with namespace("cut") as name, linked(name) as (device, address):
        within = ["ip", "netns", "exec", name]
        with ssh_server(keys, free_port(), address=address, within=within) as client:
            patient = ["ssh", "-F", str(client), "-o", "ServerAliveInterval=2", "there"]  # gives up after 6 seconds
            child, pids, far_guard = await start(patient, server, str(DEPTH), "polite", silence_s=2.0)
            await asyncio.sleep(4.0)
            assert is_alive(far_guard)
            run("ip", "link", "set", device, "down")
            assert await gone([*pids, far_guard])
            with pytest.raises(ProcessDiedError, match="exited with code 255"):
                await child.watch()


# Says what it was given, and whether any user could see its secret.
TOLD = """
import json, os, sys
from pathlib import Path

def command_lines():
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield entry.read_text(errors="replace")
        except OSError:
            pass

given = Path(sys.argv[1])
print(json.dumps({
    "environment": dict(os.environ), "file": given.read_text(), "mode": given.stat().st_mode & 0o777,
    "of_directory": given.parent.stat().st_mode & 0o777, "input": sys.stdin.read(), "key": os.environ["KEY"],
    "seen": any(os.environ["SECRET"] in line for line in command_lines()),
}))
"""


async def test_values_arrive_as_they_are_and_secrets_on_no_command_line_and_in_no_log(prefix, tmp_path):
    secret, directory = f'it\'s "$HOME" `id`\n{uuid.uuid4()} \\ *', Path("/tmp") / f"spot-far-{uuid.uuid4().hex}"
    far = place(prefix, directory=directory, files={"flags": secret})
    assert secret not in repr(far)
    child = await ChildProcess.start_foreign(
        "told",
        [sys.executable, "-c", TOLD, str(directory / "flags")],
        log_path=tmp_path / "log",
        environment={"SECRET": secret, "KEY": "a-key-to-hide", "EMPTY": ""},
        secrets=["a-key-to-hide"],
        far=far,
    )
    with pytest.raises(ProcessDiedError, match="exited with code 0"):
        await child.watch()
    told = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert told["environment"]["SECRET"] == secret == told["file"]
    assert told["environment"]["EMPTY"] == ""
    assert not [name for name in told["environment"] if name.startswith("SPOT_ASYNC")]
    assert (told["mode"], told["of_directory"], told["input"]) == (0o600, 0o700, "")
    assert not told["seen"]
    assert told["key"] == "***"
    assert not directory.exists()


async def test_only_named_variables_cross_to_another_machine(ssh, tmp_path, monkeypatch):
    monkeypatch.setenv("NOT_TO_BE_PASSED", "ours")
    code = "import os; print(os.environ.get('NOT_TO_BE_PASSED'), os.environ['PASSED'])"
    child = await ChildProcess.start_foreign(
        "told",
        [sys.executable, "-c", code],
        log_path=tmp_path / "log",
        environment={"PASSED": "theirs"},
        far=place(ssh),
    )
    with pytest.raises(ProcessDiedError, match="exited with code 0: None theirs"):
        await child.watch()
