"""What a prompt's requests look like to a backend: prefixes, budgets, seeds, end tokens, second opinions."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from only_teacher import only
from recorder import Recorder

from spot_async.base.retry import POISONED_ATTEMPTS, WEIGHT_UPDATE_TIMEOUT_S
from spot_async.base.seeds import derive_seed
from spot_async.base.tasks import gather
from spot_async.config import SamplingConfig, ScoreStageConfig, StagesConfig
from spot_async.errors import (
    ContractError,
    DataError,
    DeadlineExceededError,
    PermanentError,
    PluginError,
    PoisonedReplyError,
    ReplayMissError,
)
from spot_async.models.common_vocabulary import CommonVocabulary, common_candidates
from spot_async.spending.score_cache import ScoreCache
from spot_async.spending.teacher_cache import KeptScores
from spot_async.stages.services import Services, StagesSettings, requests_per_prompt
from spot_async.stages.stages import Stages
from spot_async.testing.services import generation
from spot_async.testing.simulation import simulated_services, simulated_vocabulary
from spot_async.types import (
    Judgement,
    PolicyNeeds,
    Problem,
    Prompt,
    Verdict,
    VersionSpan,
    WeightVersion,
)

PROMPT = Prompt(ordinal=4, problem=Problem(id="p", text="?", answer="1"), token_ids=np.array([3, 4], np.int32))
RESPONSE = np.array([5, 6, 7, 1], dtype=np.int32)


def bound(
    recorder, *, scorer=None, student_ends=(1,), teacher_ends=(1,), end_token="replace", run_seed=0, prompt=PROMPT,
    weights_may_change=False, teacher_responses=False, teacher_candidates=True, kept_scores=None, **services,
):  # fmt: skip
    vocabulary = lambda ends: SimpleNamespace(end_token_ids=ends, decode=lambda ids: str(ids.tolist()))  # noqa: E731
    stages = Stages(
        Services(
            student=recorder,
            teachers=only(scorer or recorder, vocabulary=vocabulary(teacher_ends), kept_scores=kept_scores),
            verifier=recorder,
            vocabulary=vocabulary(student_ends),
            **services,
        ),
        StagesSettings(
            limits=StagesConfig(score=ScoreStageConfig(end_token=end_token)),
            sampling=SamplingConfig(max_response_tokens=6, temperature=0.7, top_p=0.9),
            seed=run_seed,
            max_prompts=1,
            weights_may_change=weights_may_change,
        ),
        PolicyNeeds(
            probes_per_prompt=8,
            teacher_prompt_tokens=3,
            teacher_responses=teacher_responses,
            teacher_candidates=teacher_candidates,
        ),
    )
    return stages.for_prompt(prompt)


async def test_a_probe_continues_the_prefix_and_the_candidate_with_the_budget_that_is_left():
    recorder = Recorder()
    await bound(recorder).probe(RESPONSE, 2, 11, n=0)
    ((prefix, sampling),) = recorder.generated
    assert prefix == [3, 4, 5, 6, 11]
    assert sampling.max_tokens == 6 - 2 - 1
    assert (sampling.temperature, sampling.top_p) == (0.7, 0.9)


@pytest.mark.parametrize("weights_may_change", [False, True])
async def test_a_strict_run_lets_only_responses_of_one_prompt_wait_for_each_other(weights_may_change):
    recorder = Recorder()
    for ordinal in (4, 5):
        prompt = msgspec.structs.replace(PROMPT, ordinal=ordinal)
        stages = bound(recorder, prompt=prompt, weights_may_change=weights_may_change)
        await stages.rollout()
        await stages.probe(RESPONSE, 2, 11, n=0)
    rollout, probe, *other = recorder.sessions
    assert rollout == probe
    assert (other == [rollout, probe]) is weights_may_change


@pytest.mark.parametrize(("position", "candidate"), [(2, 1), (5, 11)])
async def test_an_end_token_or_a_spent_budget_needs_no_continuation(position, candidate):
    recorder = Recorder()
    generation = await bound(recorder).probe(np.resize(RESPONSE, 6), position, candidate, n=0)
    assert len(generation.token_ids) == 0
    assert recorder.generated == []


async def test_every_request_has_a_seed_of_its_own_that_follows_from_what_it_is():
    async def seeds(run_seed=0, ordinal=4):
        recorder = Recorder()
        prompt = Prompt(ordinal=ordinal, problem=PROMPT.problem, token_ids=PROMPT.token_ids)
        stages = bound(recorder, run_seed=run_seed, prompt=prompt)
        await stages.rollout()
        for position, candidate, n in [(0, 10, 0), (1, 10, 0), (0, 11, 0), (0, 10, 1)]:
            await stages.probe(RESPONSE, position, candidate, n=n)
        return [sampling.seed for _, sampling in recorder.generated]

    first = await seeds()
    assert first == await seeds()
    assert len({*first, *await seeds(run_seed=1), *await seeds(ordinal=5)}) == 15


async def test_a_prefix_is_continued_in_the_room_that_it_leaves_until_an_end_or_a_stop():
    recorder = Recorder()
    stages = bound(recorder, teacher_responses=True)
    prefix = np.array([5, 6], np.int32)
    for ask in (stages.rollout, stages.teacher_response):
        recorder.generated.clear()
        await ask(prefix_ids=prefix)
        await ask(prefix_ids=[5, 6], max_tokens=3, stop=(8,))
        await ask(prefix_ids=prefix, max_tokens=9)
        await ask(prompt_ids=np.array([12, 13, 14], np.int32), prefix_ids=prefix)
        assert [context for context, _ in recorder.generated] == [[3, 4, 5, 6]] * 3 + [[12, 13, 14, 5, 6]]
        assert [sampling.max_tokens for _, sampling in recorder.generated] == [4, 3, 4, 4]
        assert [sampling.stop_token_ids for _, sampling in recorder.generated] == [(1,), (1, 8), (1,), (1,)]


@pytest.mark.parametrize(
    ("asked", "finish_reason"),
    [
        ({"prefix_ids": [5, 1]}, "stop"),  # it ended
        ({"prefix_ids": [5, 2]}, "stop"),  # as the teacher does
        ({"prefix_ids": [5, 6, 7, 5, 6, 7]}, "length"),  # no room is left
        ({"prefix_ids": [5], "max_tokens": 0}, "length"),
    ],
)
async def test_a_prefix_that_ended_or_leaves_no_room_is_followed_by_nothing(asked, finish_reason):
    recorder = Recorder()
    stages = bound(recorder, teacher_ends=(2,), teacher_responses=True)
    for ask in (stages.rollout, stages.teacher_response):
        nothing = await ask(**asked)
        assert (len(nothing.token_ids), nothing.version_spans, nothing.finish_reason) == (0, (), finish_reason)
    assert recorder.generated == []


async def test_the_teacher_continues_a_prefix_with_its_own_end_token_and_no_student_wrote_what_it_says():
    class Ending(Recorder):
        async def generate(self, *arguments, **settings):
            await super().generate(*arguments, **settings)
            return generation([9, 2])

    recorder = Ending()
    stages = bound(recorder, student_ends=(1,), teacher_ends=(2,), teacher_responses=True)
    reply = await stages.teacher_response(prefix_ids=[2, 6], stop=(1,))  # a token 2 of the student's is no end
    ((context, sampling),) = recorder.generated
    assert context == [3, 4, 1, 6]
    assert sampling.stop_token_ids == (1, 2)
    assert reply.token_ids.tolist() == [9, 1]
    assert reply.version_spans == (VersionSpan(0, 2, None),)


async def test_what_the_student_writes_behind_another_prompt_is_foreign_to_this_one():
    stages = bound(Recorder())
    own, other = PROMPT.token_ids.copy(), np.array([12, 13], np.int32)
    assert [span.version is None for span in (await stages.rollout(prompt_ids=own)).version_spans] == [False]
    assert (await stages.rollout(prompt_ids=other)).version_spans == (VersionSpan(0, 1, None),)


async def test_what_a_response_continues_decides_its_seed_and_nothing_else_of_it_does():
    recorder = Recorder()
    stages = bound(recorder, run_seed=3, teacher_responses=True)
    prompt, other = np.array([12, 13], np.int32), np.array([12, 14], np.int32)
    kinds = [{}, {"n": 1}, {"n": 2}, {"prefix_ids": [5]}, {"prefix_ids": [6]}, {"prefix_ids": [5], "n": 1}]
    kinds += [{"prompt_ids": prompt}, {"prompt_ids": other}, {"prompt_ids": prompt, "prefix_ids": [5]}]
    kinds += [{"prompt_ids": np.array([5], np.int32)}]
    for more in ({}, {"max_tokens": 2, "stop": (8,)}):
        for kind in kinds:
            await stages.rollout(**kind, **more)
            await stages.teacher_response(**kind, **more)
    settings = [sampling for _, sampling in recorder.generated]
    seeds = [each.seed for each in settings]
    assert seeds[: len(seeds) // 2] == seeds[len(seeds) // 2 :]
    assert len({*seeds}) == 2 * len(kinds)
    # A run's tokens stay the same from version to version.
    assert seeds[:2] == [derive_seed(3, PROMPT.ordinal, what) for what in ("rollout", "teacher response")]
    assert [(each.temperature, each.top_p, each.max_tokens) for each in settings[:2]] == [(0.7, 0.9, 6)] * 2


def written(response, most=6):
    """Return what stages make of a problem's response in the data, whose text is its tokens' numbers."""
    prompt = msgspec.structs.replace(PROMPT, problem=msgspec.structs.replace(PROMPT.problem, response=response))
    services = simulated_services(PolicyNeeds(), vocabulary=simulated_vocabulary((1, 7)))
    settings = StagesSettings(sampling=SamplingConfig(max_response_tokens=most))
    return Stages(services, settings, PolicyNeeds()).for_prompt(prompt).written_response()


def test_a_written_response_ends_as_the_student_does_and_nobody_sampled_it():
    for response in ("5 6", "5 6 1"):
        found = written(response)
        assert found.token_ids.tolist() == [5, 6, 1]
        assert (found.version_spans, found.finish_reason) == ((VersionSpan(0, 3, None),), "stop")
    assert written("5 7").token_ids.tolist() == [5, 7]  # it may end as the model does at times
    cut = written("5 6 8", most=2)
    assert (cut.token_ids.tolist(), cut.version_spans, cut.finish_reason) == (
        [5, 6],
        (VersionSpan(0, 2, None),),
        "length",
    )


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (None, r"problem 'p' has no response: name its column in data\.train\.fields\.response"),
        ("", "problem 'p' has no response"),
        ("5 1 6", "problem 'p': its response goes on after an end token, its token 2 of 3: correct the row"),
    ],
)
def test_a_response_that_cannot_be_learnt_is_refused_with_its_problem(response, said):
    with pytest.raises(DataError, match=said):
        written(response)


@pytest.mark.parametrize(
    ("response", "student_ends", "teacher_ends", "scored", "asked"),
    [
        ([5, 1], (1,), (2, 8, 1), [5, 2], [8, 1]),  # a chat teacher may stop at a Base student's end, but writes 2
        ([5, 2], (1,), (2, 8, 1), [5, 2], None),  # the teacher's own, by itself
        ([5, 1], (2, 1), (2, 1), [5, 1], None),  # both end with it
        ([5, 8], (8, 1), (8, 1), [5, 8], None),
        ([5, 6], (1,), (2, 8), [5, 6], None),  # cut off
        ([], (1,), (2, 8), [], None),
        ([5, 1], (1,), (2,), [5, 2], None),  # nothing to add
    ],
)
async def test_an_end_is_scored_as_the_teachers_and_its_others_are_summed_only_where_it_was_replaced(
    response, student_ends, teacher_ends, scored, asked
):
    class Summing(Recorder):
        asked = None

        async def candidate_logprobs(self, request, positions, candidate_ids, *, expected_version):
            assert (request.response_ids.tolist(), positions.tolist()) == ([5, 2], [1])
            assert expected_version == WeightVersion(0, 0)
            self.asked = candidate_ids[0].tolist()
            return np.full(candidate_ids.shape, -1.0, np.float32)

    recorder = Summing()
    arguments = {"student_ends": student_ends, "teacher_ends": teacher_ends, "kept_scores": recorder}
    scores = await bound(recorder, end_token="sum", **arguments).score(np.array(response, np.int32), top_k=1)
    assert (recorder.scored, recorder.asked) == ([scored], asked)
    assert len(scores.logprobs) == len(response)
    assert max(scores.logprobs, default=0.0) <= 0  # also where rounding makes it more than certain
    await bound(recorder, end_token="replace", **arguments).score(np.array(response, np.int32), top_k=1)
    assert recorder.scored == [scored] * 2
    assert len({*map(repr, recorder.keys)}) == (1 if asked is None else 2)  # a kept score is one or the other


async def test_the_tail_of_a_row_stays_what_is_left_of_it_where_ends_are_swapped_and_summed():
    class Sending(Recorder):
        async def score(self, request, *, top_k):
            scores = await super().score(request, top_k=top_k)
            logprobs = np.log(np.array([[0.5, 0.25, 0.125]] * len(scores.logprobs), np.float32))
            tails = np.full(len(logprobs), np.log(0.125), np.float32)
            return msgspec.structs.replace(scores, topk_logprobs=logprobs, tail_logprobs=tails)

        async def candidate_logprobs(self, request, positions, candidate_ids, *, expected_version):
            return np.full(candidate_ids.shape, np.log(0.125), np.float32)

    stages = bound(Sending(), student_ends=(1,), teacher_ends=(2, 8), end_token="sum")
    scores = await stages.score(RESPONSE, top_k=3)
    assert scores.topk_ids[-1].tolist() == [6, 1, 2]
    np.testing.assert_allclose(np.exp(scores.topk_logprobs).sum(axis=1) + np.exp(scores.tail_logprobs), 1.0)


@pytest.mark.parametrize(
    ("student_ends", "teacher_ends", "expected"), [((1,), (2, 1), [6, 1, 2]), ((2, 1), (2,), [6, 2, 1])]
)
async def test_the_teachers_end_token_among_candidates_stands_for_the_students(student_ends, teacher_ends, expected):
    """So it does at single positions. It is swapped, so that candidates stay different."""
    recorder = Recorder()
    stages = bound(recorder, student_ends=student_ends, teacher_ends=teacher_ends)
    assert (await stages.score(RESPONSE, top_k=3)).topk_ids.tolist() == [expected] * 4
    assert (await stages.score_at(RESPONSE, np.array([1, 3]), top_k=3)).topk_ids.tolist() == [expected] * 2
    assert recorder.scored == [[5, 6, 7, 2]] * 2
    assert recorder.temperatures == [0.7] * 2


GRADED = Judgement(Verdict.WRONG, 0.25, "one step of four")
LATE, BABBLING = DeadlineExceededError("no worker was free"), PoisonedReplyError("verifier: cannot read the reply")


@pytest.mark.parametrize(
    ("answers", "judgement", "times"),
    [
        ([Verdict.TIMEOUT, Verdict.CORRECT], Judgement(Verdict.CORRECT, 1.0), 2),
        ([Verdict.ERROR, Verdict.TIMEOUT, Verdict.CORRECT], Judgement(Verdict.TIMEOUT, None), 2),
        ([BABBLING] * 9, Judgement(Verdict.ERROR), POISONED_ATTEMPTS),
        ([LATE] * 9, Judgement(Verdict.TIMEOUT, None), 2),
        ([GRADED], GRADED, 1),  # with its own number and words
    ],
)
async def test_missing_evidence_is_asked_for_once_more_and_a_judgement_reaches_the_policy(answers, judgement, times):
    recorder = Recorder(*answers)
    assert await bound(recorder).verify(RESPONSE) == judgement
    assert recorder.verified == times


async def test_all_log_probabilities_are_asked_for_at_the_rollouts_temperature():
    recorder = Recorder()
    stages = bound(recorder)
    await stages.rollout()
    await stages.score(RESPONSE, top_k=1)
    positions, candidates = np.zeros(1, np.int32), np.zeros((1, 2), np.int32)
    await stages.candidate_logprobs(RESPONSE, positions, candidates, version=WeightVersion(0, 0))
    assert recorder.generated[0][1].temperature == 0.7
    assert recorder.temperatures == [0.7, 0.7]


@pytest.mark.parametrize(("is_live", "asked"), [(False, WeightVersion(0, 3)), (True, None)])
async def test_candidates_are_asked_of_the_responses_weights_or_of_the_live_ones(is_live, asked):
    recorder = Recorder()
    stages = bound(recorder, weights_may_change=is_live)
    positions, candidates = np.zeros(1, np.int32), np.zeros((1, 2), np.int32)
    await stages.candidate_logprobs(RESPONSE, positions, candidates, version=WeightVersion(0, 3))
    assert recorder.asked_versions == [asked]


@pytest.mark.parametrize(("may_change", "later_s"), [(False, 0.0), (True, WEIGHT_UPDATE_TIMEOUT_S)])
async def test_only_a_student_that_is_updated_under_way_has_longer_than_its_stage_waits(may_change, later_s):
    class Noting(Recorder):
        async def generate(self, *arguments, deadline, **settings):
            self.student_s = deadline
            return await super().generate(*arguments, deadline=deadline, **settings)

        async def score(self, request, *, top_k):
            self.teacher_s = request.deadline
            return await super().score(request, top_k=top_k)

    recorder, now_s = Noting(), asyncio.get_running_loop().time()
    stages = bound(recorder, weights_may_change=may_change)
    await stages.rollout()
    await stages.score(RESPONSE, top_k=1)
    assert recorder.student_s - now_s == pytest.approx(StagesConfig().timeout_s + later_s, abs=5.0)
    assert recorder.teacher_s - now_s == pytest.approx(StagesConfig().timeout_s, abs=5.0)


async def test_the_reference_scores_what_was_sampled_end_token_included():
    reference = Recorder()
    stages = bound(Recorder(), student_ends=(1,), teacher_ends=(2,), reference=reference)
    await stages.reference_logprobs(RESPONSE)
    assert reference.temperatures == [0.7]
    assert reference.scored == [RESPONSE.tolist()]  # not as the teacher ends


async def test_a_reference_that_left_positions_out_is_refused():
    class Masking(Recorder):
        async def score(self, *args, **settings):
            scores = await super().score(*args, **settings)
            return msgspec.structs.replace(scores, valid=np.array([True, False, True, True]))

    stages = bound(Recorder(), reference=Masking())
    with pytest.raises(PermanentError, match=r"reference\.backend gave no log-probabilities of 1 of 4 tokens"):
        await stages.reference_logprobs(RESPONSE)


async def test_asking_for_what_the_needs_did_not_state_is_an_error():
    with pytest.raises(PluginError, match="teacher_responses"):
        await bound(Recorder()).teacher_response()


async def test_a_prompt_has_no_more_requests_at_a_stage_than_the_needs_state_and_as_many_again_once_they_ended():
    class Slow(Recorder):
        async def generate(self, *arguments, **settings):
            await asyncio.sleep(0)
            return await super().generate(*arguments, **settings)

    recorder = Slow()
    stages = bound(recorder)  # eight probes
    for _ in range(2):
        await gather(stages.probe(RESPONSE, 2, 11, n=n) for n in range(8))
    said = r"asks probe for 9 answers of a prompt at once, and its needs state 8: set PolicyNeeds\.probes_per_prompt"
    with pytest.raises(PluginError, match=said):
        await gather(stages.probe(RESPONSE, 2, 11, n=n) for n in range(9))


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ({}, {"rollout": 1, "score": 1, "candidates": 1, "probe": 0, "verify": 1, "teacher_response": 0}),
        ({"samples_per_prompt": 4, "probes_per_prompt": 2}, {"rollout": 4, "score": 4, "probe": 2, "verify": 6}),
        ({"rollouts_per_prompt": 8, "scores_per_prompt": 3}, {"rollout": 8, "score": 3, "verify": 8, "reference": 8}),
        ({"rollouts_per_prompt": 0, "teacher_responses": True}, {"rollout": 0, "teacher_response": 1, "verify": 2}),
    ],
)
def test_needs_state_how_many_requests_a_prompt_has_at_each_stage(needs, expected):
    found = requests_per_prompt(PolicyNeeds(**needs))
    assert {stage: found[stage] for stage in expected} == expected


class Plain:
    score = Recorder.score


async def test_a_teacher_without_single_positions_is_not_asked_for_any():
    stages = bound(Recorder(), scorer=Plain())
    with pytest.raises(PluginError, match="single positions"):
        await stages.score_at(RESPONSE, np.array([0]), top_k=3)


class Choosing(Recorder):
    """A teacher that says a tenth of each token's id."""

    async def candidate_logprobs(self, request, positions, candidate_ids, *, expected_version):
        self.scored.append(request.response_ids.tolist())
        self.chosen = (positions.tolist(), candidate_ids.tolist(), expected_version)
        self.temperatures.append(request.temperature)
        return -candidate_ids.astype(np.float32) / 10


