"""Runs commands over hostile files, each in a process of its own, and says what came of them and what memory it took.

Started as a script: it imports what commands import, then forks for each row of standard input, so that a row costs no
imports. A row is `{"name": ..., "words": [...]}`; the answer is a line of JSON with code, error lines and peak.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

LIMIT_S = 100  # ends what would hang; nothing is said of time
ADDRESS_SPACE_BYTES = 6 << 30  # beyond what is there: saves the machine, and is far above what is allowed


def run(words: list[str]) -> dict[str, object]:
    """Run a command in a child of this process."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            _command(words, said.fileno())
        _, status, used = os.wait4(pid, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")
    return {
        "code": os.waitstatus_to_exitcode(status),
        "lines": [line for line in text.splitlines() if line.strip()],
        "peak_bytes": used.ru_maxrss * 1024,
        "seconds": round(time.monotonic() - began, 1),
    }


def _command(words: list[str], said: int) -> None:
    from spot_async.cli import app

    signal.alarm(LIMIT_S)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + ADDRESS_SPACE_BYTES,) * 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(said, 2)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", closefd=False), write_through=True)
    code = 70
    try:
        app(words, standalone_mode=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except Exception:  # noqa: BLE001 - whatever it is, it is what the row shows
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    import pyarrow.parquet  # noqa: F401 - all rows begin with the same memory
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import spot_async.checks.plan
    import spot_async.models.causal_model
    import spot_async.tools.inspect.report  # noqa: F401

    for line in sys.stdin:
        row = json.loads(line)
        sys.stdout.write(json.dumps({"name": row["name"], **run(row["words"])}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
