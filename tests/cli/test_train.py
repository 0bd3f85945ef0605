"""`spot-async train` as a user runs it, on the shipped models: what it leaves, and how it fails.

Every drill ends with one clear line and no process left. Those that kill or interrupt something use real processes
and real signals only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import trainer_on_thread
from command import (
    QUICK,
    arguments,
    assert_nothing_left,
    assert_refused,
    error_lines,
    invoke,
    small_disk,
    train,
)
from problem_files import FEW

from spot_async.base.processes.resources import available_cores
from spot_async.trainer.handle import TrainerProcess

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def ranks(request):
    """Of the finished run: one on a thread of this process, or two trainer processes."""
    return request.param


@pytest.fixture(scope="module")
def finished_run(ranks, tmp_path_factory, few_problems, servers_on_threads):
    """The drills below have servers that are processes, too."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOT_ASYNC_TEST", "finished")
        if ranks == 1:
            patch.setattr(TrainerProcess, "_make_ranks", trainer_on_thread.make)
        done = invoke(
            patch,
            "train",
            "configs/quickstart.yaml",
            f"run.directory={run}",
            f"data.train={few_problems}",
            *QUICK[:-1],
            "evaluation.samples=2",
            "evaluation.eval_every=1",
            f"evaluation.problems={held_out(run.parent)}",
            f"training.ranks={ranks}",
        )
    assert done.exit_code == 0, done.stderr
    assert_nothing_left("SPOT_ASYNC_TEST=finished", but=os.getpid())
    return run, done.stdout


CHECK = ("check", "configs/quickstart.yaml", "--no-servers", FEW, *QUICK[:-1])


def test_check_says_before_what_a_run_keeps(finished_run, ranks, monkeypatch):
    run, _ = finished_run
    shown = invoke(
        monkeypatch, *CHECK, "run.directory=runs/new", f"training.ranks={ranks}",
        "evaluation=null", "--from", str(run), "--json",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.stderr
    found = json.loads(shown.stdout)["requirements"]
    sizes = found["expected"]
    weights = (run / "student" / "model.safetensors").stat().st_size
    assert sizes["publish_bytes"] == pytest.approx(weights, rel=0.02)
    checkpoints = [sum(file.stat().st_size for file in each.iterdir()) for each in (run / "checkpoints").iterdir()]
    assert sizes["checkpoint_bytes"] == pytest.approx(checkpoints[0], rel=0.05)
    assert sizes["checkpoints_kept_bytes"] == pytest.approx(sum(checkpoints), rel=0.05)
    assert sizes["samples_bytes"] == pytest.approx((run / "samples.jsonl").stat().st_size, rel=0.3)
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ((), True),
        pytest.param(("training.device=cpu",), False, marks=pytest.mark.long),
        pytest.param(("training.offload=optimizer",), False, marks=pytest.mark.long),
    ],
)
def test_check_says_what_a_checkpoint_takes_of_the_host(keys, is_said, monkeypatch):
    shown = invoke(monkeypatch, *CHECK, "evaluation=null", *keys)
    assert shown.exit_code == 0, shown.stderr
    assert ("a checkpoint goes through the first node's host memory: " in shown.stdout) == is_said


def test_check_counts_adapters_that_are_published_alone(monkeypatch):
    def sizes(*keys):
        shown = invoke(
            monkeypatch, *CHECK, "training.iterations=40", "evaluation=null",
            "training.lora={rank: 4}", "training.keep_weights=3", "--json", *keys,
        )  # fmt: skip
        assert shown.exit_code == 0, shown.stderr
        return json.loads(shown.stdout)["requirements"]["expected"]

    whole, alone = sizes(), sizes("student.backend.weights={transport: adapter}")
    assert alone["publish_bytes"] == alone["adapter_bytes"] == whole["adapter_bytes"] < 0.2 * whole["publish_bytes"]
    # Two that are whole and one that is being written; the adapters of the last three.
    assert alone["published_kept_bytes"] == 3 * whole["publish_bytes"] + 3 * alone["adapter_bytes"]
    assert whole["published_kept_bytes"] == 4 * whole["publish_bytes"]


