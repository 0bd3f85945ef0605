"""Programs on the far side of a prefix, such as `ssh node2`, `srun -w node2` or `docker run -i IMAGE`.

A prefix is a command that runs another command elsewhere. It is given a single word more, `sh`. What that shell should
do comes by its standard input, for two reasons. Some prefixes have a shell of their own read our words again, others do
not, and one word means the same to both. And every user of both machines can see command lines, but nobody the input.

The shell turns itself into a second guard (`guard.py`), which needs nothing of ours there but a Python interpreter. The
guard here keeps the input open and writes to it every so often. So the far guard knows that the run is alive.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spot_async.base.processes import guard
from spot_async.base.retry import HEARTBEAT_TIMEOUT_S

SHELL = "sh"
REACHED = "spot-async: here is the far side"  # printed before the answer to a question
HAS_TERMINAL = 90  # exit codes of the shell
NO_INTERPRETER = 91
BEATS = 6  # so many fit into the longest silence: some may be late

# Begins what is given to `python -c`, which would import a `json.py` of the working directory as its own.
ONLY_INSTALLED = "import sys; sys.path[:] = filter(None, sys.path)\n"

_SOURCE_VARIABLE = "SPOT_ASYNC_GUARD"
_RUN_SOURCE = f"import os; exec(os.environ.pop('{_SOURCE_VARIABLE}'))"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class FarPlace:
    """Where a program is to run on the far side, and the files that it gets there."""

    prefix: Sequence[str]
    python: str  # for the far guard
    silence_s: float = HEARTBEAT_TIMEOUT_S  # the far guard stops the program when it hears nothing of us for so long
    directory: Path | None = None  # made there for this user alone, and removed at the end
    files: Mapping[str, str] = field(default_factory=dict, repr=False)  # to write in it, by name

    def guarded(
        self, argv: Sequence[str], environment: Mapping[str, str], grace_s: float, *, far_grace_s: float
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command line of the guard here, and the environment that it needs.

        `environment` is all that the program gets there.
        """
        script = self.script(argv, environment, far_grace_s)
        return near_command(self.prefix, script, grace_s=grace_s, beat_s=self.silence_s / BEATS)

    def script(self, argv: Sequence[str], environment: Mapping[str, str], grace_s: float) -> str:
        """Return what the far shell reads."""
        ours = {
            _SOURCE_VARIABLE: Path(guard.__file__).read_text(encoding="utf-8"),
            guard.SILENCE_VARIABLE: str(self.silence_s),
        }
        lines = []
        if self.directory is not None:
            ours[guard.DIRECTORY_VARIABLE] = str(self.directory)
            lines.append(f"(umask 077 && mkdir {_quoted(self.directory)}) || exit 1")
            lines += [
                f"(umask 077 && printf %s {_quoted(text)} > {_quoted(self.directory / name)}) || exit 1"
                for name, text in self.files.items()
            ]
        command = [self.python, "-I", "-S", "-c", _RUN_SOURCE, str(grace_s), *argv]
        return "\n".join([*_exports({**environment, **ours}), *lines, f"exec {shlex.join(command)}", ""])


def question(python: str, code: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a script that prints `REACHED`, and then what Python code prints. It must hold no secret.

    The exit code is `HAS_TERMINAL`, `NO_INTERPRETER` or that of the code.
    """
    return "\n".join(
        [
            f"echo {_quoted(REACHED)}",
            f"[ -t 0 ] && exit {HAS_TERMINAL}",  # it would print what it reads, keys too, and change it
            f"command -v {_quoted(python)} > /dev/null || exit {NO_INTERPRETER}",
            *_exports(environment),
            f"exec {shlex.join([python, '-c', ONLY_INSTALLED + code, *arguments])}",
            "",
        ]
    )


def near_command(
    prefix: Sequence[str], script: str, *, grace_s: float, beat_s: float
) -> tuple[list[str], dict[str, str]]:
    """Return the guard here that has a far shell read `script`: its command line, and the environment that it needs."""
    command = [sys.executable, "-I", "-S", guard.__file__, str(grace_s), *prefix, SHELL]
    return command, {guard.INPUT_VARIABLE: script, guard.BEAT_VARIABLE: str(beat_s)}


def is_variable_name(name: str) -> bool:
    """Return whether a shell can set an environment variable of this name."""
    return _NAME.fullmatch(name) is not None


def _exports(environment: Mapping[str, str]) -> list[str]:
    return [f"export {name}={_quoted(value)}" for name, value in environment.items()]


def _quoted(text: object) -> str:
    return shlex.quote(str(text))
