"""The local backend keeps the contract, and a backend with a fault fails the check that names it, and no other.

`spot_async.testing.conformance` is the contract test of every backend; here it is one of the local backend too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from contract_run import run_contract
from faulty_backends import (
    AnswersAnyVersion,
    Breaks,
    CandidatesAtOneOnly,
    CapsTheResponse,
    CutsTopK,
    Faulty,
    FinishesWhatNobodyWantsAnyMore,
    ForgivesIds,
    IgnoresDeadlines,
    MixedUpUnderLoad,
    ScoresAtOne,
    StaleVersion,
    StaleWeights,
    TakesAnyWeights,
    of_generations,
    of_samples,
    of_scores,
    with_row,
)
from kept_replies import KeptReplies

from spot_async.backends.local.backend import LocalBackend
from spot_async.testing.conformance import test_generation, test_scoring, test_service, test_weights
from spot_async.testing.conformance.contract import CHECKS, Violation
from spot_async.testing.conformance.plugin import make_subject
from spot_async.types import Generation, SamplingSettings, VersionSpan, WeightVersion

assert all((test_generation, test_scoring, test_service, test_weights))  # they define the checks

SLOW = {"abort", "refused_snapshot", "weight_update", "update_under_way"}
MODEL = {"vocab_size": 53, "tie_word_embeddings": False, "initializer_range": 0.2, "max_position_embeddings": 512}

pytestmark = pytest.mark.usefixtures("servers_on_threads")
with_backend = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_directory(random_model: Callable[..., Path]) -> Path:
    return random_model(seed=0, **MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(
    servers_on_threads: None, model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalBackend]:
    settings = LocalBackend.Settings(slots=8)
    run_directory = tmp_path_factory.mktemp("run")
    async with LocalBackend(settings, role="student", model=str(model_directory), run_directory=run_directory) as it:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(it._server, "post", KeptReplies(it).post)
            yield it


class KeptReference:
    """What was computed for one fault is not computed again for the next."""

    kept: ClassVar[dict[tuple[bytes, bytes, float], Any]] = {}

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    async def logprobs(self, prompt_ids: Any, response_ids: Any, temperature: float = 1.0) -> Any:
        asked = prompt_ids.tobytes(), response_ids.tobytes(), temperature
        if asked not in self.kept:
            self.kept[asked] = await self._reference.logprobs(prompt_ids, response_ids, temperature)
        return self.kept[asked]


async def failing(faulty: Any, model_directory: Path, scratch: Path, names: set[str]) -> set[str]:
    """The checks that fail."""
    subject = await make_subject(faulty, str(model_directory), scratch)
    subject.reference = KeptReference(subject.reference)  # type: ignore[assignment] # until an update
    failed = set()
    for check in CHECKS.values():
        if check.name in names:
            subject._seeds = itertools.count(1)  # so that each fault is asked the same, which the server answers once
            try:
                await check.run(subject)
            except Violation:
                failed.add(check.name)
            except pytest.skip.Exception:
                continue
    return failed


@pytest.mark.long
def test_the_local_backend_keeps_the_contract(
    model_directory: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    local = ["--backend", "local", "--model", str(model_directory), "--set", "slots=8", "--directory", str(tmp_path)]
    code, found = run_contract(*local)
    assert (code, found.keys()) == (0, CHECKS.keys())
    assert {name: said for name, (state, said, _) in found.items() if state != "passed"} == {
        "position_scores": "not offered: no single positions in more detail"
    }
    assert max(nats for _, _, nats in found.values()) <= 2e-5
    shown = capsys.readouterr().out
    assert all(f"\n{name} " in shown for name in CHECKS)


AT_ONE = of_samples(lambda asked: {"temperature": 1.0})
COUNTER = itertools.count(10**6)
FAULTS: dict[str, tuple[Callable[[Any], Faulty], set[str]]] = {
    "generations one row off": (of_generations(lambda r: {"logprobs": np.roll(r.logprobs, 1)}), {"generation_parity"}),
    "a first row that is the second": (
        of_generations(lambda r: {"logprobs": with_row(r.logprobs, 0)}),
        {"generation_boundary"},
    ),
    "a last row that is the one before": (
        of_generations(lambda r: {"logprobs": with_row(r.logprobs, -1)}),
        {"generation_boundary"},
    ),
    "a temperature that is ignored": (
        AT_ONE,
        {"generation_temperature", "sampling_distribution", "low_temperature"},
    ),
    "a temperature said to be 1": (
        lambda backend: Faulty(backend, generation_temperature="one"),
        {"generation_temperature", "candidate_temperature"},
    ),
    "top_p ignored": (of_samples(lambda asked: {"top_p": 1.0}), {"top_p"}),
    "a limit of the vocabulary ignored": (of_samples(lambda asked: {"vocab_limit": None}), {"vocab_limit"}),
    "a convention that is not true": (lambda backend: Faulty(backend, logprob_convention="truncated"), {"top_p"}),
    "seeds ignored": (of_samples(lambda asked: {"seed": next(COUNTER)}), {"seeds"}),
    "one seed for all": (of_samples(lambda asked: {"seed": 42}), {"samples_differ"}),
    "stop tokens ignored": (of_samples(lambda asked: {"stop_token_ids": ()}), {"stop_tokens", "immediate_stop"}),
    "stop tokens cut off": (
        of_generations(lambda r: {"token_ids": r.token_ids[: len(r.token_ids) - (r.finish_reason == "stop")]}),
        {"stop_tokens", "immediate_stop"},
    ),
    "responses cut short without a word": (CapsTheResponse, {"longest_response"}),
    "versions that are made up": (
        of_generations(lambda r: {"version_spans": (VersionSpan(0, len(r.token_ids), WeightVersion(8, 8)),)}),
        {"versions"},
    ),
    "scores one row off": (of_scores(lambda r: {"logprobs": np.roll(r.logprobs, -1)}), {"score_parity"}),
    "the boundary row dropped": (of_scores(lambda r: {"logprobs": with_row(r.logprobs, 0)}), {"score_boundary"}),
    "top-k ids in the wrong order": (
        of_scores(lambda r: {"topk_ids": r.topk_ids[:, ::-1]}),
        {"score_top_k"},
    ),
    "entropies of the top-k only": (of_scores(lambda r: {"entropy": r.entropy * 0.9}), {"score_entropy"}),
    "bounds that miss": (of_scores(lambda r: {"entropy_lower": r.entropy + 0.01}), {"score_entropy"}),
    "scores at temperature 1": (ScoresAtOne, {"score_temperature"}),
    "replies mixed up under load": (MixedUpUnderLoad, {"concurrency"}),
    "ids out of the vocabulary forgiven": (ForgivesIds, {"refused_ids"}),
    "a top-k cut down without a word": (CutsTopK, {"refused_shapes"}),
    "deadlines ignored": (IgnoresDeadlines, {"deadline"}),
    "candidates of whatever weights": (AnswersAnyVersion, {"candidate_version"}),
    "candidates at temperature 1 beside rollouts at any": (CandidatesAtOneOnly, {"candidate_temperature"}),
    "a tokenizer of another model": (lambda backend: Faulty(backend, vocab_fingerprint="f"), {"capabilities"}),
    "a bug": (Breaks, {"score_parity", "empty_response", "refused_ids", "refused_shapes"}),
}


# The checks that these fail are failed by others too; scores one row off, by a broken contract below.
ALIKE = {
    "a convention that is not true",
    "a temperature said to be 1",
    "bounds that miss",
    "scores one row off",
    "stop tokens cut off",
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.long) if each in ALIKE else each for each in FAULTS]
)
@with_backend
async def test_a_fault_fails_the_check_that_names_it(
    name: str, backend: LocalBackend, model_directory: Path, tmp_path: Path
) -> None:
    make, expected = FAULTS[name]
    concerned = {CHECKS[each].of for each in expected} | {None}
    quick = {check.name for check in CHECKS.values() if check.of in concerned} - SLOW
    assert await failing(make(backend), model_directory, tmp_path, quick) == expected


@with_backend
@pytest.mark.long
async def test_requests_that_go_on_when_given_up_fail_abort(
    backend: LocalBackend, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_service, "ABANDONED", 64)  # far more than its 8 slots already
    monkeypatch.setattr(test_service, "ABANDONED_AFTER", 0.9)  # by then all are on their way, on a busy machine too
    faulty = FinishesWhatNobodyWantsAnyMore(backend)
    try:
        found = await failing(faulty, model_directory, tmp_path, {"deadline", "abort"})
    finally:
        for task in faulty.tasks:
            task.cancel()
        await asyncio.gather(*faulty.tasks, return_exceptions=True)
    assert found == {"abort"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (TakesAnyWeights, "refused_snapshot"),
        (StaleVersion, "weight_update"),
        (StaleWeights, "weight_update"),
    ],
)
@with_backend
async def test_faults_of_updates_fail_the_check_that_names_them(
    make: type[Any], expected: str, backend: LocalBackend, model_directory: Path, tmp_path: Path
) -> None:
    held = (await backend.stats(deadline=asyncio.get_running_loop().time() + 60)).version
    faulty = make(backend, version=held)
    faulty.first_directory = str(model_directory)
    names = {"refused_snapshot", "weight_update", "update_under_way"}
    found = await failing(faulty, model_directory, tmp_path, names)
    assert found == {expected}


class OffAtTimes(Faulty):
    """Every log-probability of a sample is off by as much as is its turn; the last one lasts."""

    turns: tuple[float, ...]

    async def generate(self, prompt_ids: Any, sampling: SamplingSettings, **more: Any) -> Generation:
        reply = await super().generate(prompt_ids, sampling, **more)
        turn, *rest = self.turns
        self.turns = tuple(rest) or (turn,)
        return msgspec.structs.replace(reply, logprobs=reply.logprobs + turn)


@pytest.mark.parametrize(
    ("name", "turns", "status", "is_repeated"),
    [
        ("generation_parity", (3e-5, *[0.0] * 8), "passed", True),
        ("generation_parity", (3e-5,), "failed", True),
        ("generation_parity", (1e-4, *[0.0] * 8), "failed", False),
        ("refused_snapshot", (3e-5, *[0.0] * 8), "passed", True),  # writes its files once more, too
    ],
)
@with_backend
async def test_only_what_is_a_little_beyond_the_tolerance_is_looked_at_once_more(
    name: str,
    turns: tuple[float, ...],
    status: str,
    is_repeated: bool,
    backend: LocalBackend,
    model_directory: Path,
    tmp_path: Path,
) -> None:
    faulty = OffAtTimes(backend)
    subject = await make_subject(faulty, str(model_directory), tmp_path)
    faulty.turns = turns
    try:
        found, said = "passed", (await CHECKS[name].run(subject)).note
    except Violation as broken:
        found, said = "failed", str(broken)
    assert (found, "nats off the first time" in said) == (status, is_repeated), said


async def test_a_server_that_ignores_seeds_and_draws_less_likely_tokens_the_second_time_stops_all_the_same() -> None:
    """On flat distributions none of the four likeliest comes again often enough."""
    at_first = np.repeat(np.arange(8), [6, 5, 4, 3, 2, 2, 1, 1])

    async def generate(prompt_ids: Any, *, stop_token_ids: tuple[int, ...] = (), **_: Any) -> Any:
        drawn = np.array([6]) if stop_token_ids else at_first
        return SimpleNamespace(token_ids=drawn, finish_reason="stop" if 6 in stop_token_ids else "length")

    subject: Any = SimpleNamespace(
        prompt=lambda *_: np.arange(3), generate=generate, generation_top_k=0, end_token_ids=(9,)
    )
    assert "8 of 8 responses ended" in (await CHECKS["stop_tokens"].ask(subject)).note


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model MODEL --backend local --set slos=8", "backend.slos: unknown key; did you mean `slots`?"),
        ("--model MODEL --backend loca", "did you mean 'local'?"),
        ("--model none --backend local", "student.model: no directory"),
        ("--backend local", "give --backend KIND and --model DIR"),
    ],
)
def test_what_cannot_be_started_is_one_line(
    options: str, said: str, model_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run_contract(*options.replace("MODEL", str(model_directory)).split())
    assert (code, found) == (pytest.ExitCode.USAGE_ERROR, {})
    [line] = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_a_broken_contract_fails_with_one_line_and_what_builds_on_it_is_not_checked(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def score(self: LocalBackend, *arguments: Any, **more: Any) -> Any:
        reply = await asked(self, *arguments, **more)
        return msgspec.structs.replace(reply, logprobs=np.roll(reply.logprobs, -1))

    asked = LocalBackend.score
    monkeypatch.setattr(LocalBackend, "score", score)
    code, found = run_contract(
        "--backend", "local", "--model", str(model_directory), "--directory", str(tmp_path), "-k", "score_"
    )
    assert code == 1
    assert found["score_parity"].state == "failed"
    assert "log-probabilities of given tokens differ by up to" in found["score_parity"].said
    assert found["score_boundary"] == ("skipped", "not checked: builds on score_parity", 0.0)


def test_a_server_that_does_not_start_ends_the_checks(
    model_directory: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = ["--backend", "vllm", "--url", "http://127.0.0.1:9", "--model", str(model_directory)]
    code, found = run_contract(*gone, "--directory", str(tmp_path))
    assert (code, found) == (1, {})
    assert "Exit: error: " in capsys.readouterr().out
