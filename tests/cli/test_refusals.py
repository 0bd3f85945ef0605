"""What `spot-async` says before it starts anything: refusals in one line, the dry run, the version."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command import arguments, assert_refused, invoke
from problem_files import FEW, write
from safetensors.numpy import load_file, save_file

from spot_async.__main__ import main
from spot_async.checks import machine as checked_room
from spot_async.config.loading import load_config
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.reading import RunFiles

EXAMPLE = Path(__file__).parents[2] / "examples" / "running_sum"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Assert that a run with one override is refused, with these words, and leaves no directory."""

    def check(override: str, *expected: str) -> None:
        assert_refused(invoke(monkeypatch, *arguments(tmp_path / "run", override)), *expected)
        assert not (tmp_path / "run").exists()

    return check


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_dry_run_finds_a_directory_that_cannot_be_made_and_may_leave_the_configuration_out(command, monkeypatch):
    dry = [command, "configs/quickstart.yaml", FEW, "--dry-run", "--brief"]
    shown = invoke(monkeypatch, *dry)
    assert shown.exit_code == 0, shown.stderr
    assert "would start" in shown.output
    assert "learning_rate" not in shown.output
    assert_refused(invoke(monkeypatch, *dry, "run.directory=README.md/run"), "run.directory", "Not a directory")
    assert_refused(invoke(monkeypatch, command, "configs/quickstart.yaml", "--brief"), "--brief", "--dry-run")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("dry-run", "train --dry-run"), ("resume", "train --resume"), ("configs/x.yaml", "train configs/x.yaml")],
)
def test_an_option_or_a_file_in_a_commands_place_is_told_with_the_command(monkeypatch, given, meant):
    assert_refused(invoke(monkeypatch, given, "x"), f"{given}: no such command; did you mean `spot-async {meant}`?")


@pytest.mark.parametrize(
    ("retired", "now"),
    [
        ("plan", "spot-async check CONFIG --no-servers"),
        ("doctor", "spot-async check CONFIG"),
        ("data", "spot-async check FILE"),
        ("forecast", "spot-async check CONFIG --slope N"),
        ("conformance", "pytest -p spot_async.testing.conformance.plugin --pyargs spot_async.testing.conformance"),
    ],
)
def test_a_retired_command_says_which_one_does_its_work(monkeypatch, retired, now):
    shown = invoke(monkeypatch, retired, "check", "x", "--json")
    assert (shown.exit_code, shown.stderr) == (2, f"error: {retired}: is now `{now}`\n")


