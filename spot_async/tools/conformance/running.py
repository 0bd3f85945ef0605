"""Starts or attaches a backend, checks it, and leaves it with the weights that it had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from spot_async.base.retry import CAPABILITIES_TIMEOUT_S
from spot_async.config import ModelConfig
from spot_async.errors import ConfigError
from spot_async.models.files import read_model
from spot_async.running.services import open_services
from spot_async.tools.conformance.checks import Check, Outcome, run_checks
from spot_async.tools.conformance.contract import CHECKS
from spot_async.tools.conformance.subject import Subject
from spot_async.types import WeightVersion

FIRST_VERSION = WeightVersion(0, 0)


async def check_backend(
    config: ModelConfig,
    directory: Path,
    *,
    role: str = "student",
    tolerance_nats: float = 2e-5,
    device: str = "cpu",
    checks: Iterable[Check] = CHECKS,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Check the backend that `config` describes against the model directory that it names.

    Logs and the weights to update to are written under `directory`, where the server must be able to read.
    Raises ConfigError or DataError for what cannot be started, ProcessDiedError when the server ends.
    """
    read_model(role, config.model)  # raises for a bad directory before anything is started
    # Settings that name several servers have no one place, and say so.
    _ = config.backend.place
    async with open_services({role: config}, directory, is_used=False, directly=True) as services:
        subject = await make_subject(
            services.backends[role], config.model, directory, role=role, tolerance_nats=tolerance_nats, device=device
        )
        return await run_checks(subject, checks, on_outcome)


async def make_subject(
    backend: Any,
    model: str,
    directory: Path,
    *,
    role: str = "student",
    tolerance_nats: float = 2e-5,
    device: str = "cpu",
) -> Subject:
    """Return a running backend, ready to be checked. If it may hold other weights, it is sent the model's own first."""
    from spot_async.tools.conformance.reference import Reference  # imports torch

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
        tolerance_nats=tolerance_nats,
        device=device,
    )
    if said.version is None and said.weight_update:
        await subject.update(files.directory, FIRST_VERSION)
    return subject
