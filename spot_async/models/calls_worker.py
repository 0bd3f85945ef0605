"""A process that reads calls in turns, which a model wrote. Started as a script with its memory in bytes.

It reads the arguments of `read_calls`, `{"template": ..., "text": ..., "tools": ..., "prompt": ...}`, one JSON object
per line, and writes `{"calls": [...]}`, or `{"unreadable": why}`. Whoever waits too long kills it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress

import msgspec

from spot_async.base.processes.exits import exit_with_parent
from spot_async.models.calls import read_calls


def main() -> None:
    exit_with_parent()
    with suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    sys.stdout = sys.stderr
    read_calls({"start_anchor": "a", "fields": {"content": {}}}, "", ())  # what is slow to import counts for no turn
    replies.write('{"ready": true}\n')
    for line in sys.stdin:
        try:
            reply = {"calls": msgspec.to_builtins(read_calls(**json.loads(line)))}
        except ValueError as error:
            reply = {"unreadable": str(error)}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
