"""`spot-async check` on servers of our own: what it shows, what it refuses, and that `train` refuses the same."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from joined_teacher import with_bytes
from kept_replies import KeptReplies
from problem_files import write
from rich.console import Console
from typer.testing import CliRunner

from spot_async.backends.local.backend import LocalBackend
from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.checks.diagnosis import Diagnosis, compare_students, diagnose
from spot_async.checks.plan import plan_training
from spot_async.checks.score_rows import RIGHT
from spot_async.checks.server_facts import ServerFacts
from spot_async.cli import app
from spot_async.config.loading import load_config
from spot_async.errors import ConfigError, PermanentError, ThrottledError
from spot_async.tools.check.requirements import START_AT_MOST, START_EXPECTED
from spot_async.tools.check.servers import ROWS, show_servers
from spot_async.types import Capabilities, Generation, PolicyNeeds, SamplingSettings, ScoreRequest, TokenScores

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"

pytestmark = pytest.mark.usefixtures("servers_on_threads")
with_backends = pytest.mark.asyncio(loop_scope="module")
Services = dict[str, LocalBackend]


FEW: list[str] = []  # the setting that names few problems


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, few_problems: Path, asked_again_soon: None) -> None:
    FEW[:] = [f"data.train={few_problems}"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "200")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(servers_on_threads: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    run_directory = tmp_path_factory.mktemp("run")
    student, teacher = (
        LocalBackend(LocalBackend.Settings(), role=role, model=str(EXAMPLE / role), run_directory=run_directory)
        for role in ("student", "teacher")
    )
    async with student, teacher:
        yield {"student": student, "teacher": teacher}


@pytest.fixture(scope="module")
def kept(started: Services) -> dict[str, KeptReplies]:
    return {role: KeptReplies(backend) for role, backend in started.items()}


@pytest.fixture
def services(started: Services, kept: dict[str, KeptReplies], monkeypatch: pytest.MonkeyPatch) -> Services:
    """The same servers, of which no test asks what another one has asked."""
    for role, backend in started.items():
        monkeypatch.setattr(backend._server, "post", kept[role].post)
    return started


class Other(LocalBackend):
    """A service that says or does something else than the one whose server it asks.

    It has the other's methods by its class: since Python 3.12 no protocol is found through `__getattr__`.
    """

    def __init__(self, backend: LocalBackend, **said: Any) -> None:
        vars(self).update(vars(backend))
        self.backend, self.said = backend, said

    async def capabilities(self, *, deadline: float) -> Capabilities:
        return msgspec.structs.replace(await self.backend.capabilities(deadline=deadline), **self.said)


def moved(scores: TokenScores, nats: float) -> TokenScores:
    """Return scores in which every token is less likely."""
    own, top = scores.logprobs - np.float32(nats), scores.topk_logprobs - np.float32(nats)
    return msgspec.structs.replace(scores, logprobs=own, topk_logprobs=top)


class OneRowOff(Other):
    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        scores = await self.backend.score(*arguments, **more)
        return msgspec.structs.replace(scores, logprobs=np.roll(scores.logprobs, 1))


class Bent(Other):
    """Samples with a penalty, as a server may by default, and scores without."""

    async def generate(self, *arguments: Any, **more: Any) -> Generation:
        reply = await self.backend.generate(*arguments, **more)
        return msgspec.structs.replace(reply, logprobs=reply.logprobs - np.float32(0.25))


class Processed(Other):
    """States other log-probabilities of what it samples than its scores are, as in `change`."""

    def change(self, logprobs: Any, draw: np.random.Generator) -> Any:
        raise NotImplementedError

    async def generate(self, *arguments: Any, **more: Any) -> Generation:
        reply = await self.backend.generate(*arguments, **more)
        draw = np.random.default_rng(reply.token_ids.tolist())
        told = {"logprobs": self.change(reply.logprobs, draw).astype(np.float32)}
        if reply.topk_logprobs is not None:
            told["topk_logprobs"] = self.change(reply.topk_logprobs, draw).astype(np.float32)
        return msgspec.structs.replace(reply, **told)


class Cool(Processed):
    """States them at a temperature that no request names."""

    def change(self, logprobs: Any, draw: np.random.Generator) -> Any:
        return logprobs / 0.7


class OtherModel(Processed):
    def change(self, logprobs: Any, draw: np.random.Generator) -> Any:
        return logprobs - draw.exponential(1.0, logprobs.shape)


class Rounded(Processed):
    """Computes in 16 bits: most tokens are within 0.2 nats, and the least likely one is 0.56 nats off."""

    def change(self, logprobs: Any, draw: np.random.Generator) -> Any:
        moves = draw.normal(0.0, 0.06, logprobs.shape)
        moves[np.unravel_index(logprobs.argmin(), logprobs.shape)] = -0.56
        return logprobs + moves


DRAW = np.random.default_rng(0)


class RoundedScores(Other):
    """Scores in 16 bits, a little otherwise each time."""

    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        scores = await self.backend.score(*arguments, **more)
        moves = DRAW.normal(0.0, 0.06, scores.topk_logprobs.shape).astype(np.float32)
        return msgspec.structs.replace(scores, topk_logprobs=scores.topk_logprobs + moves)


class LateRows(Other):
    """Gives each token the row after it, as llama-cpp-python does."""

    async def score(self, request: ScoreRequest, *, top_k: int) -> TokenScores:
        prompt_ids, response_ids = request.prompt_ids, request.response_ids
        earlier, later = np.append(prompt_ids, response_ids[:1]), np.append(response_ids[1:], response_ids[-1:])
        shifted = msgspec.structs.replace(request, prompt_ids=earlier, response_ids=later)
        rows = await self.backend.score(shifted, top_k=48)
        own = rows.topk_logprobs[rows.topk_ids == response_ids[:, None]]
        top = {"topk_ids": rows.topk_ids[:, :top_k], "topk_logprobs": rows.topk_logprobs[:, :top_k]}
        return msgspec.structs.replace(rows, logprobs=own, **top)


class Uniform(Other):
    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        scores = await self.backend.score(*arguments, **more)
        values = {name: np.full_like(getattr(scores, name), -np.log(48)) for name in ("logprobs", "topk_logprobs")}
        return msgspec.structs.replace(scores, **values)


class Masked(Other):
    """Knows every third position, or none."""

    every = 3

    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        scores = await self.backend.score(*arguments, **more)
        return msgspec.structs.replace(scores, valid=np.arange(len(scores.logprobs)) % 3 == 3 - self.every)


class MaskedWholly(Masked):
    every = 0


class NamesByText(Other):
    """Knows the fewer positions, the more it is asked for at each."""

    async def score(self, *arguments: Any, top_k: int) -> TokenScores:
        scores = await self.backend.score(*arguments, top_k=top_k)
        return msgspec.structs.replace(scores, valid=np.arange(len(scores.logprobs)) % (1 + top_k) == 0)


class Greedy(Other):
    """Samples the likeliest token, and states the whole distribution, as SGLang does with a top_k of 1."""

    async def generate(self, prompt_ids: Any, sampling: Any, **more: Any) -> Generation:
        return await self.backend.generate(prompt_ids, msgspec.structs.replace(sampling, top_p=1e-9), **more)


class Noisy(Other):
    """Its first reading lies in the middle of the others."""

    reading = 0

    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        scores = await self.backend.score(*arguments, **more)
        self.reading += 1
        return moved(scores, 0.1 * (self.reading % 3))


class IgnoresSeeds(Other):
    asked = 0

    async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
        self.asked += 1
        return await self.backend.generate(prompt_ids, msgspec.structs.replace(sampling, seed=self.asked), **more)


class FarAway(Other):
    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        await asyncio.sleep(0.3)
        return await self.backend.score(*arguments, **more)


class Throttles(Other):
    """Has no room for the first requests, and asks to be left alone for a while."""

    def __init__(self, backend: LocalBackend, requests: int, asked_s: float | None) -> None:
        super().__init__(backend)
        self.left, self.asked_s, self.asked = requests, asked_s, 0

    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        self.asked += 1
        if self.asked <= self.left:
            raise ThrottledError("teacher/score: HTTP 429: no room", self.asked_s)
        return await self.backend.score(*arguments, **more)


class RefusesScores(Other):
    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        raise PermanentError("teacher/score: HTTP 400: no")


def screen_text(found: Diagnosis) -> str:
    out = io.StringIO()
    show_servers(Console(file=out, width=200), found)
    return out.getvalue()


async def diagnosis_of(services: Services, *overrides: str, **others: Other) -> Diagnosis:
    config = load_config(Path("configs/quickstart.yaml"), [*FEW, *overrides])
    plan = await asyncio.to_thread(plan_training, config)
    return await diagnose(config, plan, {**services, **others})  # type: ignore[arg-type]


class Shifted(Other):
    nats = 3.0

    async def score(self, *arguments: Any, **more: Any) -> TokenScores:
        scores = await self.backend.score(*arguments, **more)
        return moved(scores, self.nats)

    async def generate(self, *arguments: Any, **more: Any) -> Generation:
        reply = await self.backend.generate(*arguments, **more)
        return msgspec.structs.replace(reply, logprobs=reply.logprobs - np.float32(self.nats))


class Pool(Other):
    """A role of which the service is one of two servers."""

    def __init__(self, role: str, first: LocalBackend, second: Other) -> None:
        super().__init__(first)
        self.backends = {f"{role}-1": first, f"{role}-2": second}


@with_backends
async def test_servers_of_a_role_are_compared_and_offer_what_each_of_them_does(services: Services) -> None:
    teacher = services["teacher"]
    second = Shifted(teacher, server="local 2", max_top_k=8)
    found = await diagnosis_of(services, teacher=Pool("teacher", teacher, second))
    assert list(found.roles) == ["student", "teacher-1", "teacher-2"]
    assert found.roles["teacher-2"].as_tree()["servers_differ_nats"] == pytest.approx(3.0, abs=1e-4)
    apart, narrow, no_softmax = found.refusals
    assert no_softmax.startswith("teacher.backend (teacher-2): the probabilities of a row sum to 0.05, not to 1")
    assert "teacher-2 gives log-probabilities up to 3 nats from those of teacher-1" in apart
    assert "teacher.backend (local) serves top-8" in narrow
    assert any("different software: teacher-1 local, teacher-2 local 2" in line for line in found.warnings)
    shown = [re.sub(" +", " ", line).strip() for line in screen_text(found).splitlines()]
    assert "server local teacher-1: local" in shown
    assert "teacher-2: local 2" in shown
    assert len([line for line in shown if line.startswith("context ")]) == 1  # what is equal is said once


@with_backends
async def test_the_noise_of_16_bits_is_measured_on_the_runs_own_prompts(services: Services) -> None:
    said = {"dtype": "bfloat16", "logprob_noise_nats": 1.2}  # twice the largest of a few rows, from a server's start
    student, teacher = Rounded(services["student"], **said), Other(services["teacher"], logprob_noise_nats=1e-5)
    found = (await diagnosis_of(services, student=student, teacher=teacher)).capabilities
    assert 0.06 * 3.29 < found["student"].logprob_noise_nats < 0.6
    assert found["teacher"].logprob_noise_nats == 1e-5  # that of float32 stands
    pool: Any = Pool("student", student, Rounded(services["student"], **said))  # type: ignore[arg-type]
    only_scores = RoundedScores(services["teacher"], generation=False, **said)
    found = (await diagnosis_of(services, student=pool, teacher=only_scores)).capabilities
    assert 0.06 * 3.29 < found["student"].logprob_noise_nats < 0.6
    assert 0.06 * 3.29 < found["teacher"].logprob_noise_nats < 0.6


@with_backends
async def test_a_run_does_not_begin_with_noise_that_a_full_server_did_not_show(services: Services) -> None:
    full = Throttles(services["teacher"], 1, 600.0)
    full.said = {"dtype": "bfloat16", "logprob_noise_nats": 1.2, "generation": False}
    (refusal,) = (await diagnosis_of(services, teacher=full)).refusals
    assert refusal.startswith("teacher.backend: its noise could not be measured on the run's prompts: teacher/score")


@with_backends
async def test_attached_students_are_compared_once_they_hold_this_runs_weights(services: Services) -> None:
    config = load_config(Path("configs/quickstart.yaml"), FEW)
    plan = await asyncio.to_thread(plan_training, config)
    student = services["student"]
    other = Shifted(student)
    pool: Any = Pool("student", student, other)
    offered = await Other(student, version=None).capabilities(deadline=asyncio.get_running_loop().time() + 60.0)
    warnings: list[str] = []
    with pytest.raises(ConfigError, match="student-2 gives log-probabilities up to 3 nats from those of student-1"):
        await compare_students(config, plan, pool, offered, warnings.append)
    other.nats = 0.25
    after = await compare_students(config, plan, pool, offered, warnings.append)
    assert after.logprob_noise_nats == pytest.approx(0.5, abs=1e-3)
    assert after.version is None
    assert len(warnings) == 1


@with_backends
async def test_two_honest_servers_are_safe_and_every_fact_is_known(started: Services) -> None:
    found = await diagnosis_of(started)
    assert (found.refusals, found.warnings) == ([], [])
    for facts in map(ServerFacts.as_tree, found.roles.values()):
        assert {name for name, value in facts.items() if value is None} == set()
        assert facts["score_temperature_probed"] == facts["generation_temperature_probed"] == "request"
        assert facts["seeds_probed"] is True
        assert facts["noise_together_nats"] == 0.0  # bits do not depend on company
        assert facts["disagreement_nats"] < 1e-4
        assert facts["disagreement_limit_nats"] == 0.05
        assert facts["round_trip_s"] > 0


@with_backends
async def test_what_a_teacher_with_its_own_tokenizer_knows_of_the_students_responses_is_shown(
    services: Services, tmp_path: Path
) -> None:
    models = [f"{role}.model={with_bytes(role, tmp_path / role)}" for role in services]
    found = await diagnosis_of(services, *models, "teacher.tokenizer=own")
    shares = {name: value for name, value in found.roles["teacher"].as_tree().items() if name.startswith("responses_")}
    assert shares["responses_known"] == shares["responses_rows"] > 0.8  # the last chunk is unknown of one cut off
    assert shares["responses_chunked"] == 0.0
    show_servers(screen := Console(file=io.StringIO(), width=200), found)
    assert "student's responses" in screen.file.getvalue()


@pytest.mark.parametrize(
    ("role", "kind", "said", "refusals"),
    [
        ("teacher", Other, {"vocab_fingerprint": "f"}, ["teacher.model: the vocabularies"]),
        ("teacher", Other, {"max_top_k": 8}, ["teacher.backend"]),
        (
            "student",
            Other,
            {"weight_update": False, "logprob_convention": "truncated"},
            ["student.backend takes no new weights", "log-probabilities must be those of the untruncated"],
        ),
        (
            "student",
            Bent,
            {},
            [
                "student.backend: log-probabilities of tokens as they were sampled and as they are scored differ by "
                "0.25 nats, where rounding in float32 makes 0.05 at most"
            ],
        ),
        ("student", Greedy, {}, ["student.backend: it samples only the likeliest tokens"]),
        (
            "student",
            Bent,
            {"dtype": "bfloat16"},
            [
                "student.backend: log-probabilities of tokens as they were sampled and as they are scored differ by "
                "0.25 nats on average, where rounding in 16 bits makes 0.1 at most"
            ],
        ),
        ("student", Cool, {"dtype": "bfloat16"}, ["student.backend: log-probabilities of tokens as"]),
        (
            "student",
            OtherModel,
            {"dtype": "bfloat16"},
            [
                "student.backend: it samples only the likeliest tokens",
                "student.backend: log-probabilities of tokens as",
            ],
        ),
        ("student", Rounded, {"dtype": "bfloat16"}, []),
        ("student", Rounded, {"dtype": None}, []),  # perhaps 16 bits
        (
            "teacher",
            OneRowOff,
            {},
            ["teacher.backend: a token's log-probability is not", "teacher.backend: log-probabilities of tokens as"],
        ),
        (
            "teacher",
            LateRows,
            {},
            ["teacher.backend: scores are one row off", "teacher.backend: log-probabilities of tokens as"],
        ),
        ("teacher", Uniform, {"generation": False}, ["teacher.backend: its distributions are uniform"]),
        ("teacher", LateRows, {"generation": False}, ["teacher.backend: scores are one row off"]),
        (
            "student",
            LateRows,
            {},
            ["student.backend: scores are one row off", "student.backend: log-probabilities of tokens as"],
        ),
    ],
)
@with_backends
async def test_what_is_unsafe_is_refused_with_the_key_all_of_it_at_once(
    role: str, kind: type[Other], said: dict[str, Any], refusals: list[str], services: Services
) -> None:
    found = await diagnosis_of(services, **{role: kind(services[role], **said)})
    assert len(found.refusals) == len(refusals)
    for line, expected in zip(found.refusals, refusals, strict=True):
        assert line.startswith(expected)


@pytest.mark.parametrize(("kind", "share"), [(Masked, "67"), (MaskedWholly, "100")])
@with_backends
async def test_a_teacher_that_masks_most_positions_is_refused_and_no_figure_of_nothing_is_shown(
    kind: type[Masked], share: str, services: Services
) -> None:
    text_only = {"token_id_prompts": False, "every_position": False, "exact_entropy": False, "generation": False}
    found = await diagnosis_of(services, teacher=kind(services["teacher"], **text_only))
    (refusal,) = found.refusals
    assert refusal.startswith(f"teacher.backend: {share}% of the positions of the student")
    assert "the server reads text, and cuts it into other tokens" in refusal
    assert ["it could not be checked that scores are of the rows" in line for line in found.warnings] == [True]
    shown = [line.split() for line in screen_text(found).splitlines()]
    (masked,) = (line for line in shown if line[:2] == ["masked", "positions"])
    assert masked[2:4] == ["0.0", "%"]  # of the student
    assert round(float(masked[4])) == int(share)
    assert not {"nan", "inf"} & {word for line in shown for word in line}
    if kind is MaskedWholly:
        facts = found.roles["teacher"].as_tree()
        assert {facts[name] for name in ("noise_alone_nats", "score_rows")} == {None}


@pytest.mark.parametrize(
    ("policy", "masked"),
    [
        ("opd", 0.0),
        ("{kind: distill, pull: 1}", 0.0),
        ("{kind: eopd, top_k: 1}", 0.5),
        ("{kind: eopd, top_k: 3}", 0.75),
    ],
)
@with_backends
async def test_masked_positions_are_those_of_what_the_policy_asks_for(
    policy: str, masked: float, services: Services
) -> None:
    by_text = {"every_position": False, "exact_entropy": False, "generation": False}
    found = await diagnosis_of(services, f"policy={policy}", teacher=NamesByText(services["teacher"], **by_text))
    assert found.roles["teacher"].as_tree()["masked_share"] == pytest.approx(masked, abs=0.03)
    assert ["% of the positions of the student" in line for line in found.refusals] == [True] * (masked > 0.6)
    assert found.roles["teacher"].as_tree()["noise_alone_nats"] == 0.0


@with_backends
async def test_a_temperature_that_is_not_what_is_said_matters_where_the_runs_is_not_1(services: Services) -> None:
    teacher = Other(services["teacher"], score_temperature="one")
    harmless = await diagnosis_of(services, teacher=teacher)
    assert harmless.refusals == []
    (warning,) = harmless.warnings
    assert warning.startswith("teacher.backend says that its log-probabilities are at temperature 1, but")
    unsafe = await diagnosis_of(services, "sampling.temperature=0.7", teacher=teacher)
    assert any("sampling.temperature=0.7" in line for line in unsafe.refusals)


@pytest.mark.parametrize(
    ("role", "kind", "expected"),
    [
        ("teacher", Noisy, "teacher.backend: the same row differs by up to 0.2 nats"),
        ("student", IgnoresSeeds, "student.backend does not honour seeds"),
        pytest.param(
            "teacher",
            FarAway,
            r"teacher.backend answers the smallest request after (0\.[3-9]|[1-9])",
            marks=pytest.mark.long,
        ),
    ],
)
@with_backends
async def test_what_makes_a_run_worse_is_a_warning(
    role: str, kind: type[Other], expected: str, services: Services
) -> None:
    elsewhere = "teacher.backend.url=http://127.0.0.1:9"  # one that runs here is not far, however slow the machine
    found = await diagnosis_of(services, elsewhere, **{role: kind(services[role], dtype="float32")})
    assert found.refusals == []
    assert [line for line in found.warnings if re.match(expected, line)], found.warnings


@with_backends
async def test_noise_that_is_stated_as_check_says_is_enough_the_next_time(services: Services) -> None:
    """The next requests may see more of it than these did."""
    noisy = {"teacher": Noisy(services["teacher"], dtype="float32")}

    async def warned(stated: float) -> list[str]:
        own = f"teacher.backend={{kind: openai, url: 'http://127.0.0.1:9/v1', logprob_noise_nats: {stated}}}"
        return [line for line in (await diagnosis_of(services, own, **noisy)).warnings if "logprob_noise_nats" in line]

    (line,) = await warned(0.15)
    assert line.startswith("teacher.backend.logprob_noise_nats=0.15 is less than was measured: raise it to 0.4 or")
    assert await warned(0.4) == []  # 0.2 were seen


@with_backends
async def test_a_teacher_that_takes_a_request_for_each_position_is_a_warning_to_who_chooses_tokens(
    services: Services,
) -> None:
    config = load_config(Path("configs/quickstart.yaml"), FEW)
    plan = await asyncio.to_thread(plan_training, config)
    choosing = replace(plan, policy=SimpleNamespace(needs=PolicyNeeds(teacher_candidates=True)))  # type: ignore[arg-type]
    one_by_one = {**services, "teacher": Other(services["teacher"], candidate_logprobs="single")}
    (warning,) = (await diagnose(config, choosing, one_by_one)).warnings
    assert warning == (
        "teacher.backend: log-probabilities of chosen tokens take it one request a position, so up to 160 requests a "
        "response: compare on the teacher's own top-k instead"
    )
    assert (await diagnose(config, choosing, services)).warnings == []
    assert (await diagnose(config, plan, one_by_one)).warnings == []  # of the policy's own, which chooses none


@with_backends
async def test_a_teacher_of_which_the_server_holds_another_model_is_named(services: Services) -> None:
    """Same vocabulary, so the run would continue and learn from the wrong model, or from itself."""
    student = str(EXAMPLE / "student")
    found = await diagnosis_of(services, teacher=Other(services["teacher"], model=student))
    (warning,) = found.warnings
    assert warning.startswith(
        f"teacher.backend: the server serves {student}, but teacher.model is examples/running_sum"
    )
    assert (await diagnosis_of(services, teacher=Other(services["teacher"], model="a-name"))).warnings == []


@with_backends
async def test_what_cannot_be_asked_is_unknown_and_named(services: Services) -> None:
    found = await diagnosis_of(services, teacher=RefusesScores(services["teacher"]))
    facts = found.roles["teacher"].as_tree()
    assert facts["noise_alone_nats"] == 0.0  # of what it samples
    assert facts["score_temperature_probed"] is None
    assert facts["round_trip_s"] is None
    assert "teacher.backend could not be asked for small requests: teacher/score: HTTP 400: no" in found.warnings
    assert found.refusals == [
        "teacher.backend could not be asked for scores of two texts that differ in a token: teacher/score: HTTP 400: no"
    ]
    unused = await diagnosis_of(
        services, "policy={kind: kd, forward_kl_weight: 0}", teacher=RefusesScores(services["teacher"])
    )
    assert unused.refusals == []


@pytest.mark.parametrize("asked_s", [None, 0.01])
@with_backends
async def test_a_question_of_the_start_that_is_throttled_is_asked_again(
    asked_s: float | None, services: Services
) -> None:
    found = await diagnosis_of(services, teacher=Throttles(services["teacher"], 3, asked_s))
    assert (found.refusals, found.warnings) == ([], [])
    assert {name for name, value in found.roles["teacher"].as_tree().items() if value is None} == set()


@with_backends
async def test_a_teacher_that_throttles_for_longer_than_a_question_has_is_refused_and_asked_no_more(
    services: Services,
) -> None:
    teacher = Throttles(services["teacher"], 1000, 600.0)
    (refusal,) = (await diagnosis_of(services, teacher=teacher)).refusals
    assert refusal == (
        "teacher.backend has no room for what the start asks: teacher/score: HTTP 429: no room; start when it has, or "
        "set its requests_per_minute and tokens_per_minute to what it allows"
    )
    assert teacher.asked == 1


class Paid:
    """An endpoint of others in the teacher's place, and its account."""

    def __init__(self, url: str, folder: Path, **settings: Any) -> None:
        given = OpenAIBackend.Settings(url=url, prices={"prompt": 3.0, "completion": 12.0}, **settings)
        self.account = given.open_account("teacher")
        of_run = given.of_run(None, self.account)
        self.backend = OpenAIBackend(of_run, role="teacher", model=str(EXAMPLE / "teacher"), run_directory=folder)


