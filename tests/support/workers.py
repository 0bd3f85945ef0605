"""Says how many tests run at a time: `workers.py ""` as many as this machine bears, `workers.py 3` three."""

from __future__ import annotations

import sys

from spot_async.base.processes.resources import available_bytes, usable_cores

BYTES_OF_ONE = 2 << 30  # of a worker, with the servers and ranks that a test of its own starts


def workers(given: str, cores: int, free_bytes: int) -> int:
    """Return the number that was given, or one more than cores where memory is enough. Raises ValueError.

    More than a quarter of the time a test waits for processes that it started: the one beyond the cores fills it.
    """
    if not given:
        return max(1, min(cores + 1, free_bytes // BYTES_OF_ONE))
    if not (given.isascii() and given.isdecimal() and int(given)):
        raise ValueError(f"WORKERS={given}: give the number of tests at a time, 1 or more, or leave it out")
    return int(given)


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{workers(sys.argv[1], usable_cores(), available_bytes())}\n")
    except ValueError as error:
        sys.exit(str(error))
