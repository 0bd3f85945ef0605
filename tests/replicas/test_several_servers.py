"""Several servers of a role by configuration: which settings there are, what is refused, what each server is called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.shared.settings import StudentServerSettings
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.checks.served import check_places
from spot_async.config import Config, ModelConfig, ServingConfig
from spot_async.config.loading import dump_yaml, load_config, validate_as
from spot_async.errors import ConfigError
from spot_async.running.services import backend_factories
from spot_async.types import PolicyNeeds

ROOT = Path(__file__).parents[2]
NEEDS = PolicyNeeds(teacher_top_k=1)


def config(student: str = "local", teacher: str = "local", reference: str | None = None) -> Config:
    overrides = [f"student.backend={student}", f"teacher.backend={teacher}"]
    more = [] if reference is None else [f"reference={{model: m, backend: {reference}}}"]
    return load_config(ROOT / "configs" / "quickstart.yaml", [*overrides, *more])


def refused(**roles: str) -> str:
    with pytest.raises(ConfigError) as raised:
        check_places(config(**roles), NEEDS)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def names(model: ModelConfig, role: str) -> list[str]:
    return [each.server_name(role) for each in model.backend.servers()]


def test_one_url_is_one_server_and_a_list_is_one_each() -> None:
    alone = config("{kind: vllm, url: 'http://a:1/v1/'}").student
    assert [each.url for each in alone.backend.servers()] == ["http://a:1"]  # type: ignore[attr-defined]
    assert names(alone, "student") == names(config("{kind: vllm, url: [http://a:1]}").student, "student") == ["student"]
    several = config("{kind: vllm, url: [http://a:1,http://b:1/v1], api_key_env: KEY, top_k: 7}").student
    made = several.backend.servers()
    assert [each.url for each in made] == ["http://a:1", "http://b:1"]  # type: ignore[attr-defined]
    assert {(each.api_key_env, each.top_k) for each in made} == {("KEY", 7)}  # type: ignore[attr-defined]
    assert names(several, "student") == ["student-1", "student-2"]


def test_a_list_by_override_and_a_saved_configuration_mean_the_same(tmp_path: Path) -> None:
    launch = f"{{python: {sys.executable}, devices: 0}}, {{python: {sys.executable}, devices: 1, dtype: float32}}"
    by_override = load_config(
        ROOT / "configs" / "quickstart.yaml",
        [
            "student.backend.kind=vllm",
            "student.backend.url=[http://a, http://b]",
            f"teacher.backend={{kind: sglang, launch: [{launch}]}}",
        ],
    )
    assert names(by_override.student, "student") == ["student-1", "student-2"]
    assert [each.launch.devices for each in by_override.teacher.backend.servers()] == ["0", "1"]  # type: ignore
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_yaml(by_override))
    assert load_config(saved) == by_override


VLLM = [
    ("url: [http://a:1, http://b:1, http://a:1/v1]", ".url: http://a:1 is given twice: name each server once"),
    ("url: ['http://127.0.0.1:1', 'http://localhost:1/']", ".url: http://localhost:1/ is given twice"),
    ("url: [http://a, b]", ".url.1: is no address of a server: give http://host:port"),
    ("url: []", ".url: list should have at least 1 item"),
    ("url: 3", ".url: input should be a valid string, but got 3"),
    ("url: [http://a], launch: [{python: p}]", ": give exactly one of url"),
    ("launch: [{python: p}, {python: p, prt: 7}]", ".launch.1.prt: unknown key; did you mean `port`"),
    ("launch: [{python: p, port: 7}, {python: p, port: 7}]", ".launch: port=7 is given twice"),
    ("launch: [{python: p, devices: '0,1'}, {python: p, devices: 1}]", ".launch: devices: 1 is given to 2 servers"),
    ("launch: [{python: p, devices: 0}, {python: p}]", ".launch: devices: a server without this key uses all devices"),
    (
        "url: [http://a, http://b], weights: {transport: distributed, port: 7, address: h}",
        ": weights.port=7: each of 2 servers needs another port",
    ),
]
OTHERS = [
    ("kind: openai, launch: {python: p}", ": launch: kind openai starts no server: give the url"),
    ("kind: openai", ".url: required, but not given"),
    ("kind: local, replicas: 2, port: 7", ": port=7: one port for 2 servers (replicas)"),
    ("kind: local, url: http://a, slots: 8", ": slots: says how a server is started"),
    ("kind: local, url: [http://a], replicas: 2", ": replicas: says how a server is started"),
]


@pytest.mark.parametrize(("given", "expected"), [*((f"kind: vllm, {one}", two) for one, two in VLLM), *OTHERS])
def test_what_several_servers_cannot_share_is_one_line_with_its_key(given: str, expected: str) -> None:
    assert refused(student=f"{{{given}}}").startswith(f"student.backend{expected}")


def test_one_device_serves_two_of_a_role_only_by_shares_of_it() -> None:
    share = "{{python: p, devices: 0, memory_fraction: {}}}"
    assert "is given to 2 servers" in refused(
        student=f"{{kind: vllm, launch: [{share.format(0.5)}, {share.format(0.6)}]}}"
    )
    both = config(f"{{kind: vllm, launch: [{share.format(0.5)}, {share.format(0.4)}]}}")
    assert names(both.student, "student") == ["student-1", "student-2"]
    config("{kind: vllm, launch: [{python: p}, {python: p}]}")  # on machines without devices


def test_every_server_of_a_role_has_a_place_that_no_student_has() -> None:
    students = "{kind: vllm, url: [http://a:1, http://b:1]}"
    line = refused(student=students, teacher="{kind: sglang, url: [http://c:1, http://b:1]}")
    assert line.startswith("teacher.backend.url=http://b:1: the student is served there")
    launches = ", ".join(f"{{python: {sys.executable}, port: {port}}}" for port in (8123, 8124))
    line = refused(student="{kind: local, port: 8124}", teacher=f"{{kind: sglang, launch: [{launches}]}}")
    assert line.startswith("teacher.backend.launch.port=8124: the student is served there")
    missing = f"{{kind: vllm, launch: [{{python: /no/python}}, {{python: {sys.executable}}}]}}"
    with pytest.raises(ConfigError, match=r"^student\.backend\.launch\.0\.python: no interpreter '/no/python'"):
        config(missing).student.backend.check_installed("student.backend")
    check_places(config(students, "{kind: local, url: [http://c:1, http://d:1]}"), NEEDS)


def test_each_server_has_a_backend_of_its_own_under_a_name_of_its_own(tmp_path: Path) -> None:
    three = {"model": "/no/model", "backend": {"kind": "local", "replicas": 3}}
    model = validate_as(ModelConfig, {**three, "serving": {"recovery_timeout_s": 1800.0}})
    factories = backend_factories(model, "teacher", tmp_path)
    assert list(factories) == ["teacher-1", "teacher-2", "teacher-3"]
    one = factories["teacher-2"]()
    assert isinstance(one, LocalBackend)
    assert one is not factories["teacher-2"]()
    assert one._server._assignment.log_path == tmp_path / "logs" / "teacher-2.log"
    assert one._server._assignment.start_timeout_s == 1800.0
    assert ServingConfig(recovery_timeout_s=5.0).start_timeout_s == 600.0, "a first start has its ten minutes"
    alone = model.model_copy(update={"backend": LocalBackend.Settings()})
    assert list(backend_factories(alone, "teacher", tmp_path)) == ["teacher"]


def test_a_backend_takes_one_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 servers in place of one"):
        assert StudentServerSettings(kind="fake", url=["http://a", "http://b"]).where
    with pytest.raises(ConfigError, match="2 servers in place of one"):
        LocalBackend(LocalBackend.Settings(replicas=2), role="student", model="m", run_directory=tmp_path)
    assert VllmBackend.Settings(url="http://a").servers()[0].where == "http://a"


def test_replicas_of_one_launch_get_devices_of_their_own() -> None:
    def servers(*overrides: str) -> list[Any]:
        config = load_config(
            ROOT / "configs" / "quickstart.yaml", ["student.backend={kind: vllm, launch: {python: p}}", *overrides]
        )
        return [each.launch for each in config.student.backend.servers()]

    assert [each.devices for each in servers("student.backend.launch.replicas=3")] == ["0", "1", "2"]
    by_two = servers(
        "student.backend.launch.replicas=2",
        "student.backend.launch.tensor_parallel_size=2",
        "student.backend.launch.devices='4,5, 6,7'",
    )
    assert [each.devices for each in by_two] == ["4,5", "6,7"]
    placed = servers(
        "student.backend.launch.replicas=2", "student.backend.launch.resources={GPU: 1}", "cluster.kind=ray"
    )
    assert [each.devices for each in placed] == [None, None]
    with pytest.raises(ConfigError, match="replicas=3 take 3 devices, but devices=0,1 names 2"):
        servers("student.backend.launch.replicas=3", "student.backend.launch.devices='0,1'")
    with pytest.raises(ConfigError, match="port=8000 is given twice"):
        servers("student.backend.launch.replicas=2", "student.backend.launch.port=8000")


def test_an_override_reaches_each_of_a_list_or_one() -> None:
    launches = "student.backend={kind: vllm, launch: [{python: p, devices: '0'}, {python: p, devices: '1'}]}"
    prefixed = ["student.backend.launch.prefix=[ssh, h]", "student.backend.launch.host=10.0.0.2"]
    one = ["student.backend.launch.1.dtype=float32", "student.backend.launch.environment.A=b"]
    servers = [
        each.launch
        for each in load_config(
            ROOT / "configs" / "quickstart.yaml", [launches, *prefixed, *one]
        ).student.backend.servers()
    ]
    assert [each.prefix for each in servers] == [["ssh", "h"]] * 2
    assert [each.dtype for each in servers] == ["auto", "float32"]
    assert [each.environment for each in servers] == [{"A": "b"}] * 2
    with pytest.raises(ConfigError, match=r"data\.train is a value, not a section"):
        load_config(ROOT / "configs" / "quickstart.yaml", ["data.train=[a, b]", "data.train.path=c"])
