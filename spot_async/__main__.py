"""The `spot-async` command, which `python -m spot_async` is too.

It starts the nursery before anything else. So what servers and ranks need is imported while the command itself is.
"""

import os
import sys
from collections.abc import Sequence

from spot_async.base.processes.nursery import NURSERY

# Programs that a run starts here, and what they import. The model's own module in transformers is theirs to import.
PROGRAMS = ("spot_async.serving", "spot_async.trainer")
IMPORTS = (
    "spot_async.serving.http.app",
    "spot_async.serving.openai.app",
    "spot_async.serving.engine.fused",
    "spot_async.trainer.feed",
    "spot_async.trainer.rank",
)


def main() -> None:
    """Run the command line."""
    os.umask(os.umask(0) | 0o022)  # weights that others could write would be refused
    if starts_programs(sys.argv[1:]):
        NURSERY.begin(PROGRAMS, IMPORTS)
    from spot_async.cli import main as command

    command()


def starts_programs(words: Sequence[str]) -> bool:
    """Return whether a command line makes a run. If it is wrong, the nursery ends with it."""
    return words[:1] in (["train"], ["eval"]) and not {"--dry-run", "--help", "--judge"} & {*words}


if __name__ == "__main__":
    main()