@pytest.mark.long
def test_check_counts_weights_in_memory_apart_from_the_disk(monkeypatch, tmp_path):
    monkeypatch.setattr("spot_async.checks.machine.is_in_memory", lambda directory: True)
    monkeypatch.setattr("spot_async.tools.check.view.is_in_memory", lambda directory: True)
    monkeypatch.setattr("spot_async.checks.machine.available_bytes", lambda: 1_000_000)
    given = [*CHECK, "training.iterations=40", "training.keep_weights=3",
             f"training.weights_directory={tmp_path}"]  # fmt: skip
    shown = invoke(monkeypatch, *given, "--json")
    sizes = json.loads(shown.stdout)["requirements"]["expected"]
    assert sizes["published_elsewhere_bytes"] == 4 * sizes["publish_bytes"]
    assert sizes["published_kept_bytes"] == 2 * sizes["publish_bytes"]
    assert shown.exit_code == 2
    assert "published weights take 1.6 MB there, and this machine's memory has 1.0 MB left" in shown.stderr
    assert "memory: published in" in invoke(monkeypatch, *given).output


def held_out(folder: Path) -> Path:
    lines = (EXAMPLE / "data" / "heldout.jsonl").read_text().splitlines()
    path = folder / "heldout.jsonl"
    path.write_text("\n".join(lines[:3] + lines[-3:]) + "\n")
    return path


def test_a_run_ends_with_a_table_and_a_student_that_loads(finished_run, ranks):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, out = finished_run
    assert re.search(r"before +after +change +before +after", out)
    assert re.search(r"all +6( +[+-]?[\d.]+ ±[\d.]+){5}", out)
    assert re.search(r"2 iterations in \d+ s; prompts: 16 trained", out)
    log = (run / "logs" / "trainer.log").read_text()
    if ranks == 2:  # a thread has no log of its own
        assert re.search(r"^rank 0 computes on .*torch ", log, re.MULTILINE)
        assert "attention: sdpa, one call for each document\n" in log
    assert out.count("training with spot") == 2  # before each iteration, and not once more after the last evaluation
    trained = AutoModelForCausalLM.from_pretrained(run / "student").state_dict()
    initial = AutoModelForCausalLM.from_pretrained(EXAMPLE / "student").state_dict()
    assert any(not (trained[name] == initial[name]).all() for name in initial)
    assert AutoTokenizer.from_pretrained(run / "student").chat_template


def test_a_run_can_be_looked_at(finished_run, tmp_path, monkeypatch):
    run, _ = finished_run
    events = json.loads((run / "trace.json").read_bytes())
    names = [event["name"] for event in events]
    assert names.count("wait for batch") == 2
    assert sum((event["ph"], event["name"]) == ("X", "rollout") for event in events) == 16

    shown = invoke(monkeypatch, "inspect", str(run), "0", "--html", str(tmp_path / "sample.html"))
    assert shown.exit_code == 0
    (first, *_) = (json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines())
    candidate = first["branches"][0]["candidates"][0]
    assert candidate["continuations"][0][:20] in shown.output
    assert 0 <= candidate["student"] <= 1
    assert "&lt;|end|&gt;" in (tmp_path / "sample.html").read_text()  # tokens by the trained student's tokenizer

    assert invoke(monkeypatch, "report", str(run), "--html", str(tmp_path / "report.html")).exit_code == 0
    assert "bound: " in (tmp_path / "report.html").read_text()


def test_a_run_records_what_spot_saw(finished_run):
    run, _ = finished_run
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    branches = [branch for sample in samples for branch in sample["branches"]]
    assert branches
    for sample in samples:
        assert len(sample["acquisition_score"]) == len(sample["response_ids"])
        best = sorted((s for s in sample["acquisition_score"] if s is not None), reverse=True)[:2]
        chosen = [sample["acquisition_score"][p] for p in sample["selected_positions"]]
        assert sorted(chosen, reverse=True) == best[: len(chosen)]
    for branch in branches:
        values = [c["value"] for c in branch["candidates"]]
        assert branch["retained"] == (max(values) > 0)
        assert sum(c["target"] for c in branch["candidates"]) == pytest.approx(1, abs=1e-5)
        for candidate in branch["candidates"]:
            assert candidate["verdicts"] == ["correct" if candidate["value"] else candidate["verdicts"][0]]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["iteration"] for m in metrics] == [1, 2]
    assert all(m["train/trajectories"] == 8 for m in metrics)