@pytest.mark.parametrize(
    "throttled",
    [
        pytest.param(("--throttled", "2", "4"), marks=pytest.mark.long),  # while the endpoint's dialect is found
        # While its scores are checked, many at once. No question is throttled so often that it waits for long.
        ("--throttled", "22", "44", "--throttled-every", "2", "--retry-after-s", "0.01"),
    ],
)
@with_backends
async def test_a_paid_teacher_that_throttles_at_the_start_is_checked_wholly_and_none_of_its_answers_is_abandoned(
    throttled: tuple[str, ...], services: Services, paid_endpoint: Any, tmp_path: Path
) -> None:
    with paid_endpoint("--vocabulary", "48", *throttled) as url:
        paid = Paid(url, tmp_path)
        async with paid.backend as teacher:
            found = await diagnosis_of(services, "policy=opd", teacher=teacher)  # type: ignore[arg-type]
    assert found.refusals == []
    assert [line for line in found.warnings if "could not" in line] == []
    facts = found.roles["teacher"].as_tree()
    assert facts["score_rows"] == RIGHT
    assert None not in (facts["noise_together_nats"], facts["masked_share"], facts["round_trip_s"])
    assert paid.account.total.unknown == 0
    assert 0.75 * START_EXPECTED[0] < paid.account.total.answered < START_AT_MOST[0], "as the estimate says"
    assert paid.account.total.failed["ThrottledError"] >= 3


