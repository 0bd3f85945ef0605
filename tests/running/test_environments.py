"""Runs whose student takes turns with an environment, from the configuration to the weights."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Command, assert_refused, error_lines, invoke, small_disk
from problem_files import write
from small_runs import EXAMPLE, HELD_OUT, example_run, rows

import spot_async
from spot_async.checks.plan import plan_training
from spot_async.config.loading import validate


@pytest.fixture(autouse=True)
def _found_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))


SEVERAL = [  # an environment for each of two sets, and none for the third
    {"path": HELD_OUT, "share": 0.5, "environment": {"object": "text_worlds:Again"}},
    {"path": HELD_OUT, "share": 0.25, "environment": {"object": "text_worlds:Once", "judge": "environment"}},
    {"path": HELD_OUT, "share": 0.25},
]


def small_run(run: Path, train: Any = HELD_OUT, **sections: Any) -> dict[str, Any]:
    training = {"iterations": 1, "batch_size": 16, "mini_batch_size": 8, "learning_rate": 2e-4}
    sampling = {"max_prompt_tokens": 64, "max_response_tokens": 240}
    own = {"teacher": {"model": str(EXAMPLE / "teacher")}, "data": {"train": train}, "run": {"directory": str(run)}}
    return example_run(**{**own, "sampling": sampling, "training": training, **sections})


async def test_a_run_learns_from_episodes_and_evaluates_on_them(
    tmp_path: Path, servers_on_threads: None, trainer_on_thread: None
) -> None:
    config = small_run(
        tmp_path / "run",
        environment={"object": "text_worlds:Again"},
        policy={"kind": "spot", "positions": 1, "probe_top_k": 2},
        training={"iterations": 2, "batch_size": 8, "mini_batch_size": 8, "learning_rate": 2e-4},
        evaluation={
            "problems": HELD_OUT,
            **{"limit": 4, "samples": 1, "max_response_tokens": 240, "verifier": "boxed_match"},
        },
    )
    await spot_async.run_async(config)
    samples = rows(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 16
    several = [each for each in samples if len(each["turns"]) == 2]
    assert len(several) > 8
    for each in several:
        assert each["problem"].count("1+1") == 0  # what reset said is in the prompt alone
        (read,) = [span for span in each["writers"] if span[2] == "environment"]
        assert read[1] == each["turns"][1]
        assert {each["behavior_logprobs"][t] for t in range(read[0], read[1])} == {None}
        assert not {branch["position"] for branch in each["branches"]} & set(range(read[0], read[1]))
        assert each["ended"] in ("done", "tokens")
    (row, *_) = rows(tmp_path / "run" / "metrics.jsonl")
    assert row["environment/turns"] > 1.5
    assert 0 < row["environment/read_share"] < 0.5
    assert row["environment/reward"] > 0.5
    held_out = rows(tmp_path / "run" / "evaluation-after.jsonl")
    assert {each["turns"] for each in held_out} & {2}


async def test_each_set_is_played_in_its_own_environment_and_the_last_in_none(
    tmp_path: Path, servers_on_threads: None, trainer_on_thread: None
) -> None:
    set_of = {"path": HELD_OUT, "samples": 1, "max_response_tokens": 240, "verifier": "boxed_match"}
    benchmarks = {"played": {**set_of, "environment": {"object": "text_worlds:Again"}}, "plain": set_of}
    evaluated = {"evaluation": {"benchmarks": benchmarks, "limit": 2}}
    await spot_async.run_async(small_run(tmp_path / "run", SEVERAL, **evaluated))
    of_set: dict[str, list[dict[str, Any]]] = {"1": [], "2": [], "3": []}
    for each in rows(tmp_path / "run" / "samples.jsonl"):
        of_set[each["problem_id"][0]].append(each)
    assert [*map(len, of_set.values())] == [8, 4, 4]
    assert max(len(each["turns"]) for each in of_set["1"]) == 2
    assert all(each["turns"] == [0] for each in of_set["2"])
    assert {each["reward"] for each in of_set["2"] if each["ended"] == "done"} == {0.25}
    assert all("turns" not in each for each in of_set["3"])
    (row,) = rows(tmp_path / "run" / "metrics.jsonl")
    played = [each for key in "12" for each in of_set[key]]
    assert row["environment/turns"] == pytest.approx(sum(len(each["turns"]) for each in played) / 12)
    held_out = rows(tmp_path / "run" / "evaluation-after.jsonl")
    assert [("turns" in each) for each in held_out] == [each["benchmark"] == "played" for each in held_out]

    sets = [{name: value for name, value in each.items() if name != "environment"} for each in SEVERAL]
    await spot_async.run_async(small_run(tmp_path / "plain", sets))
    plain = [
        each["response_ids"] for each in rows(tmp_path / "plain" / "samples.jsonl") if each["problem_id"][0] == "3"
    ]
    assert sorted(plain) == sorted(each["response_ids"] for each in of_set["3"])


@pytest.mark.usefixtures("servers_on_threads", "asked_again_soon")
@pytest.mark.parametrize("policy", ["opd", "kd"])
def test_check_plays_episodes_of_every_environment(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(small_run(tmp_path / "run", SEVERAL, policy=policy)))
    shown = invoke(monkeypatch, "check", str(tmp_path / "run.yaml")).output
    (first, second) = [line for line in shown.splitlines() if line.startswith("environment of data.train.")]
    assert "data.train.0: 8 episodes" in first
    assert "played again in a new process: the same" in first
    assert "data.train.1: 8 episodes: 1.0 turns" in second


def test_sets_with_equal_environments_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    again = {"object": "text_worlds:Again"}
    sets = [{"path": HELD_OUT}, {"path": HELD_OUT, "environment": {"object": "text_worlds:Once"}}]
    sets += [{"path": HELD_OUT, "environment": again}]
    config = validate(small_run(Path("run"), sets, environment=again))
    monkeypatch.syspath_prepend(ROOT / "tests" / "support")
    plan = plan_training(config)
    assert plan.environments["data.train.0"] is plan.environments["data.train.2"]
    assert plan.environments["data.train.0"] is not plan.environments["data.train.1"]
    openings = {each.set_key: each.opening for each in plan.problems}
    assert openings == {"data.train.0": "1+1", "data.train.1": "2+2", "data.train.2": "1+1"}


def test_what_answers_turns_of_held_out_problems_alone_is_no_matter_of_training() -> None:
    held_out = {"path": HELD_OUT, "environment": {"object": "text_worlds:Again", "replayable": False}}
    evaluated = {"benchmarks": {"played": held_out}, "limit": 2, "max_response_tokens": 240}
    config = validate(small_run(Path("run"), evaluation=evaluated, policy="spot"))
    config.refuse_environment("tune")
    plan = plan_training(config)  # SPOT probes what can be played again
    assert not plan.environments
    assert plan.evaluation[0].environment is not None


def test_a_reset_gets_the_columns_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [{"problem": f"a{n}+1", "answer": str(n + 1), "tier": "easy", "deck": [n, n]} for n in range(64)]
    keys = [f"data.train={write(tmp_path, told)}", "environment.object=text_worlds:Told", "evaluation=null"]
    words = ["train", "configs/quickstart.yaml", "--dry-run", *keys]
    shown = invoke(monkeypatch, *words, 'environment.columns=["deck"]')
    assert "4+7<|assistant|>" in shown.stdout, shown.output  # six of a problem's, and the deck; not the tier itself
    assert_refused(invoke(monkeypatch, *words, 'environment.columns=["hand"]'), "no column 'hand', which environment.")


REFUSED = {
    "an object that is not there": (
        ["environment.object=no_such_module:Shop"],
        ["environment.object=no_such_module:Shop", "No module named 'no_such_module'"],
    ),
    "calls that nothing reads": (
        ["environment.object=toy_worlds:add", "environment.role=user"],
        ["nothing is known that reads this model's calls", "environment.calls"],
    ),
    "an opening that changes": (
        ["environment.object=text_worlds:Moody"],
        ["its opening depends on more than the problem"],
    ),
    "an environment that is no set's": (
        ["environment.object=text_worlds:Again", "data.train.environment.object=text_worlds:Once", "evaluation=null"],
        ["environment: is no set's, since each has one of its own: remove it"],
    ),
    "an environment of a set that is not there": (
        ["data.train.7.environment.object=text_worlds:Again"],
        ["data.train.7: unknown key"],
    ),
    "columns that another set's file has not": (
        ['data.train.environment={object: "text_worlds:Told", columns: [hand]}'],
        ["no column 'hand', which environment.columns names"],
    ),
    "one turn": (
        ["environment.object=text_worlds:Again", "environment.max_turns=1"],
        ["environment.max_turns", "greater than or equal to 2"],
    ),
    "a teacher with another tokenizer": (
        ["environment.object=text_worlds:Again", "teacher.tokenizer=own"],
        ["environment: teacher.tokenizer=own is not built beside it (docs/coming-from.md)"],
    ),
    "probes where nothing can be played again": (
        ["environment.object=text_worlds:Again", "environment.replayable=false"],
        ["environment: policy spot probes, which needs environment.replayable"],
    ),
    "a budget of thinking": (
        ["environment.object=text_worlds:Again", "evaluation.thinking_tokens=8", "evaluation.thinking=true"],
        ["evaluation.thinking_tokens: nobody knows which turn"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_with_an_environment_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, expected = REFUSED[name]
    assert_refused(invoke(monkeypatch, "train", "configs/quickstart.yaml", "--dry-run", *keys), *expected)


def test_what_answers_otherwise_when_it_is_played_again_says_so_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, servers_on_threads: None
) -> None:
    keys = ["environment.object=text_worlds:Timely", "policy={kind: opd}", "evaluation=null"]
    words = ["check", "configs/quickstart.yaml", *keys]
    refused = invoke(monkeypatch, *words)
    assert refused.exit_code == 1
    (line,) = error_lines(refused.output)
    assert "answered differently" in line
    assert line.endswith("it depends on more than problem, seed and actions (environment.replayable)")
    found = invoke(monkeypatch, *words, "environment.replayable=false")
    assert found.exit_code == 0, found.output
    assert "Nothing was played again" in found.output
    assert "environment.replayable=false: a run that was interrupted goes on with other episodes" in found.output


WHERE = {"one": "environment.object=text_worlds:Slow", "several": f"data.train={json.dumps(SEVERAL)}"}
KEYS = (
    *("training.iterations=4", "training.batch_size=8", "training.mini_batch_size=8"),
    *("training.warmup_iterations=0", "training.checkpoint_every=1", "evaluation=null"),
)
ENDS = {  # and the exit code and words of each
    "SIGKILL": (-signal.SIGKILL, ""),
    "Ctrl-C": (130, "stopped by SIGINT; saved: step-"),
    "a full disk": (1, "error: .*(No space left on device|disk is full)\nsaved: step-"),
}


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The keys and the directory of a run that nothing ended."""
    run, keys = tmp_path_factory.mktemp("runs") / "whole", [WHERE[request.param], *KEYS]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
        assert Command("train", "configs/quickstart.yaml", f"run.directory={run}", *keys).finish()[0] == 0
    return keys, run


