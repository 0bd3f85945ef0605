"""The trainer as real processes: several ranks, resent batches, and every way to die."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import spot_async.trainer.handle as handle
from spot_async.config import TrainingConfig
from spot_async.errors import ProcessDiedError, TrainerError
from spot_async.processes import ChildProcess
from spot_async.trainer.handle import TrainerProcess
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import SoftTargets, Supervision, TrainReport, WeightVersion

VOCAB = 50
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("student")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(directory)
    return directory


def trainer_settings(student: Path, run_directory: Path, **training: Any) -> TrainerSettings:
    training = {"iterations": 4, "batch_size": 6, "mini_batch_size": 2, "learning_rate": 1e-3, **training}
    return TrainerSettings(
        training=TrainingConfig(**training),
        model_directory=str(student),
        run_directory=str(run_directory),
        temperature=1.0,
        seed=0,
        iterations=4,
    )


def supervision(ordinal: int, tokens: int, branch_positions: Sequence[int] = ()) -> Supervision:
    draw = np.random.default_rng(ordinal)
    behavior = draw.normal(-4.0, 1.0, tokens).astype(np.float32)
    n = len(branch_positions)
    return Supervision(
        prompt_ordinal=ordinal,
        problem_id=f"problem-{ordinal}",
        prompt_ids=draw.integers(0, VOCAB, 3 + ordinal % 5).astype(np.int32),
        response_ids=draw.integers(0, VOCAB, tokens).astype(np.int32),
        behavior_logprobs=behavior,
        teacher_logprobs=behavior + draw.normal(0.0, 1.0, tokens).astype(np.float32),
        version=WeightVersion(0, 0),
        soft_targets=SoftTargets(
            positions=np.array(branch_positions, np.int32),
            token_ids=draw.integers(0, VOCAB, (n, 4)).astype(np.int32),
            probabilities=draw.dirichlet(np.ones(4), n).astype(np.float32).reshape(n, 4),
            weights=np.full(n, 0.5, np.float32),
        ),
    )


def unequal_batch(iteration: int) -> list[Supervision]:
    """Seven prompts, so that two ranks and mini-batches of two leave one rank without a sample.

    Only one trajectory has branch positions, so that its update has a rank with none.
    """
    first = 10 * iteration
    lengths = [40, 1, 7, 22, 3, 15, 9]
    return [supervision(first + i, tokens, [0, 5] if i == 3 else ()) for i, tokens in enumerate(lengths)]


def trainer_pids(pid: int) -> dict[int, int | None]:
    """Living descendants of a process that belong to a trainer, each with its rank (None: the launcher)."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if stat[0] != "Z":
                    parents[int(entry.name)] = int(stat[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found: dict[int, int | None] = {}
    generation = {pid}
    while generation:
        generation = {child for child, parent in parents.items() if parent in generation}
        for child in generation:
            if b"spot_async.trainer" in Path(f"/proc/{child}/cmdline").read_bytes():
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
                found[child] = ranks[0] if ranks else None
    return found


def pid_of_rank(rank: int) -> int:
    return next(pid for pid, number in trainer_pids(os.getpid()).items() if number == rank)


def wait_until_gone(pids: Sequence[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while remaining := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline:
            for pid in remaining:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"still running after {timeout_s} s: {remaining}")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@needs_proc
@pytest.mark.parametrize(
    "training", [{}, {"behavior": "recomputed", "importance_cap": 2.0}], ids=["served", "recomputed"]
)
async def test_two_ranks_train_what_one_rank_trains_and_a_resent_batch_is_not_trained_again(
    student: Path, tmp_path: Path, training: dict[str, Any]
) -> None:
    reports: dict[int, list[TrainReport]] = {}
    for ranks in (1, 2):
        settings = trainer_settings(student, tmp_path / str(ranks), ranks=ranks, **training)
        async with TrainerProcess(settings) as trainer:
            reports[ranks] = [await trainer.train(0, unequal_batch(0))]
            if ranks == 1:
                assert await trainer.train(0, unequal_batch(0)) == reports[ranks][0]
            reports[ranks].append(await trainer.train(1, unequal_batch(1)))
            pids = list(trainer_pids(os.getpid()))
            assert len(pids) == ranks + 1
            with pytest.raises(TrainerError, match="iteration 5, but iteration 2 is due"):
                await trainer.train(5, unequal_batch(2))
        wait_until_gone(pids, timeout_s=5)

    for one, two in zip(reports[1], reports[2], strict=True):
        means = ("loss", "loss_policy", "loss_branch", "grad_norm", "ratio_mean", "ratio_max", "advantage_mean")
        for name in (*means, "mismatch_mean", "mismatch_max", "importance_weight_mean"):
            assert two.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5, abs=1e-7), name
        for name in ("tokens", "trajectories", "updates", "branch_positions"):
            assert two.metrics[name] == one.metrics[name], name
        assert one.snapshot.version == two.snapshot.version
        alone, together = (load_file(Path(r.snapshot.directory) / "model.safetensors") for r in (one, two))
        assert alone.keys() == together.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(together[name], tensor, rtol=0, atol=1e-5)
    AutoModelForCausalLM.from_pretrained(reports[2][1].snapshot.directory)
    AutoTokenizer.from_pretrained(reports[2][1].snapshot.directory)


@needs_proc
async def test_a_non_finite_sample_stops_all_ranks_names_it_and_publishes_nothing(
    student: Path, tmp_path: Path
) -> None:
    batch = unequal_batch(0)
    batch[4].behavior_logprobs[0] = np.nan
    async with TrainerProcess(trainer_settings(student, tmp_path, ranks=2)) as trainer:
        pids = list(trainer_pids(os.getpid()))
        for _ in range(2):  # and it stays stopped
            with pytest.raises(TrainerError, match=r"^iteration 0, .*policy loss in sample 'problem-4' \(ordinal 4\)"):
                await trainer.train(0, batch)
    wait_until_gone(pids, timeout_s=5)
    assert list((tmp_path / "weights").iterdir()) == []


@needs_proc
async def test_a_full_disk_is_one_clear_line_and_older_weights_still_load(student: Path, tmp_path: Path) -> None:
    async with TrainerProcess(trainer_settings(student, tmp_path)) as trainer:
        report = await trainer.train(0, unequal_batch(0))
        limit = 16_000  # bytes a file may have from now on: configuration fits, weights do not
        resource.prlimit(pid_of_rank(0), resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(TrainerError) as caught:
            await trainer.train(1, unequal_batch(1))
    message = str(caught.value)
    assert message.startswith(f"cannot publish weights to {tmp_path / 'weights' / 'step-000002'}: ")
    assert "File too large" in message
    assert f"complete weights up to {report.snapshot.directory} are untouched" in message
    assert "\n" not in message
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["step-000001"]
    AutoModelForCausalLM.from_pretrained(report.snapshot.directory)


@needs_proc
async def test_a_killed_rank_is_named_within_seconds(student: Path, tmp_path: Path) -> None:
    async with TrainerProcess(trainer_settings(student, tmp_path, ranks=2)) as trainer:
        pids = list(trainer_pids(os.getpid()))
        victim = pid_of_rank(1)
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(10):
            with pytest.raises(ProcessDiedError, match=rf"rank 1 \(pid {victim}\) was killed by SIGKILL"):
                await trainer.watch()
            with pytest.raises(TrainerError, match=rf"rank 1 \(pid {victim}\) was killed by SIGKILL"):
                await trainer.train(0, unequal_batch(0))
        wait_until_gone(pids, timeout_s=5)


async def test_a_student_that_cannot_be_loaded_is_named(student: Path, tmp_path: Path) -> None:
    missing = tmp_path / "no-such-student"
    with pytest.raises(TrainerError, match=f"DataError: student {missing} cannot be loaded") as caught:
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


@needs_proc
def test_no_trainer_process_outlives_a_killed_owner(student: Path, tmp_path: Path) -> None:
    settings_path = trainer_settings(student, tmp_path).save()
    with subprocess.Popen([sys.executable, "-c", OWNER, str(settings_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        pids = list(trainer_pids(owner.pid))
        assert len(pids) == 2  # launcher and rank
        owner.kill()
    wait_until_gone(pids, timeout_s=5)


# Stands for rank 0: loses the first acknowledgement, answers late for another iteration, then sleeps.
DEAF_RANK = """
import sys, zmq
from spot_async import wire
from spot_async.trainer.messages import Accepted, Batch, Ready, Trained, endpoint
from spot_async.types import TrainReport, WeightSnapshot, WeightVersion

socket = zmq.Context().socket(zmq.PAIR)
socket.connect(endpoint(sys.argv[1]))
report = lambda step: TrainReport(snapshot=WeightSnapshot(directory="w", version=WeightVersion(0, step)), metrics={})
socket.send(wire.encode(Ready()))
first, second = [wire.decode(socket.recv(), Batch) for _ in range(2)]
assert first.iteration == second.iteration == 3
socket.send(wire.encode(Trained(2, report(99))))
socket.send(wire.encode(Accepted(3)))
socket.send(wire.encode(Trained(3, report(4))))
socket.recv()
socket.recv()
"""


async def test_a_lost_acknowledgement_is_sent_again_late_answers_are_dropped_and_silence_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_deaf_rank(name: str, argv: Sequence[str], *, log_path: Path) -> ChildProcess:
        return await start(name, [sys.executable, "-c", DEAF_RANK, argv[-1]], log_path=log_path)

    start = ChildProcess.start
    monkeypatch.setattr(ChildProcess, "start", start_deaf_rank)
    monkeypatch.setattr(handle, "ACKNOWLEDGEMENT_TIMEOUT_S", 0.1)
    async with TrainerProcess(trainer_settings(tmp_path, tmp_path, step_timeout_s=5.0)) as trainer:
        report = await trainer.train(3, [supervision(0, 3)])
        assert report.snapshot.version == WeightVersion(0, 4)
    monkeypatch.setattr(handle, "ACKNOWLEDGEMENT_TIMEOUT_S", 60.0)
    with pytest.raises(TrainerError, match=r"iteration 3 was not trained within training.step_timeout_s=2"):
        async with TrainerProcess(trainer_settings(tmp_path, tmp_path, step_timeout_s=2.0)) as trainer:
            await trainer.train(3, [supervision(0, 3)])