def test_evaluations_during_the_run_are_recorded_and_keep_the_best_student(finished_run):
    from transformers import AutoModelForCausalLM

    run, out = finished_run
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    best = summary["best"]
    assert best["value"] == max(row["evaluation/avg@2"] for row in rows)
    assert best["value"] == rows[best["iteration"] - 1]["evaluation/avg@2"]
    assert (run / "best").resolve() == run / "weights" / f"best-{best['iteration']:06d}"
    AutoModelForCausalLM.from_pretrained(run / "best")
    assert (run / "evaluation-000002.jsonl").read_bytes() == (run / "evaluation-after.jsonl").read_bytes()
    assert len((run / "evaluation-000001.jsonl").read_text().splitlines()) == 12
    better = best["value"] > summary["before"]["tiers"]["all"]["avg"]
    assert f"best: iteration {best['iteration']}, Avg@2 {100 * best['value']:.1f} ±" in out
    assert ("no better than before training" in out) != better
    assert "optimistic" in out


def test_the_written_configuration_runs_again(finished_run, ranks, tmp_path, monkeypatch):
    run, _ = finished_run
    dry = invoke(monkeypatch, "train", str(run / "config.yaml"), f"run.directory={tmp_path / 'again'}", "--dry-run")
    assert dry.exit_code == 0, dry.stderr
    assert "<|user|>" in dry.output  # a rendered prompt
    assert f"{ranks} rank(s)" in dry.output
    assert not (tmp_path / "again").exists()


def test_a_directory_with_a_run_in_it_is_not_overwritten(finished_run, monkeypatch):
    run, _ = finished_run
    assert_refused(invoke(monkeypatch, *arguments(run)), "run.directory", "not empty")
    assert (run / ".lock").read_text().startswith("process ")  # nor while it runs


def test_a_missing_model_directory_is_one_line_and_exit_code_2(tmp_path):
    command = train(tmp_path / "run", "student.model=no/such/model")
    code, out, err = command.finish()
    assert code == 2, err
    (line,) = error_lines(err)
    assert (out, err) == ("", f"{line}\n")
    assert "student.model" in line
    assert "no/such/model" in line
    command.assert_nothing_left()


@pytest.mark.long
def test_a_server_that_cannot_start_is_one_line_and_the_next_start_says_what_to_delete(tmp_path, monkeypatch):
    command = train(tmp_path / "run", "teacher.backend.device=gpu")
    code, _, err = command.finish()
    assert code == 1
    (line,) = error_lines(err)
    assert "device=gpu" in line
    command.assert_nothing_left()
    again = invoke(monkeypatch, *arguments(tmp_path / "run"))
    assert_refused(again, "run.directory", f"nothing was trained in it: delete it if process {command.process.pid} on ")


