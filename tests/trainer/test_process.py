"""The trainer as real processes: several ranks, resent batches, and every way to die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spoiled_gradient
import torch
import torch.distributed as dist
from kill_drill import descendants
from makers import MakeSample, MakeSettings, MakeTargets, MakeTrainer
from process_trees import gone
from safetensors.torch import load_file
from spoiled_gradient import SPOILS, spoiled_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

from spot_async.base import wire
from spot_async.base.processes.child import ChildProcess, processes_below
from spot_async.base.processes.exits import exit_at_once
from spot_async.base.processes.resources import cpu_type
from spot_async.errors import TrainerError, TrainerLostError
from spot_async.trainer.batching import told
from spot_async.trainer.groups import Ranks
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import process_group
from spot_async.types import Divergence, Live, Supervision, WeightVersion

UnequalBatch = Callable[[int], list[Supervision]]
SHORT = {"iterations": 4, "batch_size": 6, "mini_batch_size": 2}
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def unequal_batch(supervision: MakeSample, soft_targets: MakeTargets) -> UnequalBatch:
    """Seven prompts, so that two ranks and mini-batches of two leave one rank without a sample.

    Only one trajectory has soft targets, so that its update has a rank with none, which sums no tails.
    """

    def make(iteration: int) -> list[Supervision]:
        lengths = [40, 1, 7, 22, 3, 15, 9]
        targets = [soft_targets([0, 5], 4), soft_targets([8], 6, Divergence(reverse=1.0))]
        targets.append(soft_targets([5, 2], 3, baseline=1.0))
        return [
            supervision(10 * iteration + i, tokens, *(targets if i == 3 else [soft_targets([], 4)]))
            for i, tokens in enumerate(lengths)
        ]

    return make


def arrays(said: Live) -> list[Any]:
    of_rows = [each for rows in said.rows for each in (rows.logprobs, rows.tail_logprobs)]
    return [said.logprobs, said.entropy, said.where, *of_rows]


def rank_pids(pid: int) -> list[int]:
    """The living ranks below a process, the first one first."""

    def rank(pid: int) -> int:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return next(int(each[5:]) for each in variables if each.startswith("RANK="))

    return sorted((each for each, line in descendants(pid) if "spot_async.trainer" in line), key=rank)


# One rank of two, which leaves its gradients behind. Steps are too small to move a weight.
# The group is gone at the end: were its threads alive, the process could abort when the interpreter ends.
RANK = """
import json, sys, weakref
from pathlib import Path
import torch
import torch.distributed as dist
from safetensors.torch import save_file
import spot_async.trainer.model
import spot_async.trainer.accumulator
from spoiled_gradient import spoiled_loss
from spot_async.base import wire
from spot_async.errors import TrainerError
from spot_async.trainer.messages import Batch
from spot_async.trainer.parallel import process_group, strategy_of
from spot_async.trainer.rank import StudentTrainer
from spot_async.trainer.settings import TrainerSettings

cpu = torch.device("cpu")
spot_async.trainer.accumulator.clipped_policy_loss = spoiled_loss
spot_async.trainer.model.LOGITS_PER_BLOCK = 350  # 7 rows of logits at a time, recomputed in the backward pass

def train(run):
    settings = TrainerSettings.load(run / "trainer.json")
    trainer = StudentTrainer(settings, strategy_of(settings.training), cpu)
    report = trainer.train(wire.decode((run / "batch").read_bytes(), Batch))
    gradients = {n: p.grad for n, p in trainer.model.named_parameters()}
    if settings.training.sharding == "fsdp2":
        assert all(len(p.to_local()) < len(p) for p in trainer.model.parameters())
        gradients = {n: g.full_tensor() for n, g in gradients.items()}
    save_file(gradients, run / f"gradients-{dist.get_rank()}")
    (run / f"metrics-{dist.get_rank()}").write_text(json.dumps(report.metrics | report.performance))

try:
    with process_group(sys.argv[1], cpu, "fsdp2"):
        group, rank = weakref.ref(dist.group.WORLD), dist.get_rank()
        for run in map(Path, sys.argv[2:]):
            train(run)
except TrainerError as error:  # of the last one
    (run / f"error-{rank}").write_text(str(error))
    if group() is not None:
        sys.exit("the process group outlived its block")