@with_backends
async def test_a_paid_teacher_that_never_stops_throttling_is_refused_in_a_line(
    services: Services, paid_endpoint: Any, tmp_path: Path
) -> None:
    with paid_endpoint("--vocabulary", "48", "--throttled", "40", "100000", "--retry-after-s", "600") as url:
        async with Paid(url, tmp_path).backend as teacher:
            found = await diagnosis_of(services, "policy=opd", teacher=teacher)  # type: ignore[arg-type]
    (refusal,) = found.refusals
    assert refusal.startswith("teacher.backend has no room for what the start asks: teacher")
    assert refusal.endswith("set its requests_per_minute and tokens_per_minute to what it allows")


def test_held_out_problems_that_are_trained_on_are_a_warning_of_the_dry_run(tmp_path: Path) -> None:
    """Also those of a few words, and whatever the format makes of their text."""
    same = {"problem": "a1+2b", "answer": "A", "choices": ["3", "4"]}
    train = write(tmp_path, [same, *({"problem": f"a1+{i}b", "answer": i, "choices": []} for i in range(3, 66))])
    held = write(tmp_path, [{**same, "problem": "a1+2b "}, {**same, "problem": "a9+9b"}], "held.jsonl")
    fields = "fields: {choices: choices}"
    dry = ["train", "configs/quickstart.yaml", "--dry-run", f"data.train={{path: {train}, {fields}}}"]
    for form in ("boxed", "multiple_choice"):
        own = f"path: {held}, format: {form}, {fields}"
        benchmarks = f"evaluation={{benchmarks: {{sums: {{{own}}}}}, max_response_tokens: 100, verifier: boxed_match}}"
        shown = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*dry, benchmarks])
        assert shown.exit_code == 0, shown.output
        assert (
            "warning: evaluation.benchmarks.sums: 1 of 2 problems are in data.train too, word for word" in shown.output
        )


