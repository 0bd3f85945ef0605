"""Models of one tokenizer whose softmaxes are padded to different widths: what is left out, and what stays as it was.

Here padding is likelier than the tokens (`padded_models.py`), so nothing that forgets to leave it out goes unnoticed.
References are plain forwards in float64 over each model's own whole softmax. `tests/servers/test_padded_softmax.py` is
the same on real servers, by whole runs. The parts are tested by themselves: candidates in
`tests/models/test_common_vocabulary.py`, sampling below the limit in `test_vocab_limit.py` of serving and backends.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from engine_requests import dense_logprobs
from only_teacher import only
from padded_models import padded_model
from typer.testing import CliRunner

from spot_async import stages_for
from spot_async.backends.local.backend import LocalBackend
from spot_async.checks.plan import TrainPlan, plan_evaluation, plan_training
from spot_async.cli import app
from spot_async.config import SamplingConfig
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError
from spot_async.evaluation.response_log import settings_of
from spot_async.stages.services import Services, StagesSettings
from spot_async.testing.services import SimulatedVerifier
from spot_async.tools.check import servers
from spot_async.trainer.feed_check import check_feed
from spot_async.types import WeightVersion

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"
COMMON, PADDED = 48, 64
SHORT = SamplingConfig(max_prompt_tokens=64, max_response_tokens=24)
V0 = WeightVersion(0, 0)
SIDES = pytest.mark.parametrize("wide", ["student", "teacher"])


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("padded")
    return {role: padded_model(EXAMPLE / role, root / role, rows=PADDED - COMMON) for role in ("student", "teacher")}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def plan_of(few_problems: Path) -> Callable[..., TrainPlan]:
    def plan(method: str, *overrides: str) -> TrainPlan:
        overrides = (f"data.train={few_problems}", *overrides)
        return plan_training(load_config(ROOT / f"configs/running_sum/{method}.yaml", list(overrides)))

    return plan


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    servers_on_threads: None, padded: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[Path, LocalBackend]]:
    """The servers of all four models."""
    models = [(role, model) for role in padded for model in (EXAMPLE / role, padded[role])]
    async with AsyncExitStack() as stack:
        yield {
            model: await stack.enter_async_context(
                LocalBackend(
                    LocalBackend.Settings(),
                    role=role,
                    model=str(model),
                    run_directory=tmp_path_factory.mktemp("run"),
                )
            )
            for role, model in models
        }


@pytest.mark.parametrize(
    ("method", "wide"),
    [
        *(("spot", side) for side in ("student", "teacher")),
        *(("opd", "teacher"), ("grpo", "student"), ("kd", "student")),
        *(pytest.param(method, "student", marks=pytest.mark.long) for method in ("opd", "eopd")),
        *(pytest.param(method, "teacher", marks=pytest.mark.long) for method in ("eopd", "grpo", "kd")),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_every_method_supervises_a_padded_pair(
    method: str, wide: str, padded: dict[str, Path], plan_of: Any, served: dict[Path, LocalBackend]
) -> None:
    models = {"student": EXAMPLE / "student", "teacher": EXAMPLE / "teacher", wide: padded[wide]}
    if method == "grpo":  # it has a reference in the teacher's place
        models["reference"] = models.pop("teacher") if wide == "teacher" else EXAMPLE / "teacher"
    given = [f"{role}.model={path}" for role, path in models.items() if role != "teacher" or method != "grpo"]
    plan = plan_of(method, *given)
    assert plan.common.limit == COMMON
    prompt = next(iter(islice(plan.schedule, 1)))
    judge = "reference" if method == "grpo" else "teacher"
    student, other = served[models["student"]], served[models[judge]]
    deadline = asyncio.get_running_loop().time() + 60
    stages = stages_for(
        plan.policy,
        Services(
            student=student,
            verifier=SimulatedVerifier(share_correct=1.0),  # so that each probed position is kept
            vocabulary=plan.student.vocabulary,
            teachers={} if method == "grpo" else only(other),
            reference=other if method == "grpo" else None,
            capabilities={
                "student": await student.capabilities(deadline=deadline),
                judge: await other.capabilities(deadline=deadline),
            },
            common=plan.common,
        ),
        StagesSettings(sampling=SHORT),
    )
    samples = await plan.policy.supervise(prompt, stages.for_prompt(prompt))
    batch = [each.supervision for each in samples if each.supervision is not None]
    assert len(batch) == (8 if method == "grpo" else 1)
    check_feed(batch, vocab_size=COMMON, live=V0, max_staleness=0)  # no id that only one side has, wherever
    for each in batch:
        rows = np.arange(len(each.response_ids))
        own = dense_logprobs(models["student"], each.prompt_ids, each.response_ids)
        theirs = dense_logprobs(models[judge], each.prompt_ids, each.response_ids)
        if method != "kd":
            np.testing.assert_allclose(each.behavior_logprobs, own[rows, each.response_ids], atol=1e-3)
            judged = each.reference_logprobs if method == "grpo" else each.pulls[0].logprobs
            np.testing.assert_allclose(judged, theirs[rows, each.response_ids], atol=1e-3)
        if method in ("eopd", "spot", "kd"):
            common = np.argsort(-theirs[:, :COMMON], axis=1, kind="stable")
            targets = each.soft_targets[-1]  # KD's first are the written tokens
            for position, candidates in zip(targets.positions, targets.token_ids, strict=True):
                assert candidates.tolist() == common[position, : len(candidates)].tolist()


@SIDES
def test_a_dry_run_says_how_many_rows_are_left_out_and_on_which_side(
    wide: str, padded: dict[str, Path], few_problems: Path
) -> None:
    overrides = [f"data.train={few_problems}", f"{wide}.model={padded[wide]}"]
    narrow = "teacher" if wide == "student" else "student"
    shown = CliRunner().invoke(app, ["train", "configs/running_sum/spot.yaml", *overrides, "--dry-run"])
    line = f"ids 48 to 63 of the {wide} are left out, 16 of its 64 softmax rows: the {narrow} has no such rows"
    assert line in " ".join(shown.output.split())
    equal = CliRunner().invoke(app, ["train", "configs/running_sum/spot.yaml", overrides[0], "--dry-run"])
    assert "left out," not in equal.output


def test_check_says_how_many_rows_are_left_out_and_asks_no_model_about_an_id_that_it_lacks(
    padded: dict[str, Path], few_problems: Path, servers_on_threads: None
) -> None:
    overrides = [f"data.train={few_problems}", f"student.model={padded['student']}"]
    shown = CliRunner().invoke(app, ["check", "configs/running_sum/spot.yaml", *overrides, "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert {role: facts["vocab_rows_left_out"] for role, facts in found["roles"].items()} == {
        "student": 16,
        "teacher": 0,
    }
    assert (found["refusals"], found["warnings"]) == ([], [])
    words = dict(servers.ROWS)["vocabulary"]
    student, teacher = (
        words(SimpleNamespace(**facts, said=SimpleNamespace(**facts)))  # type: ignore[arg-type] # what it reads of them
        for facts in (found["roles"]["student"], found["roles"]["teacher"])
    )
    assert student.endswith(", 16 rows beyond the common ones left out")
    assert "left out" not in teacher


def test_an_evaluation_samples_from_what_training_does_and_tells_such_figures_apart(
    padded: dict[str, Path], plan_of: Any, few_problems: Path
) -> None:
    plan = plan_of("spot", f"student.model={padded['student']}")
    assert [each.vocab_limit for each in plan.evaluation] == [COMMON]
    overrides = [f"data.train={few_problems}", f"student.model={padded['student']}"]
    config = load_config(ROOT / "configs/running_sum/spot.yaml", overrides)
    alone = plan_evaluation(config, plan.student)
    assert settings_of(config, alone) == settings_of(config, plan.evaluation)
    free = plan_evaluation(config.model_copy(update={"teacher": None}), plan.student)
    assert [each.vocab_limit for each in free] == [None]  # nobody else's rows are known
    assert settings_of(config, free) != settings_of(config, alone)


@SIDES
def test_an_end_token_that_one_model_has_no_row_for_is_refused_in_a_line(
    wide: str, padded: dict[str, Path], plan_of: Any, tmp_path: Path
) -> None:
    directory = shutil.copytree(padded[wide], tmp_path / wide)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 50]}))
    with pytest.raises(ConfigError, match=rf"^{wide}.model: its end token .*\(50\) is none of the 48 tokens that all"):
        plan_of("spot", f"{wide}.model={directory}")
