"""Nobody but the run may ask a server that the run started, or send it weights."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from deadlines import soon
from problem_files import FEW
from safetensors.torch import load_file, save_file
from starlette.responses import Response

import spot_async
from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.shared.launch import free_port
from spot_async.base import wire
from spot_async.base.processes.guard import process_tree
from spot_async.serving import api
from spot_async.serving.api import API_KEY_VARIABLE, Credentials
from spot_async.serving.http.app import build_app
from spot_async.serving.http.requests import Access, Api
from spot_async.types import ScoreRequest, WeightSnapshot, WeightVersion

ROOT = Path(__file__).parents[2]
ATTACKER = Path(__file__).parents[1] / "support" / "attacker.py"
PROMPT, RESPONSE = np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)
NATIVE = {"content-type": api.CONTENT_TYPE}
KEY = {"authorization": "Bearer secret"}


def snapshot(directory: Path | str, version: WeightVersion) -> WeightSnapshot:
    return WeightSnapshot(directory=str(directory), version=version)


@pytest.fixture(autouse=True)
def _no_key_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (("GET", "/health", {}), None),
        (("GET", "/health", {"host": "127.0.0.1:8000"}), None),
        (("GET", "/health", {"host": "LocalHost"}), None),
        (("GET", "/health", {"host": "[::1]:8000"}), None),
        (("GET", "/health", {"host": "page.example:8000"}), 403),
        (("GET", "/health", {"host": "127.0.0.1.page.example"}), 403),
        (("GET", "/health", {"host": "localhost", "origin": "http://page.example"}), 403),
        (("GET", "/health", {"host": "localhost", "origin": "null"}), 403),
        (("GET", "/health", {"origin": "null"}), 403),
        (("POST", "/v1/completions", {"host": "localhost:8000", "origin": "http://localhost:8000"}), None),
        (("POST", "/v1/completions", {"host": "localhost:8000", "origin": "http://localhost:3000"}), 403),
        (("POST", "/score", {**NATIVE}), None),
        (("POST", "/score", {}), 415),
        (("POST", "/score", {"content-type": "text/plain"}), 415),
        (("POST", "/score", {"content-type": "application/x-www-form-urlencoded"}), 415),
    ],
)
def test_what_a_web_page_can_have_sent_is_not_answered(request_: Any, status: int | None) -> None:
    v1 = Api("/v1", {}, lambda error: Response())
    refusal = Access(Credentials(), is_local=True, other_api=v1).refusal(*request_)
    assert (refusal and refusal.status) == status


def test_no_name_server_is_asked_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none answers, that takes seconds, in which the server does nothing else."""
    asked = []

    def ask(name: str) -> tuple[str, list[str], list[str]]:
        asked.append(name)
        return name, [], []

    monkeypatch.setattr(socket, "gethostbyaddr", ask)
    access = Access(Credentials(), is_local=True)
    for host in ("localhost", f"{socket.gethostname()}:8000", "127.0.0.1:8000", "[::1]"):
        assert access.refusal("GET", "/health", {"host": host}) is None
    assert not asked
    for host in ("page.example", "other.example", "page.example:8000"):
        assert access.refusal("GET", "/health", {"host": host}) is not None
    assert len(asked) <= 1  # none, if another test has asked


@pytest.mark.parametrize(
    ("shown", "status"),
    [(KEY, None), ({}, 401), ({"authorization": "secret"}, 401), ({"authorization": "Bearer wrong"}, 401)],
)
def test_a_server_for_other_machines_is_asked_by_any_name_of_its_own_with_its_key(
    shown: dict[str, str], status: int | None
) -> None:
    refusal = Access(Credentials("secret"), is_local=False).refusal("GET", "/health", {"host": "gpu-7", **shown})
    assert (refusal and refusal.status) == status