def test_what_cannot_be_resumed_is_one_line(monkeypatch, tmp_path):
    def resume(*given):
        return invoke(monkeypatch, "train", "--resume", *given)

    assert_refused(resume(str(tmp_path)), "is no run directory: it has no readable run.json")
    assert_refused(resume("auto"), "--resume auto: give CONFIG, whose run.directory is looked at")
    assert_refused(resume("auto", "configs/quickstart.yaml"), "--resume auto: run.directory must be set")
    assert_refused(invoke(monkeypatch, "train"), "CONFIG: give a configuration file, or a run to continue")
    run = RunDirectory.create(tmp_path / "run", load_config(Path("configs/quickstart.yaml")))
    assert_refused(resume(str(run.path)), "it has no checkpoint to resume from")
    whole = (run.path / "run.json").read_text()
    (run.path / "run.json").write_text(whole.replace('"format": 4', '"format": 1'))
    only = "has format 1, and this spot-async continues runs of format 4 only: finish the run with"
    assert_refused(resume(str(run.path)), only)
    assert RunFiles(run.path).metrics() == []  # it is read all the same
    (run.path / "run.json").write_text(whole)
    assert_refused(
        resume(str(run.path), "training.learning_rate=1"),
        "training.learning_rate=1.0: the run began with 0.0002, and its numbers depend on it",
    )
    assert_refused(invoke(monkeypatch, "verify-run", str(run.path)), "holds no ledger.sqlite")
    with run.locked():
        assert_refused(resume(str(run.path)), "is in use")
    for given in ([str(run.path), "configs/quickstart.yaml"], [str(run.path), "my.yaml", "training.iterations=3"]):
        assert_refused(resume(*given), f"{given[1]}: --resume continues {run.path}/config.yaml: take CONFIG away")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--lr", "1e-4"], "--lr: no such option; keys are given without dashes: training.learning_rate=1e-4"),
        (["-lr", "1e-4"], "-lr: no such option; keys are given without dashes: training.learning_rate=1e-4"),
        (["--training.learning_rate=1e-4"], "given without dashes: training.learning_rate=1e-4"),
        (["--batch-size", "8"], "--batch-size: no such option; keys are given without dashes: training.batch_size=8"),
        (["--seed=3", "--dry-run"], "--seed: no such option; keys are given without dashes: run.seed=3 or evaluation"),
        (["--num_train_epochs", "--dry-run"], "keys are given without dashes: training.epochs=..."),
        (["--use-peft"], "--use-peft: no such option; LoRA is `training.lora"),
        (["--gamma", "2"], "--gamma: no such option; keys are given without dashes: section.key=value"),
        (["--config", "my.yaml"], "--config: no such option; the file is given without one: my.yaml"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval", "check"])
def test_an_option_that_is_a_key_names_the_key(monkeypatch, command, given, said):
    assert_refused(invoke(monkeypatch, command, "configs/quickstart.yaml", *given), said)


def test_a_misspelt_option_names_the_option_and_values_are_left_alone(monkeypatch):
    said = invoke(monkeypatch, "train", "configs/quickstart.yaml", "--dry_run")
    assert said.exit_code == 2
    assert "--dry-run" in said.stderr
    assert_refused(invoke(monkeypatch, "tune", "no.yaml", "-oout.yaml"), "no.yaml: cannot read the configuration")
    assert_refused(invoke(monkeypatch, "train", "--", "no.yaml", "--lr=1"), "no.yaml: cannot read")


def test_half_a_cluster_is_one_line_and_a_dry_run_says_which_node_this_is(monkeypatch, tmp_path, refused):
    refused("cluster.nodes=2", "cluster.node_rank: say which of the 2 nodes this is, 0 to 1")
    place = ["cluster.nodes=2", "cluster.node_rank=1", "cluster.address=127.0.0.1"]
    dry = arguments(tmp_path / "run", *place)
    assert_refused(invoke(monkeypatch, *dry), "training.ranks=1 cannot be shared by 2 nodes (the configuration)")
    assert_refused(invoke(monkeypatch, *dry, "training.ranks=2", "--dry-run"), "SPOT_ASYNC_CLUSTER_SECRET is not set")
    monkeypatch.setenv("SPOT_ASYNC_CLUSTER_SECRET", "0123456789abcdef")
    assert_refused(
        invoke(monkeypatch, *dry, "training.ranks=2"), "cluster.address=127.0.0.1, means each machine itself"
    )
    shown = invoke(monkeypatch, *dry, "training.ranks=2", "--dry-run", "--brief")
    assert "node 1 of 2 (the configuration), which meet at 127.0.0.1:29600" in shown.output
    spread = {"PET_NNODES": "2", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "a"}
    for name, value in spread.items():
        monkeypatch.setenv(name, value)
    refused("training.ranks=2", "cluster.nodes=2, but this is node 2 (PET_NNODES)")


def test_a_node_goes_on_with_what_the_run_began_with_whatever_the_configuration_says_by_now(monkeypatch, tmp_path):
    config = tmp_path / "my.yaml"

    def ask_for(ranks: int) -> None:
        config.write_text(f"base: {Path('configs/quickstart.yaml').resolve()}\ntraining: {{ranks: {ranks}}}\n")

    ask_for(3)
    run = RunDirectory.create(tmp_path / "run", load_config(config))
    (checkpoint := run.path / "checkpoints" / "step-000002").mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    ask_for(2)
    place = ["cluster.nodes=2", "cluster.node_rank=1", "cluster.address=127.0.0.1", f"run.directory={run.path}"]
    assert_refused(
        invoke(monkeypatch, "train", "--resume", "auto", str(config), *place), "training.ranks=3 cannot be shared by 2"
    )


def test_a_disk_without_room_for_a_checkpoint_is_one_line(monkeypatch, tmp_path, refused):
    left = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: left)
    refused(
        "run.seed=1",
        f"run.directory: a checkpoint takes 1.2 MB, and the disk of {tmp_path / 'run'} has 1.0 MB left: make room",
        "training.checkpoint_every=0",
    )
    without = invoke(monkeypatch, *arguments(tmp_path / "run", "training.checkpoint_every=0"), "--dry-run")
    assert without.exit_code == 0


def test_weights_that_find_no_room_or_no_reader_elsewhere_are_one_line(monkeypatch, tmp_path, refused):
    key = f"training.weights_directory={tmp_path}"
    refused(f"{key}/none", f"{key}/none: is no directory in which this user can write")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    refused(f"{key}/open", f"{tmp_path}/open can be written by everybody", f"chmod o-w {tmp_path}/open")
    refused(f"training={{weights_directory: {tmp_path}, checkpoint_every: 0}}", "checkpoint_every=0", "after a kill")
    with monkeypatch.context() as patch:
        patch.setattr(checked_room, "is_in_memory", lambda directory: True)
        patch.setattr(checked_room, "available_bytes", lambda: 500_000)
        refused(
            key, f"{key}: published weights take 8", "kB there, and this machine's memory has 500.0 kB left", "to null"
        )
    elsewhere = {
        "url: http://10.0.0.5:8000": "url=http://10.0.0.5:8000",
        "launch: {python: p, prefix: [env]}": "launch.prefix",
    }
    for given, named in elsewhere.items():
        run = arguments(tmp_path / "run", key, f"student.backend={{kind: vllm, {given}}}")
        line = f"{key}: it is private to this machine, and the server of student.backend.{named}"
        assert_refused(invoke(monkeypatch, *run), line, "weights.transport=distributed")
    left = shutil.disk_usage(tmp_path)
    full = left._replace(free=400_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if Path(path) == tmp_path / "full" else left)
    (tmp_path / "full").mkdir()
    refused(f"{key}/full", f"{key}/full: published weights take 8", f"kB there, and {tmp_path}/full has 400.0 kB left")