"""


@pytest.mark.long
def test_two_ranks_have_the_gradients_metrics_and_weights_of_one_replicated_or_sharded(
    student: Path,
    student_trainer: MakeTrainer,
    trainer_settings: MakeSettings,
    unequal_batch: UnequalBatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spot_async.trainer.accumulator.clipped_policy_loss", spoiled_loss)  # as the two ranks do
    choices: dict[str, Any] = {"learning_rate": 1e-15, "max_grad_norm": 1e9}
    batch = tuple(unequal_batch(0))
    cases = {
        "served": (batch, choices),
        "recomputed": (batch, {**choices, "behavior": "recomputed", "importance_cap": 2.0}),
        "a rank without samples": (batch[3:4], {**choices, "loss_aggregation": "token_mean"}),
    }
    sharded = {"sharding": "fsdp2", "micro_batch_tokens": 40, "recompute_layers": True}
    cases |= {f"{name}, sharded": (samples, {**training, **sharded}) for name, (samples, training) in cases.items()}
    cases["compiled, sharded"] = (batch, {**choices, **sharded, "compile": True})
    poisoned = unequal_batch(0)
    poisoned[4].behavior_logprobs[0] = SPOILS
    fails = "a gradient that is not finite, sharded"
    cases[fails] = (tuple(poisoned), {**choices, **sharded})
    for name, (samples, training) in cases.items():
        trainer_settings(student, tmp_path / name, **training).save()
        (tmp_path / name / "batch").write_bytes(wire.encode(Batch(0, samples)))
    group = tmp_path / "group"
    group.mkdir()
    support = str(Path(spoiled_gradient.__file__).parent)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(group), *(str(tmp_path / name) for name in cases)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": support},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]

    for name, (samples, training) in cases.items():
        alone = student_trainer(f"{name} alone", **{**training, "sharding": "none", "compile": False})
        if name == fails:
            with pytest.raises(TrainerError, match="gradient in sample 'problem-4'") as caught:
                alone.train(Batch(0, samples))
            assert {(tmp_path / name / f"error-{rank}").read_text() for rank in range(2)} == {str(caught.value)}
            continue
        report = alone.train(Batch(0, samples))
        expected = report.metrics
        published = [tmp_path / run / "weights" / "step-000001" for run in (name, f"{name} alone")]
        assert {p.name: p.stat().st_size for p in published[0].iterdir()} == {
            p.name: p.stat().st_size for p in published[1].iterdir()
        }
        found, weights = (load_file(directory / "model.safetensors") for directory in published)
        assert found.keys() == weights.keys()
        assert all(torch.allclose(found[key], weights[key], rtol=0, atol=1e-6) for key in weights)
        for rank in range(2):
            metrics = json.loads((tmp_path / name / f"metrics-{rank}").read_text())
            for metric in expected.keys() - {"train_s", "publish_s", "tokens_per_s"}:
                assert metrics[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-7), metric
            for each, value in report.performance.items():  # rates of a rank, of which there are two
                assert 2 * metrics[each] * metrics["train_s"] == pytest.approx(value * expected["train_s"]), each
            found = load_file(tmp_path / name / f"gradients-{rank}")
            for parameter_name, parameter in alone.model.named_parameters():
                tolerance = 1e-5 * expected["grad_norm"]
                torch.testing.assert_close(found[parameter_name], parameter.grad, rtol=0, atol=tolerance)


@pytest.mark.long
@needs_proc
async def test_sharded_ranks_take_log_pi_old_from_a_look_though_samples_move_between_them(
    student: Path,
    student_trainer: MakeTrainer,
    trainer_settings: MakeSettings,
    unequal_batch: UnequalBatch,
    tmp_path: Path,
) -> None:
    """Four updates, of which one rank has no sample of some; `revise` has left out every third sample. A rank that
    recomputed while the other did not would wait for ever."""
    drafts = [*unequal_batch(0), *unequal_batch(1)][:12]
    batch = [each for number, each in enumerate(drafts) if number % 3]
    choices: dict[str, Any] = {**SHORT, "behavior": "recomputed", "batch_size": 12}
    found = []
    for name in ("first", "second"):
        settings = trainer_settings(student, tmp_path / name, ranks=2, sharding="fsdp2", **choices)
        async with TrainerProcess(settings) as trainer:
            await trainer.look(0, drafts)
            report = await trainer.train(0, batch)
        found.append((report.metrics, load_file(Path(report.snapshot.directory) / "model.safetensors")))
    (metrics, weights), (again, same) = found
    assert metrics["updates"] == 4
    assert {name: each for name, each in again.items() if not name.endswith("_s")} == {
        name: each for name, each in metrics.items() if not name.endswith("_s")
    }
    assert all(torch.equal(same[name], each) for name, each in weights.items())
    alone = student_trainer("alone", **choices)
    expected = alone.train(Batch(0, tuple(batch)))  # which recomputes it
    for name in ("loss", "grad_norm", "behavior_kl", "mismatch_mean"):
        assert metrics[name] == pytest.approx(expected.metrics[name], rel=2e-5, abs=1e-7), name
    for name, each in load_file(Path(expected.snapshot.directory) / "model.safetensors").items():
        torch.testing.assert_close(weights[name], each, rtol=0, atol=1e-5)


@pytest.mark.long
@needs_proc
async def test_launched_sharded_ranks_train_as_one_does_and_a_resent_batch_is_not_trained_again(
    student: Path,
    student_trainer: MakeTrainer,
    trainer_settings: MakeSettings,
    unequal_batch: UnequalBatch,
    tmp_path: Path,
) -> None:
    settings = trainer_settings(student, tmp_path / "two", ranks=2, sharding="fsdp2", **SHORT)
    async with TrainerProcess(settings) as trainer:
        reports = [await trainer.train(0, unequal_batch(0))]
        assert await trainer.train(0, unequal_batch(0)) == reports[0]
        live = await trainer.look(1, unequal_batch(1))
        reports.append(await trainer.train(1, unequal_batch(1)))
        pids = rank_pids(os.getpid())
        assert len(pids) == 2
        with pytest.raises(TrainerError, match="iteration 6, but iteration 3 is due"):
            await trainer.train(5, unequal_batch(2))
    assert await gone(pids)

    alone = student_trainer("one", **SHORT)
    for iteration, two in enumerate(reports):
        if iteration == 1:  # they look at a batch as one rank does
            (share,) = alone.divide(Batch(1, tuple(unequal_batch(1)), is_look=True))
            for place, said in alone.losses.look(share.updates[0]).items():
                for one_says, two_say in zip(arrays(told(said)), arrays(live[place]), strict=True):
                    np.testing.assert_allclose(two_say, one_says, rtol=0, atol=2e-5)
        one = alone.train(Batch(iteration, tuple(unequal_batch(iteration))))
        for name in ("loss", "grad_norm"):
            assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5), name
        assert one.snapshot.version == two.snapshot.version
        expected, found = (load_file(Path(r.snapshot.directory) / "model.safetensors") for r in (one, two))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
    AutoModelForCausalLM.from_pretrained(two.snapshot.directory)
    AutoTokenizer.from_pretrained(two.snapshot.directory)


@pytest.mark.long
@needs_proc
async def test_a_non_finite_sample_stops_all_ranks_and_publishes_nothing_and_a_killed_rank_ends_them_both_are_named(
    student: Path, tmp_path: Path, trainer_settings: MakeSettings, unequal_batch: UnequalBatch
) -> None:
    batch = unequal_batch(0)
    batch[4].behavior_logprobs[0] = np.nan
    async with TrainerProcess(trainer_settings(student, tmp_path, ranks=2, **SHORT)) as trainer:
        assert trainer.cpu == f"{cpu_type()}, {torch.backends.cpu.get_cpu_capability()}"
        pids = rank_pids(os.getpid())
        for _ in range(2):  # and it stays stopped
            with pytest.raises(
                TrainerError, match=r"^iteration 1, .*policy loss in sample 'problem-4' \(ordinal 4\)"
            ) as not_finite:
                await trainer.train(0, batch)
            assert not isinstance(not_finite.value, TrainerLostError)
        victim = pids[1]
        assert [each for each in processes_below(os.getpid()) if each[0].startswith(f"rank 1 (pid {victim})")]
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(TrainerLostError, match=rf"rank 1 \(pid {victim}\) was killed by SIGKILL"):
                await trainer.watch()
            with pytest.raises(TrainerLostError, match=rf"rank 1 \(pid {victim}\) was killed by SIGKILL"):
                await trainer.train(0, batch)
        assert await gone(pids)
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.long
@needs_proc
@pytest.mark.parametrize("is_beside", [False, True])
async def test_a_full_disk_is_one_clear_line_and_older_weights_still_load(
    student: Path, tmp_path: Path, trainer_settings: MakeSettings, unequal_batch: UnequalBatch, is_beside: bool
) -> None:
    async with TrainerProcess(trainer_settings(student, tmp_path, publishes_beside=is_beside, **SHORT)) as trainer:
        report = await trainer.train(0, unequal_batch(0))
        await trainer.published(1)
        limit = 16_000  # bytes a file may have from now on: configuration fits, weights do not
        resource.prlimit(rank_pids(os.getpid())[0], resource.RLIMIT_FSIZE, (limit, limit))

        async def step() -> None:
            await trainer.train(1, unequal_batch(1))
            await trainer.published(2)

        with pytest.raises(TrainerError) as caught:
            await step()
        with pytest.raises(TrainerError) as again:
            await trainer.train(2, unequal_batch(2))
    message = str(caught.value)
    assert str(again.value) == message
    assert message.startswith(f"cannot publish weights to {tmp_path / 'weights' / 'step-000002'}: ")
    assert "File too large" in message
    assert f"complete weights up to {report.snapshot.directory} are untouched" in message
    assert "\n" not in message
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["step-000001"]
    AutoModelForCausalLM.from_pretrained(report.snapshot.directory)


# Two ranks, as forks. The second is late for a batch, which is what ranks wait for, and then hangs while they train.
HANGING = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from spot_async.trainer import parallel

parallel.TRAINING_TIMEOUT = timedelta(seconds=1)
rank = 0 if os.fork() else 1
os.environ.update(RANK=str(rank), WORLD_SIZE="2")
with parallel.process_group(sys.argv[1], torch.device("cpu"), "none"):
    idle = parallel.idle_group()
    if rank == 1:
        time.sleep(2.5)
        parallel.send_bytes(b"late", 0, idle)
    else:
        assert parallel.receive_bytes(idle, rank=1) == b"late"
    if rank == 1:
        time.sleep(60)
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert "Timed out" in str(error), error
        assert time.monotonic() - started < 30
        sys.stdout.write("noticed")
        sys.stdout.flush()
    os.killpg(0, 9)
"""


