"""Runs a training run or an evaluation, from its configuration to the last file. The loop itself is `loop`'s."""
