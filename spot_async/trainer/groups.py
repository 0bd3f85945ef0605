"""Forms groups of ranks that no stranger is part of.

While a group forms, gloo takes whoever connects first and says a small number for a rank. Ranks know each other by the
store, which strangers do not reach. So they wait there until all are about to form the group, which keeps the moment
short. Then each proves to each that it reads the same store. A group that somebody disturbed is formed again.
"""

from __future__ import annotations

import hmac
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]  # public

from spot_async.errors import TrainerError

T = TypeVar("T")

ATTEMPTS = 5
PROOF_TIMEOUT = timedelta(seconds=30)
# As long as one rank may need longer than another to come here. Deadlines are the orchestrator's.
WAITING_TIMEOUT = timedelta(days=20)


class Ranks:
    """All ranks of a trainer, who meet at a store. All call its methods alike."""

    def __init__(self, store: Store, rank: int, ranks: int) -> None:
        self._store = PrefixStore("forming", store)
        self._rank = rank
        self._ranks = ranks

    @classmethod
    def of_the_world(cls) -> Ranks:
        """Return those of the current process group."""
        return cls(cast(Any, c10d)._get_default_store(), dist.get_rank(), dist.get_world_size())

    def form(self, make: Callable[[], T], groups_of: Callable[[T], Sequence[ProcessGroup]]) -> T:
        """Return what `make` makes of groups, once all ranks are there. It is called again if one has a stranger in it.

        Raises `TrainerError` if that happens each time.
        """
        for _ in range(ATTEMPTS):
            key = self._agree_on_key()
            made = make()
            groups = groups_of(made)
            # All of them in any case, since the others wait in each.
            found = [_is_ours(group, key) for group in groups if isinstance(group, ProcessGroup)]
            if self._all_say(all(found)):
                return made
            sys.stderr.write("a stranger spoke to the ports of a process group: it is formed again\n")
            for group in groups:
                dist.destroy_process_group(group)
        raise TrainerError(f"strangers spoke to the ports of the process group {ATTEMPTS} times while it was formed")

    def _agree_on_key(self) -> bytes:
        """Wait for all ranks, and return random bytes that they alone know."""
        name = f"key {self._store.add(f'keys of {self._rank}', 1)}"
        if self._rank == 0:
            self._store.set(name, secrets.token_hex(32))
        self._all_say(True)
        return bytes(self._store.get(name))

    def _all_say(self, yes: bool) -> bool:
        """Wait until all ranks have said something, and return whether it was yes."""
        name = f"question {self._store.add(f'answers of {self._rank}', 1)}"
        if not yes:
            self._store.add(f"{name}: no", 1)
        if self._store.add(f"{name}: all", 1) == self._ranks:
            self._store.set(f"{name} is answered", "")
        self._store.wait([f"{name} is answered"], WAITING_TIMEOUT)
        return self._store.add(f"{name}: no", 0) == 0


def _is_ours(group: ProcessGroup, key: bytes) -> bool:
    """Return whether all members know the key."""
    if torch.device("cpu") not in group._device_types:
        return True  # it has no gloo
    rank, ranks = group.rank(), group.size()
    said = _tensor([_proof(key, rank, to) for to in range(ranks)])
    expected = _tensor([_proof(key, of, rank) for of in range(ranks)])
    heard = torch.empty_like(expected)
    options = dist.AllToAllOptions()
    options.timeout = PROOF_TIMEOUT
    try:
        group.alltoall_base(heard, said, [], [], options).wait()
    except RuntimeError:  # somebody closed the connection, or said nothing
        return False
    return torch.equal(heard, expected)


def _proof(key: bytes, of: int, to: int) -> bytes:
    return hmac.digest(key, f"{of} to {to}".encode(), "sha256")


def _tensor(parts: Sequence[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