@pytest.mark.long
def test_ranks_wait_for_a_late_batch_but_not_for_a_rank_that_hangs_while_they_train(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(tmp_path)], stdout=subprocess.PIPE, timeout=120, start_new_session=True
    )
    assert done.stdout == b"noticed"


def test_a_rank_that_fails_on_a_gpu_does_not_wait_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back
    monkeypatch.setattr(Ranks, "form", lambda *arguments: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: pytest.fail("NCCL waits here"))
    with pytest.raises(MemoryError), process_group(str(tmp_path), torch.device("cuda"), "none"):
        raise MemoryError
    assert sys.excepthook is exit_at_once


@pytest.mark.long
async def test_a_student_that_cannot_be_loaded_is_named(tmp_path: Path, trainer_settings: MakeSettings) -> None:
    missing = tmp_path / "no-such-student"
    with pytest.raises(TrainerError, match=f"DataError: student {missing}: cannot be loaded") as caught:
        async with TrainerProcess(trainer_settings(missing, tmp_path)):
            pytest.fail("entered without a student")
    assert "\n" not in str(caught.value)


OWNER = """
import asyncio, sys
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.settings import TrainerSettings

async def main():
    async with TrainerProcess(TrainerSettings.load(sys.argv[1])):
        sys.stdout.write("ready\\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

asyncio.run(main())
"""


