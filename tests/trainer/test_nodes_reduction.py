"""Gradients of sharded ranks travel between nodes once an update."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from spot_async.trainer.groups import Ranks
from spot_async.trainer.messages import NODES_VARIABLE
from spot_async.trainer.parallel import ShardedStrategy

os.environ |= {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", NODES_VARIABLE: "2"}
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
Ranks.form = lambda ranks, make, groups_of: make()  # the others, for which it waits, are not there
calls = []
all_reduce = dist.all_reduce
dist.all_reduce = lambda *given, **choices: (calls.append(1), all_reduce(*given, **choices))[1]
for keeps_on_cpu in (False, True):
    student = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    strategy = ShardedStrategy(keeps_on_cpu=keeps_on_cpu)
    forward = strategy.prepare(student, list(student[:2]), torch.device("cpu"), "float32", lambda device: None)
    for update in range(2):
        for number in range(3):
            strategy.before_pass(is_last=number == 2)
            calls.clear()
            forward(torch.ones(1, 8)).sum().backward()
            print(len(calls), all(each.grad is not None for each in student.parameters()))
        student.zero_grad()
"""


@pytest.mark.long
def test_they_do_with_the_last_pass_unless_they_leave_the_device() -> None:
    """Told by the collectives of four ranks on two nodes, of which three are made up."""
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    assert found == [*["0 False", "0 False", "3 True"] * 2, *["3 True"] * 6, ""]
