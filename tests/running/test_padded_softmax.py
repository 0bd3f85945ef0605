"""Models of one tokenizer whose softmaxes are padded to different widths: what is left out, and what stays as it was.

Here padding is likelier than the tokens (`padded_models.py`), so nothing that forgets to leave it out goes unnoticed.
References are plain forwards in float64 over each model's own whole softmax. `tests/servers/test_padded_softmax.py` is
the same on real servers, by whole runs.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_requests import dense_logprobs, generate_request, run_all
from padded_models import padded_model
from typer.testing import CliRunner

from spot_async import stages_for
from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.sglang.generation import MASKED_TOKENS, generate_below
from spot_async.backends.sglang.replies import NextToken, TopK
from spot_async.backends.shared.masking import logit_bias
from spot_async.backends.shared.served_topk import bounded_scores
from spot_async.checks.plan import TrainPlan, plan_evaluation, plan_training
from spot_async.cli import app
from spot_async.config import SamplingConfig
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, DataError
from spot_async.evaluation.identity import settings_of
from spot_async.models.common_vocabulary import CommonVocabulary, known_positions, known_to_all
from spot_async.policies.truncated.certainty import Evidence
from spot_async.policies.truncated.score_bounds import ScoreRule, TeacherRows, asked_student, score_bounds
from spot_async.serving.engine.sampling import draw_uniforms, sample
from spot_async.tools import doctor
from spot_async.trainer.feed_check import check_feed
from spot_async.types import Generation, SamplingSettings, ScoredPositions, TokenScores, VersionSpan, WeightVersion

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"
COMMON, PADDED = 48, 64
SHORT = SamplingConfig(max_prompt_tokens=64, max_response_tokens=24)
V0, V1 = WeightVersion(0, 0), WeightVersion(0, 1)
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


# -- the engine --


def test_the_engine_samples_below_the_limit_with_log_probabilities_of_the_whole_softmax(
    padded: dict[str, Path], engine_for: Callable[..., Any]
) -> None:
    prompt = np.array([5, 9, 12, 30], np.int32)
    asked = [
        generate_request(prompt, seed=seed, top_k=PADDED, vocab_limit=COMMON, temperature=temperature)
        for seed, temperature in enumerate([1.0, 1.0, 0.7, 0.0])
    ]
    free = generate_request(prompt, seed=9, max_tokens=20)
    engine = engine_for(padded["student"])
    *limited, beside = run_all(engine, [*asked, free])
    for request, reply in zip(asked, limited, strict=True):
        dense = dense_logprobs(padded["student"], prompt, reply.token_ids, request.sampling.temperature or 1.0)
        rows = np.arange(len(reply.token_ids))
        assert reply.token_ids.max() < COMMON
        np.testing.assert_allclose(reply.logprobs, dense[rows, reply.token_ids], atol=1e-4)
        assert np.exp(dense)[:, COMMON:].sum(axis=1).max() > 0.9  # a missing mask would be noticed
    assert (limited[-1].token_ids == dense[:, :COMMON].argmax(axis=1)).all()
    (alone,) = run_all(engine_for(padded["student"]), [free])  # a limit is its own request's affair
    assert alone.token_ids.max() >= COMMON
    np.testing.assert_array_equal(alone.token_ids, beside.token_ids)
    np.testing.assert_array_equal(alone.logprobs, beside.logprobs)


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_a_limit_leaves_the_other_tokens_their_odds_and_comes_before_top_p(top_p: float) -> None:
    rows, limit = 4096, 6
    logits = torch.tensor([0.3, 2.0, -1.0, 0.5, 1.5, -2.0, 200.0, 3.0]).expand(
        rows, -1
    )  # one that leaves floats no rest
    uniforms = torch.linspace(0, 1 - 1e-9, rows, dtype=torch.float64)[:, None]
    limits = torch.full((rows, 1), limit)
    drawn = sample(logits, torch.ones(rows, 1), torch.full((rows, 1), top_p), uniforms, vocab_limit=limits)
    odds = np.exp(logits[0, :limit].double().numpy())
    odds /= odds.sum()
    order = np.argsort(-odds)
    kept = np.zeros(limit)
    kept[order] = np.where(np.cumsum(odds[order]) - odds[order] < top_p, odds[order], 0.0)
    shares = np.bincount(drawn.token_ids.numpy(), minlength=8) / rows
    np.testing.assert_allclose(shares, [*kept / kept.sum(), 0, 0], atol=2 / rows)
    whole = logits[0].double().log_softmax(-1)
    np.testing.assert_allclose(drawn.logprobs, whole[drawn.token_ids], atol=1e-4)


def test_a_limit_that_leaves_nothing_out_changes_no_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50, generator=draw)
    uniforms = torch.from_numpy(draw_uniforms(3, 8))[:, None]
    plain, limited = (
        sample(logits, torch.ones(8, 1), None, uniforms, vocab_limit=limit) for limit in (None, torch.full((8, 1), 50))
    )
    assert torch.equal(plain.token_ids, limited.token_ids)
    assert torch.equal(plain.logprobs, limited.logprobs)


# -- the five methods --


def served(role: str, model: Path, run_directory: Path) -> LocalBackend:
    return LocalBackend(LocalBackend.Settings(), role=role, model=str(model), run_directory=run_directory)


@SIDES
@pytest.mark.parametrize("method", ["opd", "eopd", "spot", "grpo", "kd"])
async def test_every_method_supervises_a_padded_pair(
    method: str, wide: str, padded: dict[str, Path], plan_of: Any, tmp_path: Path, servers_on_threads: None
) -> None:
    models = {"student": EXAMPLE / "student", "teacher": EXAMPLE / "teacher", wide: padded[wide]}
    if method == "grpo":  # it has a reference in the teacher's place
        models["reference"] = models.pop("teacher") if wide == "teacher" else EXAMPLE / "teacher"
    given = [f"{role}.model={path}" for role, path in models.items() if role != "teacher" or method != "grpo"]
    plan = plan_of(method, *given)
    assert plan.common.limit == COMMON
    prompt = next(iter(islice(plan.schedule, 1)))
    judge = "reference" if method == "grpo" else "teacher"
    student, other = (served(role, models[role], tmp_path) for role in ("student", judge))
    async with student, other:
        deadline = asyncio.get_running_loop().time() + 60
        stages = stages_for(
            plan.policy,
            plan.student.vocabulary,
            student=student,
            verifier=Correct(),  # type: ignore[arg-type]
            teacher=None if method == "grpo" else other,
            reference=other if method == "grpo" else None,
            capabilities={
                "student": await student.capabilities(deadline=deadline),
                judge: await other.capabilities(deadline=deadline),
            },
            sampling=SHORT,
            softmax_widths=plan.common.widths,
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
            judged = each.reference_logprobs if method == "grpo" else each.teacher_logprobs
            np.testing.assert_allclose(judged, theirs[rows, each.response_ids], atol=1e-3)
        if method in ("eopd", "spot", "kd"):
            assert each.soft_targets is not None
            common = np.argsort(-theirs[:, :COMMON], axis=1, kind="stable")
            for n, position in enumerate(each.soft_targets.positions):
                candidates = each.soft_targets.token_ids[n][1 if method == "kd" else 0 :]
                assert candidates.tolist() == common[position, : len(candidates)].tolist()


class Correct:
    """Finds everything right, so that each probed position is kept."""

    async def verify(self, *arguments: object, **more: object) -> object:
        from spot_async.types import Verdict

        return Verdict.CORRECT


# -- candidates --


def scorer(dense: np.ndarray, *, most: int, asked: list[int]) -> Callable[[int], Any]:
    """A server that gives the top-k of whole distributions (T, V) and bounds their entropies from it."""

    async def ask(top_k: int) -> TokenScores:
        asked.append(top_k)
        best = np.argsort(-dense, axis=1, kind="stable")[:, : min(top_k, most)].astype(np.int32)
        logprobs = np.take_along_axis(dense, best, axis=1).astype(np.float32)
        return bounded_scores(
            dense[:, 0].astype(np.float32),
            best,
            logprobs,
            top_k=best.shape[1],
            vocab_size=dense.shape[1],
            noise_nats=0.0,
            version=V0,
        )

    return ask


def hot(heavy_tailed: Any, rows: int, width: int, padding: int, where: slice) -> tuple[np.ndarray, np.ndarray]:
    """Teacher (T, width + padding) and student (T, width); in the rows `where` the padding is likeliest."""
    teacher, student = heavy_tailed(5, rows, width)
    more = np.full((rows, padding), teacher.min() - 5.0)
    more[where] = teacher[where].max(axis=1, keepdims=True) + 1.0 - 0.01 * np.arange(padding)
    whole = np.concatenate([teacher, more], axis=1)
    return whole - np.log(np.exp(whole).sum(axis=1, keepdims=True)), student


async def test_candidates_are_the_likeliest_common_tokens_and_more_are_asked_for_only_where_padding_is_among_them(
    heavy_tailed: Any,
) -> None:
    common = CommonVocabulary({"student": 200, "teacher": 210})
    for where, expected in ((slice(0), [16]), (slice(3), [16, 26])):
        dense, _ = hot(heavy_tailed, 12, 200, 10, where)
        asked: list[int] = []
        scores = await known_to_all(scorer(dense, most=64, asked=asked), common, 16, 64)
        best = np.argsort(-dense[:, :200], axis=1, kind="stable")[:, :16]
        assert asked == expected
        assert scores.valid is None
        np.testing.assert_array_equal(scores.topk_ids, best)
        np.testing.assert_allclose(scores.topk_logprobs, np.take_along_axis(dense, best, 1), atol=1e-5)
        entropy = -(np.exp(dense) * dense).sum(axis=1)  # of the whole softmax
        assert ((scores.entropy_lower <= entropy + 1e-4) & (entropy - 1e-4 <= scores.entropy_upper)).all()


async def test_a_position_that_shows_too_few_common_candidates_is_masked_and_names_no_foreign_id(
    heavy_tailed: Any,
) -> None:
    common = CommonVocabulary({"student": 200, "teacher": 210})
    dense, _ = hot(heavy_tailed, 6, 200, 10, slice(2))
    scores = await known_to_all(scorer(dense, most=20, asked=[]), common, 16, 20)
    assert scores.valid is not None
    assert scores.valid.tolist() == [False, False, True, True, True, True]
    assert scores.topk_ids.shape == (6, 16)
    assert scores.topk_ids.max() < 200
    asked: list[int] = []
    await known_to_all(scorer(dense, most=20, asked=asked), common, 0, 20)
    assert asked == [1]  # who wants no candidates misses none


@pytest.mark.parametrize("where", [slice(0), slice(None)])
async def test_bounds_of_the_acquisition_score_hold_its_value_over_whole_softmaxes(
    where: slice, heavy_tailed: Any, dense_scores: Any
) -> None:
    dense, student = hot(heavy_tailed, 40, 200, 10, where)
    k, rule = 16, ScoreRule(candidates=16, vocab_size=210)
    scores = await known_to_all(
        scorer(dense, most=64, asked=[]), CommonVocabulary({"student": 200, "teacher": 210}), k, 64
    )
    ids = scores.topk_ids.astype(np.int64)
    teacher = TeacherRows(
        ids, scores.topk_logprobs.astype(np.float64), scores.entropy_lower.astype(np.float64),
        scores.entropy_upper.astype(np.float64), np.zeros(40, np.bool_), np.zeros(40),
    )  # fmt: skip
    bounds = score_bounds(teacher, asked_student(ids, np.take_along_axis(student, ids, 1)), rule)
    # The definitions, straight: candidates are common, everything else is of whole softmaxes.
    p, q = np.exp(np.take_along_axis(dense, ids, 1)), np.exp(np.take_along_axis(student, ids, 1))
    entropy = -(np.exp(dense) * dense).sum(axis=1) / np.log(210)
    mass, coverage = p.sum(axis=1), q.sum(axis=1)
    p, q = p / mass[:, None], q / coverage[:, None]
    shape = (p * np.log2(2 * p / (p + q)) + q * np.log2(2 * q / (p + q))).sum(axis=1) / 2
    exact = {"entropy": entropy, "mass": mass, "coverage": coverage, "divergence": shape}
    exact |= {"gap": (1 - coverage + shape) / 2, "score": entropy * mass * (1 - coverage + shape) / 2}
    for name, value in exact.items():
        found = getattr(bounds, name)
        assert (found.lower <= value + 1e-5).all(), name
        assert (value - 1e-5 <= found.upper).all(), name


def test_a_wider_row_that_shows_too_few_common_tokens_decides_nothing() -> None:
    draw = np.random.default_rng(0)
    dense = np.log(draw.dirichlet(np.ones(20), 3))
    ids = np.argsort(-dense[:, :12], axis=1)[:, :6]
    values = np.take_along_axis(dense, ids, 1)
    entropy = -(np.exp(dense) * dense).sum(axis=1)
    rows = TeacherRows(ids, values, entropy - 0.3, entropy + 0.3, np.zeros(3, np.bool_), np.full(3, 0.01))
    student = asked_student(ids, values - 0.1)
    evidence = Evidence(rows, student, ScoreRule(candidates=4, vocab_size=20), 1, teacher_top_k=20)
    wide = np.argsort(-dense, axis=1).astype(np.int32)
    logprobs = np.take_along_axis(dense, wide, 1).astype(np.float32)
    whole = ScoredPositions(topk_ids=wide, topk_logprobs=logprobs, entropy_lower=entropy, entropy_upper=entropy)
    known = known_positions(whole, 12)
    assert known.topk_ids.shape == (3, 12)
    few = msgspec.structs.replace(known, topk_ids=known.topk_ids[:, :3], topk_logprobs=known.topk_logprobs[:, :3])
    before = evidence.bounds.score.upper.copy()
    evidence.take_teacher(np.array([0]), few, 20)
    np.testing.assert_array_equal(evidence.bounds.score.upper, before)
    assert 0 not in np.concatenate(
        [*evidence.questions(np.ones(3, np.bool_), 3).teacher.values(), [2]]
    )  # asked for all
    evidence.take_teacher(np.arange(3), known, 20)
    np.testing.assert_allclose(evidence.bounds.entropy.lower, entropy / np.log(20), atol=1e-6)  # of the whole softmax
    assert evidence.teacher.ids.max() < 12


# -- servers --


def test_a_request_bans_the_ids_beyond_the_limit_and_says_nothing_where_there_are_none() -> None:
    sampling = SamplingSettings(max_tokens=1, stop_token_ids=(), seed=0)
    assert logit_bias(sampling, 50) == {}
    assert logit_bias(msgspec.structs.replace(sampling, vocab_limit=50), 50) == {}
    limited = logit_bias(msgspec.structs.replace(sampling, vocab_limit=48), 50)
    assert limited == {"logit_bias": {"48": -1e4, "49": -1e4}}


class BiasedServer:
    """A server whose bias changes the log-probabilities; its model is a table of next-token distributions.

    It switches to other weights after `switch` requests for single tokens.
    """

    def __init__(self, width: int, switch: int | None = None) -> None:
        draw = np.random.default_rng(0)
        self.tables = {version: draw.normal(scale=2.0, size=(width, width)) for version in (V0, V1)}
        self.width, self.switch, self.asked, self.requests = width, switch, 0, 0

    @property
    def version(self) -> WeightVersion:
        return V0 if self.switch is None or self.asked < self.switch else V1

    def row(self, last: int, temperature: float, version: WeightVersion) -> np.ndarray:
        logits = self.tables[version][last] / temperature
        return np.asarray(logits - np.log(np.exp(logits).sum()))

    async def sample(self, prompt_ids: Any, sampling: SamplingSettings, *, top_k: int, deadline: float) -> Generation:
        self.requests += 1
        draw = np.random.default_rng(sampling.seed)
        version, last, ids, logprobs = self.version, int(prompt_ids[-1]), [], []
        tops = []
        while len(ids) < sampling.max_tokens and (not ids or ids[-1] not in sampling.stop_token_ids):
            row = self.row(last, sampling.temperature, version)
            tops.append(row)
            if sampling.vocab_limit is not None:
                row = np.where(np.arange(self.width) < sampling.vocab_limit, row, -np.inf)
                row = row - np.log(np.exp(row).sum())
            last = int(draw.choice(self.width, p=np.exp(row)))
            ids.append(last)
            logprobs.append(row[last])
        best = np.argsort(-np.array(tops), axis=1)[:, :top_k].astype(np.int32)
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reason="length",
            version_spans=(VersionSpan(0, len(ids), version),),
            topk_ids=best if top_k else None,
            topk_logprobs=np.take_along_axis(np.array(tops), best, 1).astype(np.float32) if top_k else None,
        )

    async def next_tokens(self, asked: Any, top_k: int, temperature: float, deadline: float) -> list[NextToken]:
        found = []
        for prefix, chosen in asked:
            self.asked += 1
            row = self.row(int(prefix[-1]), temperature, self.version).astype(np.float32)
            best = np.argsort(-row)[None, :top_k].astype(np.int32)
            top = None if chosen is not None else TopK(best, row[best])
            found.append(NextToken(top, None if chosen is None else row[chosen], self.version))
        return found


def limited(seed: int, **more: Any) -> SamplingSettings:
    return SamplingSettings(
        **{"max_tokens": 100, "stop_token_ids": (3,), "seed": seed, "vocab_limit": 8, "temperature": 0.8, **more}
    )


@pytest.mark.parametrize("switch", [None, 40])
async def test_a_server_whose_bias_changes_log_probabilities_still_gives_those_of_the_whole_softmax(
    switch: int | None,
) -> None:
    prompt, versions = np.array([5], np.int32), set()
    for seed in range(20):
        server = BiasedServer(12, switch)
        reply = await generate_below(server, prompt, limited(seed), 12, top_k=4, deadline=0.0)
        again = await generate_below(BiasedServer(12, switch), prompt, limited(seed), 12, top_k=4, deadline=0.0)
        np.testing.assert_array_equal(reply.token_ids, again.token_ids)
        assert reply.token_ids.max() < 8
        assert reply.finish_reason == ("stop" if reply.token_ids[-1] == 3 else "length")
        before = np.concatenate([prompt, reply.token_ids[:-1]])
        for span in reply.version_spans:
            versions.add(span.version)
            for t in range(span.start, span.end):
                row = server.row(int(before[t]), 0.8, span.version)
                assert reply.logprobs[t] == pytest.approx(row[reply.token_ids[t]], abs=1e-5)
                assert reply.topk_ids is not None
                assert reply.topk_ids[t].tolist() == np.argsort(-row)[:4].tolist()
    assert versions == ({V0} if switch is None else {V0, V1})


async def test_tokens_that_are_drawn_again_have_the_odds_that_a_mask_would_leave_them() -> None:
    server, prompt = BiasedServer(12), np.array([5], np.int32)
    count = 4000
    drawn = [
        int((await generate_below(server, prompt, limited(seed, max_tokens=1), 12, top_k=0, deadline=0.0)).token_ids[0])
        for seed in range(count)
    ]
    odds = np.exp(server.row(5, 0.8, V0))[:8]
    odds /= odds.sum()
    off = (np.bincount(drawn, minlength=8) - count * odds) / np.sqrt(count * odds * (1 - odds))
    assert np.abs(off).max() < 5


async def test_a_response_without_a_left_out_id_takes_one_request_with_its_own_seed() -> None:
    server, prompt = BiasedServer(12), np.array([5], np.int32)
    for table in server.tables.values():
        table[:, 8:] = -40.0
    reply = await generate_below(server, prompt, limited(7), 12, top_k=0, deadline=0.0)
    plain = await server.sample(prompt, limited(7, vocab_limit=None), top_k=0, deadline=0.0)
    np.testing.assert_array_equal(reply.token_ids, plain.token_ids)
    assert server.requests == 2
    assert MASKED_TOKENS > 1


# -- before a start --


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


def test_doctor_says_how_many_rows_are_left_out_and_asks_no_model_about_an_id_that_it_lacks(
    padded: dict[str, Path], few_problems: Path, servers_on_threads: None
) -> None:
    overrides = [f"data.train={few_problems}", f"student.model={padded['student']}"]
    shown = CliRunner().invoke(app, ["doctor", "configs/running_sum/spot.yaml", *overrides, "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert {role: facts["vocab_rows_left_out"] for role, facts in found["roles"].items()} == {
        "student": 16,
        "teacher": 0,
    }
    assert (found["refusals"], found["warnings"]) == ([], [])
    words = dict(doctor.ROWS)["vocabulary"]
    assert words(found["roles"]["student"]).endswith(", 16 rows beyond the common ones left out")
    assert "left out" not in words(found["roles"]["teacher"])


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


def test_a_file_of_responses_with_ids_that_this_student_lacks_is_refused_in_a_line(
    padded: dict[str, Path], plan_of: Any, tmp_path: Path
) -> None:
    from spot_async.policies.teacher_responses import ResponseFile, TeacherResponse
    from spot_async.types import Verdict

    plan = plan_of("opd")
    context = msgspec.structs.replace(plan.student.policy_context, vocab_size=PADDED)
    file, _ = ResponseFile.to_save(tmp_path / "responses", context, 0)
    ids = np.array([4, 50, 1], np.int32)
    response = Generation(
        token_ids=ids, logprobs=np.zeros(3, np.float32), finish_reason="stop", version_spans=(VersionSpan(0, 3, V0),)
    )
    file.append(
        TeacherResponse(
            problem_id="p", prompt_ids=ids[:1], end_token_id=1, response=response, scores=None, verdict=Verdict.WRONG
        )
    )
    assert ResponseFile(tmp_path / "responses", context, 0).read().keys() == {"p"}
    for narrow in ({"vocab_size": COMMON}, {"vocab_limit": COMMON}):
        with pytest.raises(DataError, match=r"^policy.load: .* names token 50 for problem 'p', and this run's models"):
            ResponseFile(tmp_path / "responses", msgspec.structs.replace(context, **narrow), 0).read()
