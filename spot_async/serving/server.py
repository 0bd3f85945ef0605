"""Runs one server process: check the settings, take the address, load the model, serve, stop.

Wrong settings are found before torch is imported, and reported in one line. SIGTERM and SIGINT stop the server. If the
engine crashes, the server ends with the engine's own trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spot_async.base.addresses import is_loopback
from spot_async.base.connection_room import BACKLOG, listening_at
from spot_async.base.processes.resources import (
    SERVER_COLLECTION_THRESHOLD,
    open_file_limit,
    raise_open_file_limit,
    tune_gc,
    tune_malloc,
    without_gc,
)
from spot_async.errors import ConfigError, DataError
from spot_async.models.small_files import refuse_foreign_files
from spot_async.serving.api import API_KEY_VARIABLE, Credentials
from spot_async.serving.http.connections import HttpServer
from spot_async.serving.settings import ServeSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from spot_async.serving.engine.worker import EngineWorker

KEEP_ALIVE_S = 60  # longer than clients', because a server that closes first can cut off a request on its way

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def serve(settings: ServeSettings) -> None:
    """Serve until a signal. Raises `DataError` or `ConfigError`, in one line, for whatever cannot be served."""
    directory = _check_model_directory(Path(settings.model))
    credentials = Credentials.of_environment()
    if credentials.api_key is None and not _is_local(settings):
        raise ConfigError(
            f"host={settings.host} is reachable from elsewhere: set {API_KEY_VARIABLE} to a secret key first"
        )
    with _listen(settings) as listener:
        tune_malloc()
        raise_open_file_limit()
        with without_gc():
            worker, app = _load(directory, settings, credentials)
        tune_gc(SERVER_COLLECTION_THRESHOLD)
        _say(f"serving {directory} with {_computes_with(settings)} on {_address(settings, listener)}")
        asyncio.run(_run(worker, app, listener))
        _say("stopped")


def _load(directory: Path, settings: ServeSettings, credentials: Credentials) -> tuple[EngineWorker, ASGIApp]:
    import torch  # here, because it takes seconds, and malloc must be tuned before

    from spot_async.models.vocabulary import end_token_ids, load_tokenizer, tokenizer_fingerprint
    from spot_async.serving.engine.engine import Engine
    from spot_async.serving.engine.fused import fused
    from spot_async.serving.engine.model import load_model, quiet_transformers
    from spot_async.serving.engine.worker import EngineWorker
    from spot_async.serving.http.app import build_app
    from spot_async.serving.openai.app import openai_v1
    from spot_async.serving.openai.completion import ServedModel, TokenTexts
    from spot_async.types import Capabilities

    quiet_transformers()
    torch.set_num_threads(settings.threads)
    tokenizer = load_tokenizer(directory)
    model = fused(load_model(directory, settings))
    engine = Engine(model, settings)
    worker = EngineWorker(engine)
    capabilities = Capabilities(
        model=settings.model,
        vocab_size=model.vocab_size,
        vocab_fingerprint=tokenizer_fingerprint(tokenizer),
        max_context_tokens=model.max_context_tokens,
        max_top_k=engine.limits.max_top_k,
        max_generation_top_k=engine.limits.max_top_k,
        exact_entropy=True,
        candidate_logprobs="batched",
        weight_update=(takes_weights := engine.parameters.match(directory)),
        in_flight_updates=takes_weights,
        weight_transport="disk",
        dtype=settings.dtype,
        slots=settings.slots,
        prefix_caching=False,  # a prefix is read once for requests that wait together, but is not kept
    )
    served = ServedModel(
        name=directory.absolute().name,
        directory=settings.model,
        max_context_tokens=model.max_context_tokens,
        max_logprobs=engine.limits.max_top_k,
        end_token_ids=tuple(end for end in end_token_ids(directory, tokenizer) if end < model.vocab_size),
        tokenizer=tokenizer,
        token_texts=TokenTexts(tokenizer),
    )
    openai = openai_v1(worker, served, max_completions=settings.slots + settings.max_waiting)
    app = build_app(worker, capabilities, credentials=credentials, is_local=_is_local(settings), other_api=openai)
    return worker, app


def _computes_with(settings: ServeSettings) -> str:
    import torch  # here, as above

    return torch.backends.cpu.get_cpu_capability() if settings.device == "cpu" else settings.device


async def _run(worker: EngineWorker, app: ASGIApp, listener: socket.socket) -> None:
    server = _Server(app, places=open_file_limit() // 4, patience_s=KEEP_ALIVE_S, log_level="warning")
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(worker.run), name="engine")
        try:
            await server.serve(sockets=[listener])
        finally:
            worker.stop()


class _Server(HttpServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture signals. Unlike the base's, do not raise them again afterwards: there is still a socket to remove."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def _check_model_directory(directory: Path) -> Path:
    if not directory.is_dir():
        raise DataError(f"{directory}: no such model directory")
    refuse_foreign_files(directory)
    if not (directory / "config.json").is_file():
        raise DataError(f"{directory}: has no config.json, so it is no Hugging Face model directory")
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise DataError(f"{directory}: has no tokenizer: save it there with tokenizer.save_pretrained")
    return directory


def _is_local(settings: ServeSettings) -> bool:
    return settings.uds is not None or is_loopback(settings.host)


@contextlib.contextmanager
def _listen(settings: ServeSettings) -> Iterator[socket.socket]:
    """Open the listening socket. This comes before loading the model, to find an address in use at once."""
    path = settings.uds
    try:
        listener = _unix_listener(path) if path is not None else listening_at(settings.host, settings.port or 0)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "in use by another process: choose another" if taken else error.strerror or error
        raise ConfigError(f"cannot listen on {_address(settings)}: {reason}") from error
    try:
        yield listener
    finally:
        listener.close()
        if path is not None:
            Path(path).unlink(missing_ok=True)


def _address(settings: ServeSettings, listener: socket.socket | None = None) -> str:
    """Say where `listener` listens, or where it should. With a listener, port 0 becomes the port it was given."""
    if settings.uds is not None:
        return settings.uds
    return f"{settings.host} port {listener.getsockname()[1] if listener else settings.port}"


def _unix_listener(path: str) -> socket.socket:
    """Open a Unix socket for this user only. Replaces a file left by a server that has gone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket() and not _answers(path):
            Path(path).unlink()
        mask = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(mask)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        return True


def _say(line: str) -> None:
    """Write one line to the log. If the disk is full it is lost, and serving continues."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
