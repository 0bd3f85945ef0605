"""The pytest plugin of the contract: its options, the backend that it starts, and a table of what was found."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spot_async.base.processes.private_directory import private_directory
from spot_async.base.retry import CAPABILITIES_TIMEOUT_S
from spot_async.base.tasks import root_cause, while_alive
from spot_async.config import ModelConfig
from spot_async.config.loading import apply_override, validate_as
from spot_async.errors import ConfigError, SpotError
from spot_async.models.files import read_model
from spot_async.running.services import open_services
from spot_async.testing.conformance.contract import Check, Finding
from spot_async.testing.conformance.subject import Subject
from spot_async.types import WeightVersion

FIRST_VERSION = WeightVersion(0, 0)
CHECKED = pytest.StashKey[ModelConfig]()
OUTCOMES = ("passed", "failed", "skipped")  # in the order of the table


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "the contract of backends")
    add = group.addoption
    add("--backend", metavar="KIND", help="an installed backend, or `module:Class`")
    add("--model", metavar="DIR", help="the model it serves, which is also loaded here")
    add("--url", help="of a server that runs already")
    add("--launch-python", metavar="PYTHON", help="start a server with this interpreter")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="one of the backend's settings, e.g. slots=8")
    add("--role", choices=("student", "teacher"), default="student", help="whose part the backend plays")
    add("--tolerance", type=float, default=2e-5, help="nats between served and exact log-probabilities")
    add("--device", default="cpu", help="torch device of the model that is loaded here")
    add("--directory", type=Path, help="for logs and weights to update to; the server must be able to read it")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Read the options. A UsageError is one line, which names the key at fault."""
    option = session.config.getoption
    if hasattr(session.config, "workerinput"):
        raise pytest.UsageError("one backend is checked by one process: give pytest -n 0")
    if option("--backend") is None or option("--model") is None:
        raise pytest.UsageError("give --backend KIND and --model DIR")
    backend: dict[str, Any] = {"kind": option("--backend")}
    shortcuts = [("url", option("--url")), ("launch.python", option("--launch-python"))]
    try:
        for setting in [*(f"{key}={value}" for key, value in shortcuts if value is not None), *option("--set")]:
            apply_override(backend, setting)
        config = validate_as(ModelConfig, {"model": option("--model"), "backend": backend})
        read_model(option("--role"), config.model)
        _ = config.backend.place  # settings that name several servers have no one place, and say so
    except SpotError as error:
        raise pytest.UsageError(str(error)) from None
    session.config.stash[CHECKED] = config


@pytest.fixture(scope="session")
def run_check(request: pytest.FixtureRequest) -> Iterator[Callable[[Check], Finding]]:
    """Runs a check on the backend that the options describe, started or attached, and left with the weights it had.

    It raises the error of a server that ends meanwhile.
    """
    config, option = request.config.stash[CHECKED], request.config.getoption
    role: str = option("--role")

    async def host(directory: Path, ready: asyncio.Future[Subject]) -> None:
        async with open_services({role: config}, directory, is_used=False, directly=True) as services:
            subject = await make_subject(
                services.backends[role], config.model, directory, role=role, device=option("--device")
            )
            subject.tolerance_nats = option("--tolerance")
            ready.set_result(subject)
            await over.wait()

    async def start(directory: Path) -> tuple[Subject, asyncio.Task[None]]:
        ready = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(host(directory, ready))
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await task  # raises
        return ready.result(), task

    async def gone() -> None:
        await asyncio.shield(task)

    with contextlib.ExitStack() as stack:
        directory: Path = option("--directory") or stack.enter_context(private_directory("spot-async-"))
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        runner, over = stack.enter_context(asyncio.Runner()), asyncio.Event()
        try:
            subject, task = runner.run(start(directory.resolve()))
            yield lambda check: runner.run(while_alive(check.run(subject), gone))
            over.set()
            runner.run(gone())
        except (SpotError, BaseExceptionGroup) as error:
            pytest.exit(f"error: {root_cause(error)}", returncode=1)


async def make_subject(
    backend: Any,
    model: str,
    directory: Path,
    *,
    role: str = "student",
    device: str = "cpu",
) -> Subject:
    """Return a running backend, ready to be checked. If it may hold other weights, it is sent the model's own first."""
    from spot_async.testing.conformance.reference import Reference  # imports torch

    files = await asyncio.to_thread(read_model, role, model)
    reference = await asyncio.to_thread(Reference, files.directory, device)
    said = await backend.capabilities(deadline=asyncio.get_running_loop().time() + CAPABILITIES_TIMEOUT_S)
    if said.max_context_tokens <= 64:
        raise ConfigError(f"a context of {said.max_context_tokens} tokens is too short to be checked: raise it")
    subject = Subject(
        backend=backend,
        capabilities=said,
        files=files,
        reference=reference,
        version=said.version,
        scratch=directory / "weights",
        device=device,
    )
    if said.version is None and said.weight_update:
        await subject.update(files.directory, FIRST_VERSION)
    return subject


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a row for each check: its largest difference in nats, and what was found or why it was not asked."""
    terminalreporter.section("the contract")
    for report in [each for outcome in OUTCOMES for each in terminalreporter.getreports(outcome)]:
        if report.when != "call" and not report.skipped:
            continue
        properties = dict(report.user_properties)
        name = report.nodeid.rpartition("::test_")[2]
        nats = f"{properties['nats']:.1e}" if "nats" in properties else ""
        note = properties.get("note") or report.longrepr[2].removeprefix("Skipped: ")
        terminalreporter.write_line(f"{name:<24} {report.outcome:<8} {nats:>8}  {note}")
