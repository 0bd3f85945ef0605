"""The process of one rank. `rank_processes.py` runs it: `-m spot_async.trainer SETTINGS_FILE CHANNEL_DIRECTORY`."""

from __future__ import annotations

import sys
import threading

from spot_async.base.processes.exits import exit_at_once, exit_with_parent, show_rank
from spot_async.base.processes.resources import raise_open_file_limit, tune_malloc, without_gc

if __name__ == "__main__":
    exit_with_parent()  # first, because importing torch and transformers takes seconds
    show_rank()

with without_gc():
    import torch
    from torch.distributed.elastic.multiprocessing.errors import record
    from transformers.utils.logging import disable_progress_bar

    from spot_async.trainer.feed import BatchFeed
    from spot_async.trainer.parallel import device_words, process_group, rank_device, rank_place, strategy_of, this_rank
    from spot_async.trainer.rank import StudentTrainer, train_batches
    from spot_async.trainer.settings import TrainerSettings


@record  # writes an exception to a file, by which the rank's end is told
def main() -> None:
    settings_path, channel_directory = sys.argv[1:]
    run(TrainerSettings.load(settings_path), channel_directory)


def run(settings: TrainerSettings, channel_directory: str) -> None:
    """Train until the process is ended. Tell the orchestrator of errors that all ranks agree on."""
    tune_malloc()
    raise_open_file_limit()
    threading.excepthook = _end
    torch.set_num_threads(settings.training.threads)
    disable_progress_bar()  # the log is for what a person should read
    device = rank_device(settings.training.device, settings.needs_gpu)
    sys.stderr.write(f"rank {rank_place().rank} computes {device_words(device)}\n")
    with process_group(channel_directory, device, settings.training.sharding):
        _serve(settings, channel_directory, device)


def _end(failed: threading.ExceptHookArgs) -> None:
    """End this rank, whose thread failed: a GPU may fail while weights are written, as it may in training."""
    exit_at_once(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)


def _serve(settings: TrainerSettings, channel_directory: str, device: torch.device) -> None:
    """Load the student, and train on batches as they come.

    This is a function of its own so that, when it returns, no trainer is left that refers to the process group.
    """
    trainer = StudentTrainer(settings, strategy_of(settings.training), device)
    if rank_place().rank == 0:
        sys.stderr.write(f"attention: {trainer.attention}\n")
    feed = BatchFeed(channel_directory, this_rank(), step=trainer.step)
    train_batches(trainer, feed)


if __name__ == "__main__":
    main()
