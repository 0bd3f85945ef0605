"""Names the servers of a role, and makes a backend object for each of them. It starts none.

A role has several where its backend's settings say so (`BackendSettings.servers`); each gets a backend object of its
own, which knows nothing of the others. Entering a fresh object starts or attaches the server again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from spot_async.base import registry
from spot_async.base.processes.resources import CoreShares, available_cores, share_cores
from spot_async.config import BackendSettings, ModelConfig
from spot_async.models.hub import local_path
from spot_async.protocols import Backend, Billed
from spot_async.spending.account import Account

MakeBackend: TypeAlias = Callable[[], Backend]  # a new object each time, not entered


def backend_factories(
    model: ModelConfig,
    role: str,
    run_directory: Path,
    account: Account | None = None,
    cores: CoreShares | None = None,
) -> dict[str, MakeBackend]:
    """Return, by the name of each of the role's servers, what makes a backend for it.

    The name is `student`, or `student-1`, `student-2`, ... where there are several. Logs and errors use it too. All
    backends of the role, those made anew too, charge one `account`.
    """
    backend = registry.load("backends", model.backend.kind)

    def factory(settings: BackendSettings) -> MakeBackend:
        def make() -> Backend:
            made: Backend = backend(settings, role=role, model=local_path(model.model), run_directory=run_directory)
            if account is not None and isinstance(made, Billed):
                made.account = account
            return made

        return make

    own = {} if cores is None else cores.own
    servers = {each.server_name(role): each for each in model.backend.servers()}
    return {name: factory(each.on_cores(own.get(name))) for name, each in servers.items()}


def core_shares(models: Mapping[str, ModelConfig]) -> CoreShares:
    """Return the cores of this process, shared out to the servers that these roles' backends start."""
    wanted = {
        each.server_name(role): model.serving.own_cores
        for role, model in models.items()
        for each in model.backend.servers()
        if each.runs_here
    }
    return share_cores(available_cores(), wanted)