def test_prompts_full_of_unknown_tokens_are_a_warning_of_the_dry_run(tmp_path: Path) -> None:
    problems = write(tmp_path, [{"problem": "СКОЛЬКО БУДЕТ ДВА И ТРИ?", "answer": "7"}] * 64)
    dry = ["train", "configs/quickstart.yaml", "--dry-run", "prompt.instruction="]
    warned = CliRunner().invoke(app, [*dry, f"data.train={problems}"])
    assert warned.exit_code == 0, warned.output
    assert "of the prompts' tokens are the tokenizer's token for what it does not" in warned.output
    assert "warning" not in CliRunner().invoke(app, [*dry, *FEW]).output


@pytest.mark.long
def test_the_command_shows_a_table_or_json_and_exits_by_what_it_found(
    tmp_path: Path, monkeypatch: Any, trainer_on_thread: None
) -> None:
    (tmp_path / "frozen_server.py").write_text(
        "import msgspec\n"
        "from spot_async.backends.local import LocalBackend\n"
        "class Frozen(LocalBackend):\n"
        "    async def capabilities(self, *, deadline):\n"
        "        found = await super().capabilities(deadline=deadline)\n"
        "        return msgspec.structs.replace(found, weight_update=False)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    frozen = "student.backend.kind=frozen_server:Frozen"
    check = ["check", "configs/quickstart.yaml", *FEW]
    unsafe = CliRunner().invoke(app, [*check, frozen, f"--directory={tmp_path / 'logs'}"])
    assert unsafe.exit_code == 1, unsafe.output
    assert "unsafe: student.backend takes no new weights" in unsafe.output
    assert "round trip" in unsafe.output
    assert (tmp_path / "logs" / "logs" / "student.log").exists()
    silent = "verifier={kind: http, url: http://127.0.0.1:1/judge}"
    unjudged = CliRunner().invoke(app, [*check, silent])
    assert unjudged.exit_code == 1
    assert "error: verifier/judge: nothing answers at 127.0.0.1:1: " in unjudged.stderr
    found = CliRunner().invoke(app, [*check, "--json"])
    assert found.exit_code == 0, found.output
    roles = json.loads(found.stdout)["roles"]
    assert roles["teacher"]["score_top_k"] == 48
    wrong = CliRunner().invoke(app, [*check, "teacher.modl=x"])
    assert wrong.exit_code == 2
    assert "did you mean `model`?" in wrong.stderr
    run = [f"run.directory={tmp_path / 'run'}", "training.iterations=4"]
    refused = CliRunner().invoke(app, ["train", "configs/quickstart.yaml", *FEW, frozen, *run])
    assert refused.exit_code == 2, refused.output
    assert "error: student.backend takes no new weights" in refused.stderr


@pytest.mark.parametrize(("score", "words"), [("replace", "the first is scored"), ("sum", "their sum is scored")])
def test_the_table_says_which_end_tokens_stand_for_the_students(score, words):
    facts = SimpleNamespace(end_tokens="a (2), b (1)", end_tokens_as_students=False, end_token_scores=score)
    assert dict(ROWS)["end token"](facts) == f"a (2), b (1); {words} in place of the student's"


def with_own_prompts(tmp_path: Path, template: str | None, text: str = "{problem}") -> list[str]:
    """Return settings that give the teacher prompts of its own. A problem's `solution` is another problem."""
    texts = [f"a{start}b+{start % 9 + 1}c-2d+{start % 7 + 1}" for start in range(10, 34)]
    rows = [{"problem": one, "answer": "1", "solution": other} for one, other in zip(texts, texts[::-1], strict=True)]
    own: dict[str, Any] = {"text": text, "max_tokens": 100}
    if template is not None:
        (tmp_path / "own.jinja").write_text(template)
        own["template"] = str(tmp_path / "own.jinja")
    settings = ["policy=opd", "training.batch_size=8", "training.mini_batch_size=8"]
    return [f"data.train={write(tmp_path, rows)}", f"prompt.teacher={json.dumps(own)}", *settings]


NO_ROLE = "{{ '<|user|>' + messages[0].content }}"
FIRST_WORD = "{{ '<|user|>' + messages[0].content + '<|assistant|>' + 'one' }}"
ENDS, FIRST, OTHERS = (
    "prompt.teacher: behind the user's message the teacher reads",
    "prompt.teacher: the first token of responses has log-probability",
    "prompt.teacher: tokens after the first have log-probability",
)


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (None, "{problem}", []),
        (NO_ROLE, "{problem}", [ENDS, FIRST]),
        (FIRST_WORD, "{problem}", [ENDS, FIRST]),
        (None, "{solution}", [OTHERS]),  # another problem
    ],
)
@with_backends
async def test_a_prompt_of_the_teachers_own_is_compared_with_the_students(
    template: str | None, text: str, expected: list[str], services: Services, tmp_path: Path
) -> None:
    found = await diagnosis_of(services, *with_own_prompts(tmp_path, template, text))
    assert found.refusals == []
    assert [[begin for begin in (ENDS, FIRST, OTHERS) if line.startswith(begin)] for line in found.warnings] == [
        [begin] for begin in expected
    ]
    facts = found.roles["teacher"].as_tree()
    assert {name for name, value in facts.items() if value is None} == set()
    words = {line.strip().split("  ")[0] for line in screen_text(found).splitlines()}
    assert {"first token, own prompt", "other tokens, own prompt"} < words


@with_backends
async def test_a_uniform_teacher_is_refused_behind_a_prompt_of_its_own_too(services: Services, tmp_path: Path) -> None:
    teacher = Uniform(services["teacher"], generation=False)
    found = await diagnosis_of(services, *with_own_prompts(tmp_path, None), teacher=teacher)
    (refusal,) = found.refusals
    assert refusal.startswith("teacher.backend: its distributions are uniform")
