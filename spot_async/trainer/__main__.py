"""The process of one rank. torch's launcher runs it: `-m spot_async.trainer SETTINGS_FILE CHANNEL_DIRECTORY`."""

from __future__ import annotations

import sys

from spot_async.base.processes.exits import exit_with_parent
from spot_async.base.processes.memory import without_gc

if __name__ == "__main__":
    exit_with_parent()  # first, because importing torch and transformers takes seconds

with without_gc():
    from torch.distributed.elastic.multiprocessing.errors import record

    from spot_async.trainer.rank import run
    from spot_async.trainer.settings import TrainerSettings


@record  # passes an exception on to the launcher, which names it
def main() -> None:
    settings_path, channel_directory = sys.argv[1:]
    run(TrainerSettings.load(settings_path), channel_directory)


if __name__ == "__main__":
    main()
