"""Servers that we start: real processes, one of which speaks HTTP as an inference server would."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pydantic
import pytest
from deadlines import soon
from hostile_folder import of_common_names
from launched_server import serve
from process_trees import is_alive

from spot_async.backends.shared.launch import Assignment, Command, LaunchedServer, free_port
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.shared.remote import RemoteServer, ServerKind
from spot_async.backends.shared.settings import StudentServerSettings
from spot_async.errors import ConfigError, ProcessDiedError

ROOT = Path(__file__).parents[2]
STUDENT = "examples/running_sum/student"  # relative on purpose

# As vLLM's log: what went wrong in its engine comes long before what its server says of it.
CRASH = r"""
import sys
print("WARNING: raise the limit, or `OSError: too many files` may follow")
print("(Engine pid=3) ERROR [core.py:9] a.b.MemoryError: no room", "MemoryError: no room", *range(40), sep="\n")
sys.stdout.flush()
raise SystemExit("\x1b[31mRuntimeError: the engine failed, see above\x1b[0m\nclean up: 1 object")
"""


def crash(settings, model, doorway):
    return Command([settings.python, "-c", CRASH])


def hang(settings, model, doorway):
    return Command([settings.python, "-c", "import time; print('loading', flush=True); time.sleep(600)"])


def server(tmp_path, make_command=serve, start_timeout_s=600.0, **launch):
    settings = StudentServerSettings(kind="fake", launch=LaunchSettings(**{"python": sys.executable, **launch}))
    settings = settings.of_run(start_timeout_s=start_timeout_s)
    return RemoteServer(settings, role="student", model=STUDENT, run_directory=tmp_path, kind=ServerKind(make_command))


@pytest.fixture(autouse=True)
def _asked_often(monkeypatch):
    """Whether a server is ready: ours are within milliseconds."""
    monkeypatch.setattr("spot_async.backends.shared.launch.ASK_INTERVAL_S", 0.02)


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


async def test_a_server_is_started_waited_for_spoken_to_and_stopped_with_its_workers(tmp_path):
    async with server(tmp_path, devices="1,0", environment={"OWN": "settings"}) as running:
        told = await running.get("/told", dict, deadline=soon())
        assert told["devices"] == "1,0"
        assert told["own"] == "settings"  # what the user gives comes last
        assert told["model"] == str(ROOT / STUDENT)
        assert is_alive(told["worker"])
        watching = asyncio.create_task(running.watch())
        await asyncio.sleep(0)
    await watching
    assert not is_alive(told["pid"])
    assert not is_alive(told["worker"])
    assert (tmp_path / "logs" / "student.log").exists()


# Says its key as SGLang does, in two writes too, and as its last words.
TALKATIVE = """
import os, sys, time
key = open(sys.argv[1]).read()
print(f"args=(api_key='{key}')")
sys.stdout.write("again: " + key[:7])
sys.stdout.flush()
time.sleep(0.1)
print(key[7:], "SPOT_ASYNC_SECRET" in os.environ, flush=True)
sys.stderr.write(f"ValueError: no key like {key}")
sys.exit(1)
"""


async def test_a_key_that_a_server_says_is_in_no_log_and_no_error(tmp_path):
    told = []

    def talk(settings, model, doorway):
        told.append(doorway)
        (doorway.directory / "key").write_text(doorway.key)
        return Command([settings.python, "-c", TALKATIVE, str(doorway.directory / "key")])

    with pytest.raises(ProcessDiedError, match=r"exited with code 1: ValueError: no key like \*\*\* \(log") as raised:
        await server(tmp_path, talk).__aenter__()
    (doorway,) = told
    log = (tmp_path / "logs" / "student.log").read_text()
    assert log == "args=(api_key='***')\nagain: *** False\nValueError: no key like ***"  # it was not told to hide it
    for said in (log, str(raised.value), *raised.value.__notes__, repr(doorway)):
        assert doorway.key not in said
    assert not doorway.directory.exists()


async def test_a_server_is_asked_with_the_key_that_its_user_chose_or_one_of_its_own(tmp_path, monkeypatch):
    def keyed(settings, model, doorway):
        keys.append(doorway.key)
        return serve(settings, model, doorway)

    keys = []
    monkeypatch.setenv("CHOSEN", "a key")
    for variable in ("CHOSEN", None):
        settings = StudentServerSettings(
            kind="fake", launch=LaunchSettings(python=sys.executable), api_key_env=variable
        )
        running = RemoteServer(settings, role="student", model=STUDENT, run_directory=tmp_path, kind=ServerKind(keyed))
        async with running:
            told = await running.get("/told", dict, deadline=soon())
            assert told["key"] == f"Bearer {keys[-1]}"
    assert keys[0] == "a key"
    assert len(keys[1]) == 64


async def test_a_server_that_ends_by_itself_is_named_and_explained_by_its_log(tmp_path):
    async with server(tmp_path) as running:
        told = await running.get("/told", dict, deadline=soon())
        os.kill(told["pid"], signal.SIGKILL)
        with pytest.raises(ProcessDiedError, match=r"student \(pid \d+\) was killed by SIGKILL \(log: .*student.log\)"):
            await running.watch()
        assert not is_alive(told["worker"])


async def test_a_server_that_cannot_start_is_given_up_at_once_with_the_end_of_its_log(tmp_path):
    started = time.monotonic()
    with pytest.raises(
        ProcessDiedError, match="exited with code 1: RuntimeError: the engine failed, see above "
    ) as raised:
        await server(tmp_path, crash).__aenter__()
    assert time.monotonic() - started < 60  # a start may take ten times as long
    (note,) = raised.value.__notes__
    end = [*map(str, range(32, 40)), "RuntimeError: the engine failed, see above", "clean up: 1 object"]
    assert note.splitlines() == [
        f"  {line}" for line in ["a.b.MemoryError: no room", "MemoryError: no room", "...", *end]
    ]


async def test_a_server_that_never_answers_is_given_up_and_stopped_after_its_time(tmp_path):
    with pytest.raises(ProcessDiedError, match=r"not ready after 1 s .*raise student\.serving\.recovery_timeout_s"):
        await server(tmp_path, hang, start_timeout_s=1.0).__aenter__()


async def test_a_server_that_ends_of_its_first_request_is_what_is_told(tmp_path):
    async with server(tmp_path) as running:
        assert await running.alongside(running.get("/told", dict, deadline=soon()))
        with pytest.raises(ProcessDiedError, match="exited with code 7: ValueError: no such attention"):
            await running.alongside(running.get("/die", dict, deadline=soon()))


async def test_cancelling_a_start_stops_the_server(tmp_path):
    starting = asyncio.create_task(server(tmp_path, hang).__aenter__())
    log = tmp_path / "logs" / "student.log"
    while not (log.exists() and log.read_text()):  # noqa: ASYNC110 - a log tells nobody that it grew
        await asyncio.sleep(0.02)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any("time.sleep(600)" in line for line in _commands_of_this_test())


def _commands_of_this_test():
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                yield path.with_name("cmdline").read_text()
        except OSError:
            continue


@pytest.mark.parametrize(
    ("launch", "make_command", "expected"),
    [
        ({"python": "/no/such/python"}, serve, r"launch\.python: no interpreter '/no/such/python'; give that of the"),
        ({}, lambda *_: Command([], package="no_such_server"), r"launch\.python: no no_such_server in .*: install it"),
        (
            {"python": "/bin/false"},
            lambda *_: Command([], package="vllm"),
            r"/bin/false cannot look for vllm: exit code",
        ),
    ],
)
async def test_an_environment_without_the_server_is_one_line(tmp_path, launch, make_command, expected):
    with pytest.raises(ConfigError, match=expected) as raised:
        await server(tmp_path, make_command, **launch).__aenter__()
    assert str(raised.value).startswith("student.backend.launch.python")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "logs").exists()


async def test_a_directory_called_like_the_package_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "some_server").mkdir()
    monkeypatch.chdir(tmp_path)
    launched = LaunchedServer(
        LaunchSettings(python=sys.executable),
        Assignment("teacher", "teacher.backend.launch", "teacher", tmp_path, tmp_path / "log"),
        lambda *_: Command([], package="some_server"),
    )
    with pytest.raises(ConfigError, match="no some_server in"):
        await launched.__aenter__()


@pytest.mark.parametrize("prefix", [[], ["env"]])
async def test_a_server_imports_nothing_of_the_working_directory(tmp_path, monkeypatch, prefix):
    """Nor do the questions before it, here and on the far side of a prefix."""

    def of_module(settings, model, doorway):
        return Command([settings.python, "-m", "json.tool", "absent.json"], package="numpy")

    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(of_common_names(tmp_path / "theirs"))
    launched = LaunchedServer(
        LaunchSettings(python=sys.executable, prefix=prefix),
        Assignment("teacher", "teacher.backend.launch", "teacher", ROOT / STUDENT, tmp_path / "logs" / "log"),
        of_module,
    )
    async with launched:
        with pytest.raises(ProcessDiedError, match=r"No such file or directory: 'absent\.json'"):
            await launched.watch()


async def test_a_port_that_is_taken_is_refused_with_its_key(tmp_path):
    port = free_port()  # one that no connection is given meanwhile
    taken = pytest.raises(ConfigError, match=rf"student\.backend\.launch\.port={port}: taken by another program")
    with socket.create_server(("127.0.0.1", port)), taken:
        await server(tmp_path, port=port).__aenter__()
    async with server(tmp_path, port=port) as running:
        assert await running.get("/told", dict, deadline=soon())


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ({"tensor_parallel_size": 2, "devices": "0"}, "tensor_parallel_size=2 takes as many devices, but devices=0"),
        ({"port": 70000}, "less than or equal to 65535"),
        ({"memory_fraction": 1.5}, "less than or equal to 1"),
        ({"host": "10.0.0.5"}, "host: only with prefix"),
        ({"prefix": ["", "ssh"]}, "prefix: its first word is empty"),
        ({"prefix": ["env"], "environment": {"A B": "1"}}, "'A B' is no name of a variable"),
    ],
)
def test_settings_that_cannot_work_are_refused(launch, expected):
    with pytest.raises(pydantic.ValidationError, match=expected):
        LaunchSettings(python="python", **launch)


def test_a_single_device_may_be_written_as_a_number():
    assert LaunchSettings(python="python", devices=0).devices == "0"


@pytest.mark.parametrize("both", [{}, {"url": "http://h:1", "launch": LaunchSettings(python="python")}])
def test_a_server_is_either_attached_to_or_started(both):
    with pytest.raises(pydantic.ValidationError, match="give exactly one of url"):
        StudentServerSettings(kind="fake", **both)


async def test_a_backend_that_starts_no_server_says_so(tmp_path):
    with pytest.raises(ConfigError, match="fake starts no server; give its url"):
        await server(tmp_path, None).__aenter__()
