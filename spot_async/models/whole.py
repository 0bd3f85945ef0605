"""Says whether a directory is a whole model, without importing torch.

Plain decoders are judged by their files alone. For all others transformers is asked in a process of its own, whose last
line says what is wrong:

    python -m spot_async.models.whole DIRECTORY
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spot_async.base.processes.exits import SAFE_PATH, exit_with_parent
from spot_async.base.secrets import SECRETS
from spot_async.errors import DataError
from spot_async.models.plain_decoder import is_plainly_whole

UNLOADABLE, NOT_WHOLE = 3, 4  # exit codes: the trainer could not take such a model; its files are not all of it
LONGEST_S = 1800.0  # on a slow disk torch takes minutes


def check_whole(directory: Path, *, must_load: bool = True, longest: int = 0) -> None:
    """Raise `DataError` unless a directory's files are a whole model.

    What transformers cannot make a model of is refused only where it `must_load`. `longest` are the tokens of the
    longest sequence that it is to be trained on; 0 if it is not.
    """
    if is_plainly_whole(directory):
        return
    code, said = _judged(directory, longest) if "torch" in sys.modules else _asked(directory, longest)
    if code == NOT_WHOLE or (code == UNLOADABLE and must_load):
        raise DataError(said)


def _asked(directory: Path, longest: int) -> tuple[int, str]:
    """Return exit code and last line of a process of its own. Raises `DataError` if it does not come to its end."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, directory, str(longest)],
            env={**SECRETS.without_keys(os.environ), **SAFE_PATH, "SPOT_ASYNC_PARENT": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{directory}: transformers takes more than {LONGEST_S:.0f} s to make its model") from None
    *_, said = b"", *done.stdout.splitlines()
    if done.returncode not in (0, UNLOADABLE, NOT_WHOLE):
        *_, said = b"", *done.stderr.splitlines()
        raise DataError(f"{directory}: cannot be judged: exit code {done.returncode}: {os.fsdecode(said)}")
    return done.returncode, os.fsdecode(said)


def _judged(directory: Path, longest: int) -> tuple[int, str]:
    """Return an exit code, and what is wrong."""
    from spot_async.models.causal_model import check_files, check_rope, empty_model

    code = UNLOADABLE
    try:
        model = empty_model(directory)
        code = NOT_WHOLE
        check_files(directory, model)
        code = UNLOADABLE
        if longest:
            check_rope(directory, model, longest)
    except DataError as error:
        return code, str(error)
    return 0, ""


if __name__ == "__main__":
    exit_with_parent()
    exit_code, message = _judged(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.buffer.write(os.fsencode(message) + b"\n")  # paths may be no UTF-8
    sys.exit(exit_code)
