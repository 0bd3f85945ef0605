"""Runs our own server on threads of this process, for tests that are about its answers and not about its process.

Tests talk to it over its socket, as always. This saves the seconds in which a process of its own would import torch and
transformers. `test_serving.py` and the drills test real processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from prompt_server import PromptServer

from spot_async.backends.local.server import LocalServer
from spot_async.backends.shared.launch_settings import ProcessSettings
from spot_async.base.processes.private_directory import private_directory
from spot_async.base.tasks import Opened
from spot_async.serving.api import Credentials
from spot_async.serving.server import KEEP_ALIVE_S, _listen, _load
from spot_async.serving.settings import EngineSettings, ServeSettings


class ServerOnThread(Opened):
    """A server on threads, in place of the `LaunchedServer` of a `LocalServer`."""

    def __init__(self, server: LocalServer, launch: ProcessSettings) -> None:
        self._server = server
        self._port = launch.port
        self.url = "http://localhost" if launch.port is None else f"http://127.0.0.1:{launch.port}"
        self.uds: str | None = None

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        own, assignment = self._server._settings, self._server._assignment
        if self._port is None:
            self.uds = str(stack.enter_context(private_directory("spot-async-")) / "http")
        engine = {name: getattr(own, name) for name in EngineSettings.model_fields}
        settings = ServeSettings(model=str(assignment.model), uds=self.uds, port=self._port, **engine)
        assignment.log_path.parent.mkdir(parents=True, exist_ok=True)
        assignment.log_path.write_text("served by threads of the test\n")
        await stack.enter_async_context(_serving(settings, self._server.credentials))

    async def until_ready(self, ask: object) -> None:
        """Return: it is ready once it is entered."""

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()


def launch(server: LocalServer, settings: ProcessSettings) -> ServerOnThread:
    """Stand in for `LocalServer._launch`."""
    return ServerOnThread(server, settings)


@contextlib.contextmanager
def serving(model: Path, key: str | None = None, **own: Any) -> Iterator[str]:
    """Serve a model on a port of its own, for tests that start no backend. The value is its address."""
    settings = ServeSettings(model=str(model), port=0, **own)
    with asyncio.Runner() as runner:
        server = _serving(settings, Credentials(api_key=key))
        listener = runner.run(server.__aenter__())
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            runner.run(server.__aexit__(None, None, None))


@contextlib.asynccontextmanager
async def _serving(settings: ServeSettings, credentials: Credentials) -> AsyncIterator[socket.socket]:
    with _listen(settings) as listener:
        worker, app = _load(Path(settings.model), settings, credentials)
        http = PromptServer(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_keep_alive=KEEP_ALIVE_S))
        threads = [
            threading.Thread(target=worker.run, name="engine"),
            threading.Thread(target=http.run, kwargs={"sockets": [listener]}, name="http"),
        ]
        for thread in threads:
            thread.start()
        try:
            yield listener
        finally:
            http.end()
            worker.stop()
            for thread in threads:
                await asyncio.to_thread(thread.join)
