"""What the teacher reads, where that is not the student's prompt, and what stays as it was."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from only_teacher import only
from recorder import Recorder

from spot_async.base.seeds import derive_seed
from spot_async.config import SamplingConfig
from spot_async.errors import PermanentError
from spot_async.policies.opd import OpdPolicy
from spot_async.policies.samples import student_sample
from spot_async.stages.services import Services, StagesSettings
from spot_async.stages.stages import Stages
from spot_async.testing.services import capabilities
from spot_async.testing.simulation import make_policy, simulated_prompts, simulated_run, simulated_turn_ids
from spot_async.types import ChatTurn, PolicyNeeds, Problem, Prompt

PLAIN = Prompt(ordinal=4, problem=Problem(id="p", text="?", answer="1"), token_ids=np.array([3, 4], np.int32))
OWN = Prompt(
    ordinal=4, problem=PLAIN.problem, token_ids=PLAIN.token_ids, teacher_ids=np.array([3, 4, 9, 9, 4], np.int32)
)
CONTEXT = np.array([7, 7, 7, 7, 7, 7], np.int32)
RESPONSE = np.array([5, 6, 1], np.int32)
POSITIONS = np.array([1], np.int32)
CHOSEN = np.array([[8]], np.int32)


def bound(recorder, prompt, said=None, **teacher):
    stages = Stages(
        Services(
            student=recorder,
            teachers=only(recorder, kept_scores=recorder, **teacher),
            reference=recorder,
            verifier=recorder,
            vocabulary=SimpleNamespace(end_token_ids=(1,), decode=str),
            capabilities={} if said is None else {"teacher": said},
        ),
        StagesSettings(sampling=SamplingConfig(max_response_tokens=6), seed=3, max_prompts=1),
        PolicyNeeds(
            teacher_top_k=1,
            teacher_candidates=True,
            probes_per_prompt=1,
            teacher_responses=1,
            reference=True,
            teacher_prompt_tokens=6,
        ),
    )
    return stages.for_prompt(prompt)


@pytest.mark.parametrize(("every_position", "asked"), [(False, [0, 1, 4]), (True, [1, 1, 4])])
async def test_a_teacher_that_names_tokens_by_text_is_asked_for_no_more_than_the_policy_wants(every_position, asked):
    recorder = Recorder()
    stages = bound(recorder, PLAIN, capabilities(48, every_position=every_position))
    for top_k in (0, 1, 4):
        await stages.score(RESPONSE, top_k=top_k)
    assert recorder.top_k == asked


@pytest.mark.parametrize(("prompt", "read"), [(PLAIN, [3, 4]), (OWN, [3, 4, 9, 9, 4])])
async def test_only_the_teacher_reads_its_own_prompt(prompt, read):
    recorder = Recorder()
    stages = bound(recorder, prompt)
    await stages.score(RESPONSE, top_k=1)
    await stages.score_at(RESPONSE, POSITIONS, top_k=1)
    await stages.teacher_candidates(RESPONSE, POSITIONS, CHOSEN)
    await stages.teacher_response()
    assert recorder.read == [read] * 4
    recorder.read.clear()
    await stages.rollout()
    await stages.reference_logprobs(RESPONSE)
    await stages.candidate_logprobs(RESPONSE, POSITIONS, CHOSEN)
    await stages.probe(RESPONSE, 0, 8, n=0)
    assert recorder.read == [[3, 4], [3, 4], [3, 4], [3, 4, 8]]


@pytest.mark.parametrize("prompt", [PLAIN, OWN])
async def test_a_policy_may_give_the_teacher_a_context_of_its_own_or_the_students_prompt(prompt):
    recorder = Recorder()
    stages = bound(recorder, prompt)
    for given in (CONTEXT, PLAIN.token_ids):
        await stages.score(RESPONSE, top_k=1, prompt_ids=given)
        await stages.score_at(RESPONSE, POSITIONS, top_k=1, prompt_ids=given)
        await stages.teacher_candidates(RESPONSE, POSITIONS, CHOSEN, prompt_ids=given)
        await stages.teacher_response(prompt_ids=given)
    assert recorder.read == [CONTEXT.tolist()] * 4 + [[3, 4]] * 4


async def test_kept_scores_are_those_of_the_prompt_that_was_read():
    recorder = Recorder()
    await bound(recorder, PLAIN).score(RESPONSE, top_k=2)
    await bound(recorder, OWN).score(RESPONSE, top_k=2)
    await bound(recorder, PLAIN).score(RESPONSE, top_k=2, prompt_ids=CONTEXT)
    await bound(recorder, OWN).score(RESPONSE, top_k=2, prompt_ids=PLAIN.token_ids)
    plain, own, context, plain_again = recorder.keys
    assert plain == [[3, 4], [5, 6, 1], 2, 1.0]  # as it was before there were contexts: files of then still answer
    assert plain == plain_again
    assert (own[0], context[0]) == (OWN.teacher_ids.tolist(), CONTEXT.tolist())


async def test_a_kept_response_is_that_to_the_same_tokens_sampled_in_the_same_way():
    recorder = Recorder()
    stages = bound(recorder, PLAIN)
    await stages.teacher_response()
    await bound(recorder, msgspec.structs.replace(PLAIN, ordinal=9)).teacher_response()  # a later epoch, another seed
    await stages.teacher_response(n=1)
    await stages.teacher_response(prompt_ids=CONTEXT)
    await stages.teacher_response(prefix_ids=RESPONSE[:1])
    await stages.teacher_response(max_tokens=2)
    await stages.teacher_response(stop=(8,))
    first, again, *others = recorder.keys
    assert first == again == [[3, 4], 0, 6, 1.0, [1], None, 1.0]
    assert len({repr(each) for each in (first, *others)}) == 6
    assert len({sampling.seed for _, sampling in recorder.generated}) > 2


async def test_a_context_gives_the_teachers_response_a_seed_of_its_own_and_nothing_else_does():
    recorder = Recorder()
    await bound(recorder, PLAIN).teacher_response()
    await bound(recorder, OWN).teacher_response()
    await bound(recorder, PLAIN).teacher_response(prompt_ids=CONTEXT)
    await bound(recorder, PLAIN).teacher_response(prompt_ids=CONTEXT[1:])
    first, own, *others = [sampling.seed for _, sampling in recorder.generated]
    assert first == own == derive_seed(3, PLAIN.ordinal, "teacher response")
    assert len({first, *others}) == 3


async def test_a_context_that_is_longer_than_the_needs_state_is_refused_before_it_is_sent():
    recorder = Recorder()
    stages = bound(recorder, PLAIN)
    for ask in (
        stages.score(RESPONSE, top_k=1, prompt_ids=np.zeros(7, np.int32)),
        stages.score_at(RESPONSE, POSITIONS, top_k=1, prompt_ids=np.zeros(7, np.int32)),
        stages.teacher_candidates(RESPONSE, POSITIONS, CHOSEN, prompt_ids=np.zeros(7, np.int32)),
        stages.teacher_response(prompt_ids=np.zeros(7, np.int32)),
    ):
        with pytest.raises(
            PermanentError,
            match=r"^a teacher's prompt has 7 tokens, and PolicyNeeds\.teacher_prompt_tokens states 6: write it "
            "shorter, or state more$",
        ):
            await ask
    assert recorder.read == []


async def test_turns_become_a_prompt_by_the_teachers_template_and_a_text_is_a_users():
    turns = []
    stages = bound(Recorder(), PLAIN, render_turns=lambda given, tools: turns.extend(given) or CONTEXT)
    written = ChatTurn(role="assistant", content="2")
    assert stages.teacher_prompt("1+1", written, "1+2") is CONTEXT
    user = [ChatTurn(role="user", content=text) for text in ("1+1", "1+2")]
    assert turns == [user[0], written, user[1]]


class TwoContexts:
    """Scores each of two rollouts behind a context of its own, the second also behind the student's prompt."""

    needs = PolicyNeeds(teacher_top_k=1, samples_per_prompt=2, teacher_prompt_tokens=16, outcomes=False)

    async def supervise(self, prompt, stages):
        samples = []
        for n in range(2):
            rollout = await stages.rollout(n=n)
            if n:
                await stages.score(rollout.token_ids, top_k=0, prompt_ids=prompt.token_ids)
            context = stages.teacher_prompt(f"context {n}")
            scores = await stages.score(rollout.token_ids, top_k=0, prompt_ids=context)
            samples.append(student_sample(prompt, stages, rollout, await stages.verify(rollout.token_ids), scores))
        return samples


def test_a_samples_record_says_what_the_teacher_read_where_that_was_not_the_students_prompt():
    def text(token_ids):
        return " ".join(map(str, token_ids.tolist()))

    run = simulated_run(TwoContexts(), iterations=1, batch_size=2)
    contexts = [text(simulated_turn_ids([f"context {n}"])) for n in range(2)]
    assert [sample.record["teacher_prompt"] for sample in run.samples] == contexts * 2
    own = [msgspec.structs.replace(each, teacher_ids=each.token_ids[::-1]) for each in simulated_prompts(4)]
    run = simulated_run(make_policy(OpdPolicy), prompts=own, iterations=1, batch_size=2)
    for sample, prompt in zip(run.samples, own, strict=False):
        assert sample.record["teacher_prompt"] == text(prompt.teacher_ids)
        assert sample.supervision.prompt_ids.tolist() == prompt.token_ids.tolist()
    run = simulated_run(make_policy(OpdPolicy), iterations=1, batch_size=2)
    assert not any("teacher_prompt" in sample.record for sample in run.samples)