@pytest.mark.long
@pytest.mark.parametrize(
    ("whole", "how"), [*(("one", how) for how in ENDS), ("several", "SIGKILL")], indirect=["whole"]
)
def test_a_run_that_ends_in_an_episode_leaves_nothing_and_continues_to_the_same_weights(
    whole: tuple[list[str], Path], how: str, tmp_path: Path
) -> None:
    (keys, uncut), (code, words) = whole, ENDS[how]
    with small_disk(tmp_path / "disk", "64m") if how == "a full disk" else nullcontext(tmp_path) as disk:
        run, filler = disk / "run", disk / "filler"
        first = Command("train", "configs/quickstart.yaml", f"run.directory={run}", *keys)
        while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 2:
            assert first.process.poll() is None, first.finish()
            time.sleep(0.05)
        assert any("environments/worker.py" in each for each in first.processes().values())
        if how == "a full disk":
            subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True)  # as much as fits
        else:
            first.process.send_signal(signal.SIGKILL if how == "SIGKILL" else signal.SIGINT)
        ended, _, said = first.finish()
        assert (ended, "Traceback" in said) == (code, False), said
        assert re.search(words, said), said
        first.assert_nothing_left()
        filler.unlink(missing_ok=True)
        assert Command("train", "--resume", str(run)).finish()[0] == 0
        weights = [(each / "student" / "model.safetensors").read_bytes() for each in (uncut, run)]
        assert weights[0] == weights[1]
        ids = [
            sorted((each["iteration"], str(each["response_ids"])) for each in rows(ran / "samples.jsonl"))
            for ran in (uncut, run)
        ]
        assert ids[0] == ids[1]
