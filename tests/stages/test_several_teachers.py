"""A run's several teachers, each asked by its name: at stages, with end tokens and a cache of its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from only_teacher import only
from recorder import Recorder
from several_teachers import AsksAll

from spot_async.base.tasks import root_cause
from spot_async.errors import ContractError, PluginError
from spot_async.spending.score_cache import ScoreCache
from spot_async.spending.teacher_cache import KeptScores
from spot_async.stages.services import Services, StagesSettings, TeacherService, stage_server
from spot_async.stages.stages import Stages
from spot_async.testing.services import VOCAB_SIZE, capabilities
from spot_async.testing.simulation import make_policy, policy_context, simulated_prompts, simulated_run
from spot_async.types import PolicyNeeds

RESPONSE = np.array([5, 6, 1], np.int32)
NEEDS = PolicyNeeds(teachers=("math", "code"), teacher_top_k=3, teacher_responses=1, teacher_candidates=True)


def ending(*ends):
    return SimpleNamespace(end_token_ids=ends, decode=lambda ids: str(ids.tolist()))


def bound(math, code, **services):
    """The stages of one prompt over a student that ends with 1, and teachers that end with 2 and with 8."""
    teachers = {
        "math": TeacherService(server=math, vocabulary=ending(2), kept_scores=services.pop("kept", None)),
        "code": TeacherService(server=code, vocabulary=ending(8), kept_scores=services.pop("kept_of_code", None)),
    }
    services = Services(student=None, verifier=None, vocabulary=ending(1), teachers=teachers, **services)
    return Stages(services, StagesSettings(max_prompts=1), NEEDS).for_prompt(next(simulated_prompts()))


async def test_each_is_asked_by_its_name_and_ends_responses_as_it_does_itself():
    math, code = Recorder(), Recorder(says=(9, 8))
    stages = bound(math, code)
    of_math = await stages.score(RESPONSE, top_k=3, teacher="math")
    of_code = await stages.score(RESPONSE, top_k=3, teacher="code")
    assert (math.scored, code.scored) == ([[5, 6, 2]], [[5, 6, 8]])
    assert (of_math.topk_ids[0].tolist(), of_code.topk_ids[0].tolist()) == ([6, 1, 2], [6, 2, 8])
    written = await stages.teacher_response(teacher="code")
    assert written.token_ids.tolist() == [9, 1]  # 8 is how it ends
    assert set(code.generated[0][1].stop_token_ids) == {1, 2, 8}  # a student may end as any of its teachers does


async def test_what_they_write_is_sampled_with_seeds_of_their_own():
    math, code = Recorder(), Recorder()
    stages = bound(math, code)
    await stages.teacher_response(teacher="math")
    await stages.teacher_response(teacher="code")
    assert math.generated[0][1].seed != code.generated[0][1].seed


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("", "the policy names no teacher, and the run has math and code: say which, by `teacher=`"),
        ("physics", "the policy asks teacher 'physics', and the run has only math and code"),
    ],
)
async def test_a_name_that_nobody_has_is_refused_in_one_line(name, line):
    with pytest.raises(ContractError, match=line):
        await bound(Recorder(), Recorder()).score(RESPONSE, top_k=1, teacher=name)


def test_a_policy_that_names_a_teacher_where_there_is_one_is_told_so():
    policy = make_policy(AsksAll, policy_context(teachers=("math",)))
    with pytest.raises(ExceptionGroup) as failed:
        simulated_run(policy, iterations=1, teachers=only())
    assert isinstance(root_cause(failed.value), PluginError)
    assert "asks teacher 'math', and the run has one without a name" in str(root_cause(failed.value))


async def test_answers_are_kept_for_each_by_itself(tmp_path):
    async with ScoreCache(tmp_path / "cache") as cache:
        for _ in range(2):
            math, code = Recorder(), Recorder()
            stages = bound(math, code, kept=KeptScores(cache, b"math"), kept_of_code=KeptScores(cache, b"code"))
            await stages.score(RESPONSE, top_k=3, teacher="math")
            await stages.score(RESPONSE, top_k=3, teacher="code")
        assert (cache.counters.hits, cache.counters.misses) == (2, 2)
        assert math.scored == code.scored == []


def test_what_they_offer_together_is_what_each_offers():
    offered = {
        "teachers.math": capabilities(VOCAB_SIZE, max_top_k=20),
        "teachers.code": capabilities(VOCAB_SIZE, max_top_k=8, exact_entropy=False),
    }
    together = bound(Recorder(), Recorder(), capabilities=offered).teacher
    assert (together.max_top_k, together.exact_entropy) == (8, False)


def test_a_whole_run_pulls_towards_both():
    run = simulated_run(make_policy(AsksAll, policy_context(teachers=("math", "code"))), iterations=2, batch_size=4)
    asked = {stage.name: stage.counters.completed for stage in run.stages.all if stage.counters.completed}
    assert asked == {"rollout": 8, "score.math": 8, "score.code": 8, "verify": 8}
    for supervision in run.trained:
        one, other = (each.logprobs for each in supervision.pulls)
        assert not np.array_equal(one, other)


def test_every_stage_of_a_run_has_servers():
    run = simulated_run(make_policy(AsksAll, policy_context(teachers=("math", "code"))), iterations=1, batch_size=2)
    servers = {stage.name: stage_server(stage.name) for stage in run.stages.all}
    assert servers["score.math"] == "teachers.math"
    assert None not in servers.values()