@pytest.mark.long
def test_a_teacher_killed_in_mid_run_ends_it_and_keeps_what_was_trained(tmp_path):
    run = tmp_path / "run"
    command = train(run, "training.iterations=500", "teacher.serving.restarts=0")
    command.wait_for(run / "student" / "config.json")
    (teacher,) = [pid for pid, line in command.processes().items() if "serv" in line and "sum/teacher" in line]
    os.kill(teacher, signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = command.finish()
    assert code == 1
    assert time.monotonic() - killed < max(15, command.start_s)  # a busy machine is slow at both
    (line,) = error_lines(err)
    assert f"teacher (pid {teacher}) was killed by SIGKILL" in line
    assert "saved: step-" in err
    command.assert_nothing_left()
    assert_complete(run)


@pytest.fixture(scope="module")
def interrupted_run(tmp_path_factory):
    """A student that is its own teacher, one update an iteration; stopped by Ctrl-C after some."""
    run = tmp_path_factory.mktemp("runs") / "interrupted"
    own_teacher = [f"teacher.model={EXAMPLE / 'student'}", "sampling.temperature=0.5", "policy=opd"]
    command = train(run, "training.iterations=500", "training.mini_batch_size=8", *own_teacher)
    command.wait_for(run / "student" / "config.json")
    command.process.send_signal(signal.SIGINT)
    stopped = time.monotonic()
    code, _, err = command.finish()
    return command, run, code, err, time.monotonic() - stopped


@pytest.mark.long
def test_ctrl_c_stops_within_seconds_and_says_what_is_saved(interrupted_run):
    command, run, code, err, seconds = interrupted_run
    assert seconds < max(10, command.start_s)  # a busy machine is slow at both
    assert code == 130
    assert "stopped by SIGINT; saved: step-" in err
    assert "Traceback" not in err
    command.assert_nothing_left()
    assert_complete(run)


@pytest.mark.long
def test_servers_and_trainer_agree_on_temperature_and_on_whose_token_is_whose(interrupted_run):
    _, run, *_ = interrupted_run
    first, *_ = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert first["train/updates"] == 1  # of the weights that were sampled from
    assert first["train/advantage_mean"] == pytest.approx(0, abs=1e-4)
    assert first["train/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert first["train/behavior_kl"] < 1e-6


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """With the cores that each of its processes could use, by their command lines, and the orchestrator's libraries."""
    run = tmp_path_factory.mktemp("runs") / "killed"
    command = train(run, "training.iterations=500")
    command.wait_for(run / "student" / "config.json")
    cores = {}
    for pid, line in (command.processes() | {command.process.pid: "orchestrator"}).items():
        with contextlib.suppress(ProcessLookupError):  # one that has ended meanwhile
            cores[line] = os.sched_getaffinity(pid)
    libraries = Path(f"/proc/{command.process.pid}/maps").read_text()
    command.process.kill()
    command.finish()
    return command, run, cores, libraries


@pytest.mark.long
def test_a_killed_orchestrator_leaves_no_process(killed_run):
    command, run, cores, _ = killed_run
    assert len(cores) >= 4  # orchestrator, student, teacher, rank
    command.assert_nothing_left()
    assert_complete(run)


@pytest.mark.long
def test_the_orchestrator_of_a_run_has_no_torch(killed_run):
    *_, libraries = killed_run
    assert "numpy" in libraries
    assert "torch" not in libraries


@pytest.mark.long
@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores that processes can be bound to")
def test_the_quickstart_s_student_has_a_core_of_its_own_and_training_uses_all(killed_run):
    _, _, cores, _ = killed_run
    (student,) = [own for line, own in cores.items() if "serv" in line and "sum/student" in line]
    (teacher,) = [own for line, own in cores.items() if "serv" in line and "sum/teacher" in line]
    trainers = [own for line, own in cores.items() if "spot_async.trainer" in line]
    assert len(student) == 1
    assert teacher == cores["orchestrator"] == available_cores() - student
    assert trainers
    assert all(own == available_cores() for own in trainers)


@pytest.mark.long
def test_a_full_disk_ends_the_run_and_keeps_what_was_trained(tmp_path, monkeypatch, servers_on_threads):
    with small_disk(tmp_path / "disk", "1500k") as disk:
        run = disk / "run"
        monkeypatch.setenv("SPOT_ASYNC_TEST", "full-disk")
        ended = invoke(monkeypatch, *arguments(run, "training.iterations=500", "training.keep_weights=500"))
        assert ended.exit_code == 1
        (line,) = error_lines(ended.stderr)
        assert "No space left on device" in line
        assert_nothing_left("SPOT_ASYNC_TEST=full-disk", but=os.getpid())
        assert (run / "student" / "model.safetensors").stat().st_size > 400_000


def assert_complete(run: Path) -> None:
    """The newest student loads, and each line written is whole."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run / "student")
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        assert rows