def listening(pid: int) -> list[str]:
    """The TCP addresses that a process listens at."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(descriptor.readlink()))
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


@needs_proc
@pytest.mark.long
def test_a_trainer_of_one_rank_listens_to_nobody_and_does_not_outlive_a_killed_owner(
    student: Path, tmp_path: Path, trainer_settings: MakeSettings
) -> None:
    settings_path = trainer_settings(student, tmp_path).save()
    with subprocess.Popen([sys.executable, "-c", OWNER, str(settings_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        pids = rank_pids(owner.pid)
        assert len(pids) == 1
        assert [address for pid in pids for address in listening(pid)] == []
        owner.kill()
    assert asyncio.run(gone(pids))


# Stands for rank 0: answers late for another iteration, then for this one unless it is sent anything more, then sleeps.
SLOW_RANK = """
import sys, zmq
from spot_async.base import wire
from spot_async.trainer.messages import Batch, Ready, Trained, endpoint
from spot_async.types import TrainReport, WeightSnapshot, WeightVersion

socket = zmq.Context().socket(zmq.PAIR)
socket.connect(endpoint(sys.argv[1]))
report = lambda step: TrainReport(snapshot=WeightSnapshot(directory="w", version=WeightVersion(0, step)), metrics={})
socket.send(wire.encode(Ready()))
assert wire.decode(socket.recv(), Batch).iteration == 3
socket.send(wire.encode(Trained(2, report(99))))
assert not socket.poll(int(sys.argv[2]))
socket.send(wire.encode(Trained(3, report(4))))
socket.recv()
socket.recv()
"""


@pytest.mark.long
async def test_a_batch_is_sent_once_however_slow_the_trainer_late_answers_are_dropped_and_silence_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer_settings: MakeSettings, supervision: MakeSample
) -> None:
    async def start_slow_rank(name: str, argv: Sequence[str], *, log_path: Path, **given: Any) -> ChildProcess:
        return await start(name, [sys.executable, "-c", SLOW_RANK, argv[-1], str(slow_ms)], log_path=log_path)

    start = ChildProcess.start
    monkeypatch.setattr(ChildProcess, "start", start_slow_rank)
    slow_ms = 500
    async with TrainerProcess(trainer_settings(tmp_path, tmp_path)) as trainer:
        report = await trainer.train(3, [supervision(0, 3)])
        assert report.snapshot.version == WeightVersion(0, 4)
    slow_ms = 60_000
    with pytest.raises(TrainerError, match=r"iteration 4 was not trained within training.step_timeout_s=2"):
        async with TrainerProcess(trainer_settings(tmp_path, tmp_path, step_timeout_s=2.0)) as trainer:
            await trainer.train(3, [supervision(0, 3)])