async def test_the_teacher_is_asked_about_chosen_tokens_by_its_own_end_token_once_and_never_in_a_replay(tmp_path):
    teacher, ends = Choosing(), {"student_ends": (1,), "teacher_ends": (2, 8)}
    positions, candidates = np.array([3, 0], np.int32), np.array([[1, 6], [6, 2]], np.int32)

    async def ask(cache, *asked):
        return await bound(Recorder(), scorer=teacher, kept_scores=KeptScores(cache, b"it"), **ends).teacher_candidates(
            *asked
        )

    async with ScoreCache(tmp_path / "cache") as cache:
        asked = await ask(cache, RESPONSE, positions, candidates)
        np.testing.assert_allclose(asked, [[-0.2, -0.6], [-0.6, -0.1]])  # the student's end token means the teacher's
        assert teacher.chosen == ([3, 0], [[2, 6], [6, 1]], None)
        assert (teacher.scored, teacher.temperatures) == ([[5, 6, 7, 2]], [0.7])
        others = [await ask(cache, RESPONSE, positions, candidates[::-1])]
        others += [await ask(cache, RESPONSE, positions[::-1], candidates)]
        assert len(teacher.scored) == 3  # whatever differs is another question
    async with ScoreCache(tmp_path / "cache", is_replay=True) as cache:
        np.testing.assert_array_equal(await ask(cache, RESPONSE, positions, candidates), asked)
        with pytest.raises(ReplayMissError, match="has no answer about prompt 4"):
            await ask(cache, RESPONSE, positions, candidates + 1)
    assert len(teacher.scored) == 3


