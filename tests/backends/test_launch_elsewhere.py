"""Servers that a prefix starts: real processes behind a real ssh, or behind a shell that reads words as ssh's does."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pydantic
import pytest
from deadlines import soon
from launched_server import serve
from process_trees import gone, is_alive
from ssh_server import ssh_server

from spot_async.backends.local import LocalBackend
from spot_async.backends.shared.launch import free_port
from spot_async.backends.shared.launch_settings import LaunchSettings, check_together
from spot_async.backends.shared.remote import RemoteServer, ServerKind
from spot_async.backends.shared.settings import StudentServerSettings
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.config import ModelConfig, ServingConfig
from spot_async.errors import ConfigError, FarSideError, ProcessDiedError
from spot_async.running.services import core_shares

ROOT = Path(__file__).parents[2]
STUDENT = ROOT / "examples/running_sum/student"
JOINED = ["sh", "-c", 'eval "$*"; exit $?', "-"]  # as ssh does: the words are joined and read again


@pytest.fixture(autouse=True)
def _asked_often(monkeypatch):
    """Whether a server is ready: ours are within milliseconds."""
    monkeypatch.setattr("spot_async.backends.shared.launch.ASK_INTERVAL_S", 0.02)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    with ssh_server(tmp_path_factory.mktemp("ssh"), free_port()) as client:
        yield ["ssh", "-F", str(client), "there"]


def server(tmp_path, *, model=STUDENT, make_command=serve, **launch):
    settings = StudentServerSettings(kind="fake", launch=LaunchSettings(**{"python": sys.executable, **launch}))
    return RemoteServer(
        settings,
        role="student",
        model=str(model),
        run_directory=tmp_path,
        kind=ServerKind(make_command),
    )


async def test_a_server_behind_ssh_is_started_waited_for_spoken_to_and_stopped_with_its_workers(
    tmp_path, ssh, monkeypatch
):
    monkeypatch.setenv("OWN", "of the run's process")
    elsewhere = server(tmp_path, prefix=ssh, host="127.0.0.2", devices="1,0")
    async with elsewhere as running:
        assert running.url.startswith("http://127.0.0.2:")
        told = await running.get("/told", dict, deadline=soon())
        assert (told["devices"], told["own"], told["model"]) == ("1,0", "adapter", str(STUDENT))
        assert is_alive(told["worker"])
        watching = asyncio.create_task(running.watch())
        await asyncio.sleep(0)
    await watching
    assert not is_alive(told["pid"])
    assert not is_alive(told["worker"])
    assert not list(tmp_path.glob(".seen-*"))


@pytest.mark.long
async def test_a_server_that_is_killed_there_is_told_of_and_its_place_can_be_taken_at_once(tmp_path, ssh):
    port = free_port()
    for _ in range(2):
        async with server(tmp_path, prefix=ssh, port=port) as running:
            told = await running.get("/told", dict, deadline=soon())
            os.kill(told["pid"], signal.SIGKILL)
            with pytest.raises(
                ProcessDiedError, match=r"exited with code 137: error: the server was killed by SIGKILL"
            ):
                await running.watch()
            assert await gone([told["worker"]])


async def test_a_variable_that_is_to_be_passed_on_is_and_must_be_set(tmp_path, monkeypatch):
    async def told():
        async with server(tmp_path, prefix=JOINED, pass_environment=["OWN"]) as running:
            return await running.get("/told", dict, deadline=soon())

    with pytest.raises(ConfigError, match=r"student\.backend\.launch: the environment variable OWN is not set"):
        await told()
    monkeypatch.setenv("OWN", "passed")
    assert (await told())["own"] == "adapter"  # what the adapter needs comes last


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ({"prefix": ["no-such-ssh", "node2"]}, r"prefix: no program 'no-such-ssh' on this machine: install it"),
        ({"prefix": ["sh", "-c", "echo 'no route to node2' >&2; exit 255"]},
         r"prefix: sh -c '.*' reached no shell: exit code 255: no route to node2$"),
        ({"prefix": ["sh", "-c", "exec sh < /dev/null"]}, r"prefix: sh -c .* pass on its standard input .*need -i\)$"),
        ({"prefix": ["script", "-qe", "/dev/null", "-c"]}, r"prefix: .* gives a terminal, which would print keys"),
        ({"prefix": ["env"], "python": "/no/such/python"},
         r"python: no interpreter '/no/such/python' on the far side of env; give that of the environment"),
        ({"prefix": ["env"], "python": "/bin/false"}, r"python: /bin/false fails on the far side of env: exit code 1"),
        ({"prefix": ["env"], "host": "192.0.2.7"}, r"host=192\.0\.2\.7: the far side cannot listen there: Cannot"),
        ({"prefix": ["env"], "host": "no.such.host.invalid"}, r"host=no\.such\.host\.invalid: the far side does not"),
    ],
)  # fmt: skip
async def test_what_keeps_a_prefix_from_working_is_one_line_before_anything_starts(tmp_path, launch, expected):
    if launch["prefix"][0] == "script" and shutil.which("script") is None:
        pytest.skip("no program that gives a terminal")
    with pytest.raises(ConfigError, match=r"^student\.backend\.launch\." + expected) as raised:
        await server(tmp_path, **launch).__aenter__()
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, FarSideError) == ("reached no shell" in str(raised.value))
    assert not (tmp_path / "logs").exists()


async def test_a_package_that_the_far_side_lacks_and_a_port_that_is_taken_there_are_one_line(tmp_path):
    def other(settings, model, doorway):
        command = serve(settings, model, doorway)
        return type(command)(command.argv, package="no_such_server")

    with pytest.raises(ConfigError, match=r"launch\.python: no no_such_server in .* on the far side of env: install"):
        await server(tmp_path, prefix=["env"], make_command=other).__aenter__()
    port = free_port()
    taken = pytest.raises(ConfigError, match=rf"launch\.port={port}: taken by another program on the far side; give")
    with socket.create_server(("127.0.0.1", port)), taken:
        await server(tmp_path, prefix=["env"], port=port).__aenter__()


async def test_a_far_side_that_cannot_see_the_weights_or_the_model_is_refused_with_the_directory(tmp_path):
    """`unshare` gives the far side a file system in which a directory is hidden."""
    if os.geteuid():
        pytest.skip("hiding a directory needs root")
    hidden = tmp_path / "runs" / "one"
    hidden.mkdir(parents=True)
    prefix = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {tmp_path / 'runs'} && exec sh"]
    with pytest.raises(ConfigError) as raised:
        await server(hidden, prefix=prefix).__aenter__()
    assert str(raised.value) == (
        f"student.backend.launch.prefix: the far side does not see {hidden}, where new weights are written: share it "
        "under the same path, or set weights.transport=distributed (vLLM and SGLang)"
    )
    model = tmp_path / "runs" / "model"
    shutil.copytree(STUDENT, model)
    with pytest.raises(ConfigError, match=rf"launch\.prefix: the far side has no {model}: copy it there"):
        await server(tmp_path, prefix=prefix, model=model).__aenter__()


async def test_a_server_on_loopback_of_another_machine_is_refused_unless_its_port_may_be_forwarded(tmp_path):
    if os.geteuid():
        pytest.skip("looking like another machine needs root")
    other = tmp_path / "boot_id"
    other.write_text("another\n")
    prefix = ["unshare", "--mount", "sh", "-c", f"mount --bind {other} /proc/sys/kernel/random/boot_id && exec sh"]
    with pytest.raises(
        ConfigError, match=r"launch\.host=127\.0\.0\.1 means the other machine itself to unshare .*: give"
    ):
        await server(tmp_path, prefix=prefix).__aenter__()
    async with server(tmp_path, prefix=prefix, port=free_port()) as running:
        assert await running.get("/told", dict, deadline=soon())


def test_a_plan_looks_through_each_prefix_before_anything_starts():
    several = [{"python": sys.executable, "prefix": ["env"]}, {"python": "python3", "prefix": ["no-such-ssh", "node2"]}]
    settings = VllmBackend.Settings(launch=several)
    with pytest.raises(ConfigError, match=r"^teacher\.backend\.launch\.1\.prefix: no program 'no-such-ssh'"):
        settings.check_machine("teacher.backend")
    with pytest.raises(ConfigError, match=r"^teacher\.backend\.launch\.0\.python: no vllm in .* far side of env: inst"):
        settings.check_installed("teacher.backend")
    local = LocalBackend.Settings(launch={"prefix": ["env"]}, device="cuda:7")
    local.check_machine("student.backend")  # whether the other machine has GPUs is not known here
    local.check_installed("student.backend")


@pytest.mark.parametrize("prefix", [[], ["ssh", "node2"]])
def test_a_server_elsewhere_takes_no_cores_of_this_machine(prefix):
    models = {
        kind: ModelConfig(model="m", backend=backend, serving=ServingConfig(own_cores=1))
        for kind, backend in (
            ("student", LocalBackend.Settings(launch={"prefix": prefix} if prefix else None)),
            ("teacher", VllmBackend.Settings(launch={"python": "p", "prefix": prefix})),
        )
    }
    shares = core_shares(models)
    assert not shares.own if prefix else shares.own or shares.warnings


def test_servers_of_several_machines_may_have_the_same_devices():
    nodes = [LaunchSettings(python="p", prefix=["ssh", name], devices="0") for name in ("node1", "node2")]
    check_together(nodes)
    with pytest.raises(ValueError, match="devices: 0 is given to 2 servers"):
        check_together([*nodes, nodes[0]])


def test_weights_by_broadcast_need_an_address_that_the_far_side_reaches():
    settings = {"launch": {"python": "p", "prefix": ["ssh", "node2"], "host": "10.0.0.2"}}
    with pytest.raises(pydantic.ValidationError, match=r"weights\.address=127\.0\.0\.1 means the server's own machine"):
        VllmBackend.Settings(**settings, weights={"transport": "distributed"})
    VllmBackend.Settings(**settings, weights={"transport": "distributed", "address": "10.0.0.1"})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"launch": {"python": "p"}}, "prefix: required here"),
        ({"launch": {"prefix": ["env"]}, "port": 8000}, "port=8000: with launch it is launch.port"),
        ({"launch": [{"prefix": ["ssh", "a"]}, {"prefix": ["ssh", "b"]}], "replicas": 2}, "replicas=2: with several"),
    ],
)
def test_settings_of_our_own_server_elsewhere_that_cannot_work_are_refused(settings, expected):
    with pytest.raises(pydantic.ValidationError, match=expected):
        LocalBackend.Settings(**settings)


def test_each_launch_of_a_list_is_a_server_of_its_own():
    launches = [{"prefix": ["ssh", "a"], "port": 8000}, {"prefix": ["ssh", "b"], "host": "10.0.0.3", "port": 8000}]
    servers = LocalBackend.Settings(launch=launches).servers()
    assert [each.server_name("teacher") for each in servers] == ["teacher-1", "teacher-2"]
    assert [each.place.address for each in servers] == ["127.0.0.1:8000", "10.0.0.3:8000"]


def test_a_launch_of_a_server_found_by_url_is_refused():
    far = {"prefix": ["ssh", "node2"]}
    with pytest.raises(pydantic.ValidationError, match="launch: says how a server is started, but that at url runs"):
        LocalBackend.Settings(url="http://10.0.0.5:8000", launch=far)
    with pytest.raises(pydantic.ValidationError, match="give exactly one of url"):
        VllmBackend.Settings(url="http://10.0.0.5:8000", launch={"python": "p", **far})