@pytest.mark.parametrize(
    "path",
    [
        api.UPDATE_WEIGHTS,
        f"{api.UPDATE_WEIGHTS}%0A",
        f"{api.UPDATE_WEIGHTS}/",
        api.LOAD_ADAPTER,
        api.UNLOAD_ADAPTER,
    ],
)
async def test_who_has_the_key_but_not_the_token_gives_no_weights_however_the_path_is_written(path: str) -> None:
    worker: Any = SimpleNamespace(version=WeightVersion(0, 1))  # which cannot read weights, let alone take them
    app = build_app(worker, None, credentials=Credentials("secret", "token"), is_local=True)  # type: ignore[arg-type]
    update = api.UpdateRequest(snapshot=snapshot("evil", WeightVersion(0, 1)), timeout_s=9.0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        reply = await client.post(path, content=wire.encode(update), headers={**NATIVE, **KEY}, follow_redirects=True)
    assert reply.status_code == 403
    assert wire.decode(reply.content, api.ErrorReply).message.startswith("takes new weights only from the run")


def test_the_key_is_the_users_where_one_is_set_and_else_made_for_each_server(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Credentials.of_new_server(), Credentials.of_new_server()
    assert len({first.api_key, second.api_key, first.update_token, second.update_token}) == 4
    assert str(first) == "Credentials()"
    monkeypatch.setenv(API_KEY_VARIABLE, "chosen")
    third = Credentials.of_new_server()
    assert third.api_key == "chosen"
    assert third.update_token not in (None, "chosen")


@pytest.mark.long
async def test_a_started_server_has_its_secrets_where_only_its_user_can_read_them(
    random_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, other, port = random_model(seed=1), random_model(seed=2), free_port()
    backend = LocalBackend(
        LocalBackend.Settings(port=port), role="student", model=str(model), run_directory=tmp_path / "run"
    )
    (tmp_path / "run").mkdir()
    url = f"http://127.0.0.1:{port}"
    async with backend:
        child: Any = backend._server._launched._child
        environment = dict(each.split("=", 1) for each in _read(child.pid, "environ") if "=" in each)
        secrets = [environment["SPOT_ASYNC_API_KEY"], environment["SPOT_ASYNC_UPDATE_TOKEN"]]
        for pid in process_tree(child.pid):
            assert not any(secret in word for secret in secrets for word in _read(pid, "cmdline"))
        assert not any(secret in repr(backend._server.credentials) for secret in secrets)

        before = await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=0)
        update = wire.encode(api.UpdateRequest(snapshot=snapshot(other, WeightVersion(0, 0)), timeout_s=9.0))
        async with httpx.AsyncClient(base_url=url) as client:
            shown = {"Authorization": f"Bearer {secrets[0]}"}
            assert (await client.get(api.HEALTH)).status_code == 401
            assert (await client.get(api.HEALTH, headers=shown)).status_code == 200  # by hand, with the key
            for headers, status in (({}, 401), (shown, 403), ({**shown, api.UPDATE_TOKEN_HEADER: secrets[0]}, 403)):
                reply = await client.post(api.UPDATE_WEIGHTS, content=update, headers={**NATIVE, **headers})
                assert reply.status_code == status
        after = await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=0)
        np.testing.assert_array_equal(after.logprobs, before.logprobs)
        await backend.update_weights(snapshot(other, WeightVersion(0, 1)), deadline=soon())
        new = await backend.score(ScoreRequest(PROMPT, RESPONSE, 1.0, soon()), top_k=0)
        assert not np.array_equal(new.logprobs, before.logprobs)
    _assert_in_no_file(tmp_path / "run", secrets)


@pytest.mark.long
def test_another_process_cannot_replace_the_student_of_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    servers_on_threads: None,
    trainer_on_thread: None,
) -> None:
    monkeypatch.chdir(ROOT)
    made: list[Credentials] = []
    make = Credentials.of_new_server
    monkeypatch.setattr(Credentials, "of_new_server", lambda: made.append(make()) or made[-1])
    evil, port = _poisoned(ROOT / "examples" / "running_sum" / "student", tmp_path / "evil"), free_port()
    command = [sys.executable, str(ATTACKER), f"http://127.0.0.1:{port}", str(evil)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        try:
            assert attacker.stdout.readline() == "ready\n"
            few = ["iterations=2", "batch_size=4", "mini_batch_size=4", "warmup_iterations=0"]
            short = [FEW, "policy=opd", "evaluation=null", "sampling.max_response_tokens=24"]
            places = [f"run.directory={tmp_path / 'run'}", f"student.backend.port={port}"]
            spot_async.run("configs/quickstart.yaml", [*places, *short, *(f"training.{each}" for each in few)])
            answered = json.loads(attacker.communicate(timeout=300)[0])
        finally:
            attacker.kill()
    assert answered.keys() == {"health 401", "update 401"}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    for each in metrics:  # what was sampled, was sampled from the weights that were trained
        assert each["train/behavior_kl"] < 1e-6
        assert each["train/mismatch_max"] < 1e-3
    secrets = [secret for each in made for secret in each.environment.values()]
    assert len(secrets) == 4  # of student and teacher
    _assert_in_no_file(tmp_path / "run", secrets)
    printed = "".join(capfd.readouterr())
    assert not any(secret in printed for secret in secrets)


def _poisoned(model: Path, copy: Path) -> Path:
    """A model of the same shapes that no log-probability would forgive."""
    shutil.copytree(model, copy)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(copy / "model.safetensors")
    noisy = {name: each + 0.3 * torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    save_file(noisy, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def _assert_in_no_file(directory: Path, secrets: list[str]) -> None:
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files for secret in secrets if secret.encode() in path.read_bytes()] == []


def _read(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text().split("\0")
