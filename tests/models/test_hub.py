"""Models of the hub: what is downloaded, what a run records, and what is refused in one line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import hub_stand_in
import pytest
from command import invoke
from huggingface_hub import constants

from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError
from spot_async.models.files import read_model
from spot_async.models.hub import HUB, is_same_model, local_path, the_hub, with_downloads

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def files():
    found = {each.name: each.read_bytes() for each in (EXAMPLE / "student").iterdir()}
    return {**found, "pytorch_model.bin": b"pickled", "modeling_own.py": b"raise SystemExit", "README.md": b"# It"}


@pytest.fixture
def hub(monkeypatch, tmp_path, files):
    monkeypatch.chdir(tmp_path)
    with hub_stand_in.reached(monkeypatch, tmp_path / "cache") as hub:
        hub.repositories["org/student"] = hub_stand_in.Repository()
        hub.repositories["org/student"].commit(files)
        yield hub


def config(student: str, *overrides: str):
    models = [f"{role}.model={EXAMPLE / role}" for role in ("student", "teacher")]
    data = [f"data.train={EXAMPLE / 'data' / 'train.jsonl'}", "evaluation=null"]
    return load_config(ROOT / "configs" / "quickstart.yaml", [*models, *data, f"student.model={student}", *overrides])


def refusal(student: str, kind: type[Exception] = ConfigError, *overrides: str) -> str:
    with pytest.raises(kind) as raised:
        with_downloads(config(student, *overrides))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_model_of_the_hub_is_downloaded_once_and_its_commit_is_what_a_run_goes_on_with(hub, files):
    said: list[str] = []
    pinned = with_downloads(config("org/student"), said.append)
    commit = next(iter(hub.repositories["org/student"].commits))
    assert pinned.student.model == f"org/student@{commit}"
    assert [line.partition(", ")[0] for line in said] == [f"student.model: downloading org/student@{commit}"]
    directory = Path(local_path(pinned.student.model))
    assert {each.name for each in directory.iterdir()} == files.keys() - {
        "pytorch_model.bin", "modeling_own.py", "README.md",
    }  # fmt: skip
    assert (directory / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert read_model("student", pinned.student.model).directory == directory
    assert pinned.teacher.model == str(EXAMPLE / "teacher")  # a path is left as it is
    # The branch continues. The run that recorded the commit continues with its files, and asks nobody for them.
    later = hub.repositories["org/student"].commit({**files, WEIGHTS: b"others"})
    hub.asked.clear()
    assert with_downloads(pinned, said.append) == pinned
    assert (hub.asked, len(said)) == ([], 1)
    assert is_same_model("org/student", pinned.student.model)
    assert not is_same_model(f"org/student@{later}", pinned.student.model)


def test_without_weights_only_small_files_come_and_those_who_load_the_model_get_the_rest(hub):
    looked_at = with_downloads(config("org/student"), weights=())
    directory = Path(local_path(looked_at.student.model))
    assert read_model("student", looked_at.student.model).directory == directory
    assert not (directory / WEIGHTS).exists()
    assert with_downloads(looked_at) == looked_at
    assert (directory / WEIGHTS).exists()
    # An evaluation asks no teacher, and a server elsewhere has its teacher's weights.
    hub.repositories["org/teacher"] = hub.repositories["org/student"]
    found = with_downloads(config("org/student", "teacher.model=org/teacher"), weights=("student",))
    assert not (Path(local_path(found.teacher.model)) / WEIGHTS).exists()
    found = with_downloads(
        config(
            "org/student",
            "teacher.model=org/teacher",
            "evaluation=null",
            "teacher.backend={kind: local, url: 'http://127.0.0.1:1'}",
        )
    )
    assert not (Path(local_path(found.teacher.model)) / WEIGHTS).exists()


def test_each_of_several_teachers_may_be_of_the_hub(hub):
    hub.repositories["org/teacher"] = hub.repositories["org/student"]
    teachers = f"{{a: {{model: org/teacher}}, b: {{model: {EXAMPLE / 'teacher'}}}}}"
    found = with_downloads(config("org/student", "teacher=null", f"teachers={teachers}", "policy=opd"))
    commit = next(iter(hub.repositories["org/teacher"].commits))
    assert [each.model for each in found.teachers.values()] == [f"org/teacher@{commit}", str(EXAMPLE / "teacher")]
    assert (Path(local_path(found.teachers["a"].model)) / WEIGHTS).exists()


def test_offline_the_cache_is_used_and_a_hub_that_cannot_be_reached_is_said_with_what_to_do(hub, monkeypatch):
    from huggingface_hub import constants

    pinned = with_downloads(config("org/student"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert with_downloads(config("org/student")) == pinned
    assert "no whole org/other in the hub's cache" in refusal("org/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    said = refusal("org/student", DataError)
    assert said.startswith("student.model: no directory 'org/student' (")
    assert f"{the_hub()} cannot be reached: " in said
    assert said.endswith("or set HF_HUB_OFFLINE=1 to use a copy in the cache")


def test_what_the_hub_does_not_give_is_refused_with_what_to_do_and_no_token_is_shown(hub, monkeypatch, files):
    hub.repositories |= {name: hub_stand_in.Repository() for name in ("org/gated", "org/pickled", "org/adapter")}
    hub.repositories["org/gated"].gated = True
    hub.repositories["org/gated"].commit(files)
    hub.repositories["org/pickled"].commit({"config.json": files["config.json"], "pytorch_model.bin": b"pickled"})
    hub.repositories["org/adapter"].commit({"adapter_config.json": b"{}", "adapter_model.safetensors": b""})
    assert f"org/pickled on {the_hub()} has no safetensors" in refusal("org/pickled", DataError)
    assert f"org/adapter on {the_hub()} holds an adapter" in refusal("org/adapter", DataError)
    assert refusal("org/student@v2") == f"student.model: org/student on {the_hub()} has no revision 'v2'"
    assert f"no public org/none on {the_hub()}: give the path" in refusal("org/none")
    assert refusal("org/gated").endswith("only for accounts that were given access: set HF_TOKEN to a token of one")
    monkeypatch.setenv("HF_TOKEN", hub_stand_in.TOKEN)
    hub.repositories["org/student"].private = True
    with_downloads(config("org/student"))
    assert f"no org/none on {the_hub()} that the account of HF_TOKEN may read" in refusal("org/none")
    assert refusal("org/gated").endswith("ask for access with the account of HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refusal("org/none") == (
        f"student.model: {the_hub()} refuses HF_TOKEN (401): give a token that is valid and may do this"
    )


def test_a_path_is_never_asked_for_at_the_hub(hub, tmp_path):
    (tmp_path / "org").mkdir()
    for path in ("models/student", "runs/student", "org/studnt", "./org/student", "no/such/model"):
        assert with_downloads(config(path)).student.model == path
    (tmp_path / "org" / "student").mkdir()
    assert with_downloads(config("org/student")).student.model == "org/student"
    assert hub.asked == []


def test_ctrl_c_ends_a_command_that_downloads_at_once(tmp_path):
    """Threads of a download hear of no signal, and Python waits for them at its end."""
    program = tmp_path / "downloading.py"
    program.write_text(
        "import concurrent.futures, threading\n"
        "from spot_async.cli.ending import ending_at_once\n"
        "with ending_at_once(), concurrent.futures.ThreadPoolExecutor() as threads:\n"
        "    threads.submit(lambda: (print('begun', flush=True), threading.Event().wait()))\n"
    )
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read().startswith("stopped by SIGINT")


@pytest.mark.long
def test_the_commands_take_models_of_the_hub(hub, monkeypatch, files):
    hub.repositories["org/teacher"] = hub_stand_in.Repository()
    teacher = EXAMPLE / "teacher"
    hub.repositories["org/teacher"].commit({each.name: each.read_bytes() for each in teacher.iterdir()})
    shown = invoke(
        monkeypatch, "train", "configs/quickstart.yaml", "--dry-run", "student.model=org/student",
        "teacher.model=org/teacher", "evaluation=null",
    )  # fmt: skip
    assert shown.exit_code == 0, shown.stderr
    commit = next(iter(hub.repositories["org/teacher"].commits))
    assert f"model: org/teacher@{commit}" in shown.stdout
    assert "downloading" not in shown.stdout
    assert f"teacher.model: downloading org/teacher@{commit}" in shown.stderr


def test_a_mirror_is_named_in_what_is_refused_and_the_hub_itself_is_not(hub, monkeypatch):
    assert f"org/none on the hub (HF_ENDPOINT={constants.ENDPOINT})" in refusal("org/none")
    monkeypatch.setattr(constants, "ENDPOINT", HUB)
    assert the_hub() == "the hub"
