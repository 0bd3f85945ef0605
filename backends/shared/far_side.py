"""Asks the far side of `launch.prefix`, or this machine, what a start needs to know, before anything is started there.

Each question is a short Python program that the interpreter there runs (`spot_async/base/processes/far_side.py`). All
errors are `ConfigError` in one line, and begin with the key at fault, `launch.prefix` or another one of `launch`. Where
the prefix did not get there, they are `FarSideError`.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from spot_async.base.addresses import is_loopback
from spot_async.base.processes.child import foreign_environment
from spot_async.base.processes.far_side import HAS_TERMINAL, NO_INTERPRETER, REACHED, near_command, question
from spot_async.errors import ConfigError, FarSideError

ANSWER_TIMEOUT_S = 120.0  # a scheduler may have to start a container first
BEAT_S = 10.0

# Prints where a server can listen, or what is missing for it, as JSON. `paths` must all exist there.
PLACE_CODE = """
import errno, json, os, socket, sys

def look(host, ports, is_given, paths):
    for path, problem in paths:
        if not os.path.exists(path):
            return {"problem": problem}
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return {"problem": "launch.host=%s: the far side does not know it: %s" % (host, error.strerror)}
    for port in ports:
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address[0], port, *address[2:]))
                return {"port": port}
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    return {"problem": "launch.host=%s: the far side cannot listen there: %s" % (host, error.strerror)}
    if is_given:
        problem = "launch.port=%d: taken by another program on the far side; give another one, or none for a free one"
        return {"problem": problem % ports[0]}
    return {"problem": "launch.host=%s: no free port on the far side" % host}

found = look(*json.loads(sys.argv[1]))
try:
    found["boot"] = open("/proc/sys/kernel/random/boot_id").read().strip()
except OSError:
    pass
print(json.dumps(found))
"""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between machines, not between containers of one


@dataclass(frozen=True)
class FarSide:
    """What a prefix leads to, or this machine without one: an interpreter, with variables that are no secret."""

    prefix: tuple[str, ...]
    python: str
    environment: tuple[tuple[str, str], ...] = ()
    ray_node: str | None = None  # the address where Ray has placed the server: the prefix is then one of ours

    @property
    def shown(self) -> str:
        return shlex.join(self.prefix or [self.python]) if self.ray_node is None else f"Ray's node {self.ray_node}"

    @property
    def key(self) -> str:
        """Return the key that leads there."""
        if not self.prefix:
            return "launch.python"
        return "launch.prefix" if self.ray_node is None else "launch.resources"

    def ask(self, code: str, arguments: Sequence[str]) -> tuple[int, str, str]:
        """Return exit code, last line and errors of Python code that runs there."""
        script = question(self.python, code, arguments, dict(self.environment))
        command, environment = near_command(self.prefix, script, grace_s=0.0, beat_s=BEAT_S)
        try:
            done = subprocess.run(
                command,
                env={**foreign_environment(environment), "SPOT_ASYNC_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ANSWER_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise FarSideError(f"{self.key}: no answer from {self.shown} within {ANSWER_TIMEOUT_S:g} s") from None
        _, was_reached, answer = done.stdout.partition(REACHED)
        if not was_reached:
            raise FarSideError(f"{self.key}: {self.shown} reached no shell: {_end(done)}")
        if done.returncode == HAS_TERMINAL:
            raise ConfigError(f"launch.prefix: {self.shown} gives a terminal, which would print keys: remove that (-t)")
        if done.returncode == NO_INTERPRETER:
            raise ConfigError(
                f"launch.python: no interpreter {self.python!r} on the far side of {self.shown}; give that of the "
                "environment with the server there"
            )
        return done.returncode, (answer.strip().splitlines() or [""])[-1], done.stderr

    def place(self, host: str, ports: Sequence[int], *, is_given: bool, model: Path, written: Path | None) -> int:
        """Return the first of `ports` on which nobody listens there.

        The far side must see the model, and what we write to the directory `written`, if there is one.
        """
        with ExitStack() as stack:
            paths = [(str(model), f"{self.key}: the far side has no {model}: copy it there, under the same path")]
            if written is not None:
                # Its name is proof enough: it is new and random.
                proof = stack.enter_context(tempfile.NamedTemporaryFile(prefix=".seen-", dir=written))
                paths.append(
                    (
                        proof.name,
                        f"{self.key}: the far side does not see {written}, where new weights are written: share it "
                        "under the same path, or set weights.transport=distributed (vLLM and SGLang)",
                    )
                )
            code, line, errors = self.ask(PLACE_CODE, [json.dumps([host, list(ports), is_given, paths])])
        if code:
            said = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
            raise ConfigError(f"launch.python: {self.python} fails on the far side of {self.shown}: {said}")
        found = json.loads(line)
        if "port" not in found:
            raise ConfigError(str(found["problem"]))
        ours = BOOT_ID.read_text().strip() if BOOT_ID.exists() else None
        if is_loopback(host) and not is_given and found.get("boot", ours) != ours:
            raise ConfigError(
                f"launch.host={host} means the other machine itself to {self.shown}: give its address as this machine "
                "reaches it, or a launch.port that the prefix forwards (ssh -L)"
            )
        return int(found["port"])


def check_prefix(prefix: Sequence[str], section: str) -> None:
    """Raise ConfigError unless the prefix is a program of this machine."""
    if shutil.which(prefix[0]) is None:
        raise ConfigError(f"{section}.prefix: no program {prefix[0]!r} on this machine: install it, or give its path")


def _end(done: subprocess.CompletedProcess[str]) -> str:
    said = (f"{done.stdout}\n{done.stderr}".strip().splitlines() or [""])[-1]
    if done.returncode == 0 and not said:
        return "it must pass on its standard input (docker run and kubectl exec need -i)"
    how = f"exit code {done.returncode}" if done.returncode >= 0 else f"killed by signal {-done.returncode}"
    return ": ".join(filter(None, [how, said]))
