"""The process that broadcasts published weights: rank 0 of a group whose other ranks are an inference server's.

`weight_transport.WeightSender` starts it, and sends it commands over a Unix socket. The group's ranks meet at a store
that listens on one address only. Whoever can reach the store can take part, so it is on loopback unless told otherwise.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from spot_async.base.processes.exits import exit_with_parent

if __name__ == "__main__":
    exit_with_parent()  # first, because importing torch takes seconds

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import zmq
from safetensors import safe_open
from torch.cuda import nccl

from spot_async.base import wire
from spot_async.base.addresses import group_interfaces
from spot_async.base.processes.resources import raise_open_file_limit
from spot_async.base.text import first_line
from spot_async.models.weight_files import weight_files

from .weight_transport import (
    Answer,
    Broadcast,
    Command,
    Join,
    JoinNccl,
    Mint,
    endpoint,
)


class Sender:
    """Rank 0 of the group."""

    def __init__(self, store: Any, backend: str, device: torch.device) -> None:
        self._store = store
        self._backend = backend
        self._device = device
        self._send: Callable[[torch.Tensor], object]  # broadcasts to all other ranks

    def handle(self, command: Command) -> Answer:
        try:
            match command:
                case Mint():
                    return Answer(self._mint())
                case Join():
                    self._join(command)
                case JoinNccl():
                    self._join_nccl(command)
                case Broadcast():
                    self._broadcast(command)
        except (OSError, RuntimeError, ValueError, KeyError) as error:  # torch raises RuntimeErrors
            return Answer(error=first_line(error))
        return Answer()

    def _join(self, command: Join) -> None:
        # The servers make their group with this private function, and ranks meet only under the same keys. It does what
        # init_process_group does, but for a group that is not the process's default.
        make_group = cast(Any, c10d)._new_process_group_helper
        group, _ = make_group(
            command.world_size,
            0,
            [],
            dist.Backend(self._backend),
            cast(Any, dist).PrefixStore(command.group, self._store),
            group_name=command.group,
            timeout=c10d.default_pg_timeout,  # the parent waits less long, and then ends this process
        )
        cast(Any, c10d)._world.pg_group_ranks[group] = {rank: rank for rank in range(command.world_size)}
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._send = partial(dist.broadcast, src=0, group=group)

    def _mint(self) -> bytes:
        if not dist.is_nccl_available():
            raise RuntimeError("this torch is built without NCCL")
        return bytes(cast(Any, nccl).unique_id())

    def _join_nccl(self, command: JoinNccl) -> None:
        """Join as rank 0 in the way that a vLLM worker does. Written from vLLM's and torch's sources, never run."""
        torch.cuda.set_device(self._device)
        communicator = cast(Any, nccl).init_rank(command.world_size, command.unique_id, 0)
        # The workers begin with this operation, and wait for it.
        cast(Any, nccl).all_reduce([torch.zeros(1, device=self._device)], comms=[communicator])
        torch.cuda.synchronize(self._device)
        self._send = lambda tensor: nccl.broadcast([tensor], 0, comms=[communicator])

    def _broadcast(self, command: Broadcast) -> None:
        file_of = {}
        for path in weight_files(Path(command.directory)):
            file: Any = safe_open(path, framework="pt", device=str(self._device))
            file_of.update(dict.fromkeys(file.keys(), file))
        for name in command.names:
            tensor = file_of[name].get_tensor(name).contiguous()
            self._send(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def listen(address: str, port: int) -> Any:  # a TCPStore, which torch has no types for
    """Open the store at which ranks meet, on one address. torch alone would listen on every interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return cast(Any, dist).TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store owns it from here on
        use_libuv=False,  # the libuv store accepts no listening socket
    )


def main(channel_directory: str, backend: str, device: str, address: str, port: str) -> None:
    raise_open_file_limit()
    os.environ.update(group_interfaces(address))
    with zmq.Context() as context, context.socket(zmq.PAIR) as channel:
        channel.linger = 0
        channel.connect(endpoint(channel_directory))
        try:
            store = listen(address, int(port))
        except (OSError, RuntimeError) as error:
            channel.send(wire.encode(Answer(error=f"cannot listen on {address}:{port}: {first_line(error)}")))
            channel.recv()  # the parent ends this process
            return
        channel.send(wire.encode(Answer(store.port)))
        sender = Sender(store, backend, torch.device(device))
        while True:
            command: Command = wire.decode(channel.recv(), cast(Any, Command))
            channel.send(wire.encode(sender.handle(command)))


if __name__ == "__main__":
    main(*sys.argv[1:])