def test_different_vocabularies_are_one_line(tmp_path, refused):
    other = tmp_path / "teacher"
    shutil.copytree(EXAMPLE / "teacher", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["one"], vocab["two"] = vocab["two"], vocab["one"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(f"teacher.model={other}", "different vocabularies", "2 tokens", "'one'")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("evaluation={problems: examples/running_sum/data/heldout.jsonl, eval_every: 3}", "ends after iteration 2"),
        ("sampling.max_response_tokens=500", "at most 512"),
    ],
)
def test_what_this_run_would_never_do_is_one_line(refused, override, expected):
    refused(override, override.partition("=")[0], expected)


def test_a_student_without_layers_to_adapt_and_an_adapter_in_place_of_a_model_are_one_line(
    monkeypatch, tmp_path, refused
):
    model = tmp_path / "model"
    shutil.copytree(EXAMPLE / "student", model)
    weights = load_file(model / "model.safetensors")
    other = {name.replace(".self_attn.", ".attn.").replace("_proj.", "_map."): each for name, each in weights.items()}
    save_file(other, model / "model.safetensors")
    overrides = [f"student.model={model}", "training.lora={targets: attention}"]
    assert_refused(
        invoke(monkeypatch, *arguments(tmp_path / "run", *overrides)),
        f"training.lora.targets=attention: {model} has no layer q_proj, k_proj, v_proj, o_proj that takes an adapter "
        "(experts of mixtures take none); its linear layers: down_map, gate_map, k_map, o_map, q_map, up_map, v_map",
    )
    refused("training.lora={rank: 65}", "training.lora.rank=65: ", "lower it to 32 or less")
    (model / "adapter_config.json").write_text("{}")
    refused(f"student.model={model}", f"{model} holds an adapter beside a whole model", "take adapter_config.json out")
    (model / "config.json").rename(model / "adapter_config.json")
    refused(f"student.model={model}", f"student.model: {model} holds an adapter, and no whole model: give the dir")


@pytest.mark.parametrize(
    ("kind", "package"), [("flash_attention_2", "flash-attn"), ("kernels-community/flash-attn3", "kernels")]
)
def test_an_attention_kind_that_is_not_installed_names_the_package(tmp_path, refused, kind, package):
    model = tmp_path / "model"
    shutil.copytree(EXAMPLE / "student", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attn_implementation": kind}))
    refused(
        f"student.model={model}",
        f"config.json has attn_implementation={kind}, which is not installed here: pip install {package}, or take",
    )


def test_the_version_is_the_package_s(monkeypatch):
    done = invoke(monkeypatch, "--version")
    assert (done.exit_code, done.output) == (0, f"spot-async {importlib.metadata.version('spot-async')}\n")


def test_serve_refuses_a_missing_model_directory_in_one_line(monkeypatch):
    assert_refused(invoke(monkeypatch, "serve", "no/such/model"), "no/such/model: no such model directory")


def test_serve_refuses_a_model_that_others_can_write_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tmp_path.chmod(0o777)
    assert_refused(invoke(monkeypatch, "serve", str(tmp_path)), f"{tmp_path} can be written by everybody (mode 0777")


def test_what_the_command_makes_nobody_else_can_write_whatever_the_umask(monkeypatch):
    monkeypatch.setattr("sys.argv", ["spot-async", "--version"])
    monkeypatch.setattr("spot_async.cli.tune_gc", lambda: None)
    before = os.umask(0o002)
    try:
        with pytest.raises(SystemExit):
            main()
        assert os.umask(before) == 0o022
    finally:
        os.umask(before)
        gc.unfreeze()


def test_a_dry_run_says_how_many_problems_make_no_batch(tmp_path, monkeypatch):
    problems = write(tmp_path, [{"problem": f"a1+{i}b", "answer": i + 1} for i in range(9)])
    batches = [f"data.train={problems}", "training.batch_size=8", "training.mini_batch_size=8"]
    dry = invoke(monkeypatch, "train", "configs/quickstart.yaml", *batches, "--dry-run")
    assert "from 9 problems (0 too long); 1 left out of each epoch" in " ".join(dry.output.split())