async def test_tokens_that_only_some_models_have_are_no_candidates_of_the_teachers():
    common = CommonVocabulary({"student": 12, "teacher": 9})
    stages = bound(Recorder(), scorer=Choosing(), common=common)
    ids = np.array([[8, 10, 3], [4, 5, 6]], np.int32)
    with pytest.raises(ContractError, match=r"token 10, and only those below 9 are common .* by `common_candidates`"):
        await stages.teacher_candidates(RESPONSE, np.arange(2), ids)
    known, logprobs = common_candidates(ids, -ids.astype(np.float32), common.limit)
    assert known.tolist() == [[8, 3], [4, 5]]
    np.testing.assert_allclose(await stages.teacher_candidates(RESPONSE, np.arange(2), known), logprobs / 10)
    assert common_candidates(ids, ids, None)[0] is ids


async def test_chosen_tokens_are_asked_of_a_teacher_only_if_the_needs_say_so_and_it_can_answer():
    asked = (RESPONSE, np.zeros(1, np.int32), np.zeros((1, 2), np.int32))
    with pytest.raises(ContractError, match="its needs do not state: teacher_candidates"):
        await bound(Choosing(), teacher_candidates=False).teacher_candidates(*asked)
    with pytest.raises(LookupError, match="asks the teacher for chosen tokens, which its backend does not offer"):
        await bound(Recorder(), scorer=Plain()).teacher_candidates(*asked)


async def test_a_rollout_carries_its_top_k_and_probes_none():
    recorder = Recorder()
    stages = bound(recorder)
    await stages.rollout(top_k=20)
    await stages.probe(RESPONSE, 0, 10, n=0)
    assert recorder.top_k == [20, 0]
