"""What is asked of a teacher with a tokenizer of its own, and what inspect shows of its chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from only_teacher import only
from recorder import Recorder
from tiny_tokenizers import KINDS, PAIRS, response

from spot_async.config import SamplingConfig
from spot_async.replicas.leasing import Lease, LeaseRequest, OneService
from spot_async.run_directory.samples import SampleRecord
from spot_async.stages.services import Services, StagesSettings
from spot_async.stages.stages import BoundStages, Stages
from spot_async.testing.services import capabilities
from spot_async.tools.inspect.view import token_label
from spot_async.types import PolicyNeeds, Problem, Prompt

PROMPT = Prompt(ordinal=0, problem=Problem(id="p", text="", answer="1"), token_ids=np.arange(4, dtype=np.int32))


class Counting(OneService[Any]):
    """Notes what each request may take of a limit of tokens."""

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.counted: list[int] = []

    async def lease(self, request: LeaseRequest) -> Lease[Any]:
        self.counted.append(request.tokens)
        return await super().lease(request)


def asking(teacher: Any, pair: Any, context: int) -> BoundStages:
    vocabulary: Any = SimpleNamespace(end_token_ids=(KINDS["bytes"].eos_token_id,))
    services = Services(
        student=teacher,
        verifier=teacher,
        vocabulary=vocabulary,
        teachers=only(teacher, vocabulary=vocabulary, own_tokens=pair),
        capabilities={"teacher": capabilities(9, max_context_tokens=context)},
    )
    needs = PolicyNeeds(teacher_top_k=1, asked_top_k=0, teacher_responses=1)
    settings = StagesSettings(sampling=SamplingConfig(max_response_tokens=4))
    return Stages(services, settings, needs).for_prompt(PROMPT)


async def test_it_is_asked_for_whole_chunks_that_have_room_in_its_context_and_for_nothing_of_no_text() -> None:
    teacher = Recorder()
    stages = asking(teacher, PAIRS["words", "bytes"], context=10)
    for written in (response("words", "sum the theorem"), np.full(8, len(KINDS["words"]), np.int32)):
        await stages.score(written, top_k=0)
    assert teacher.scored == [response("bytes", "sum", ends=False).tolist()]


@pytest.mark.parametrize(("student", "teacher"), [("words", "bytes"), ("bytes", "words")])
async def test_limits_of_tokens_count_those_that_the_teacher_reads(student: str, teacher: str) -> None:
    asked = Counting(Recorder())
    await asking(asked, PAIRS[student, teacher], context=99).score(response(student, "the sum is"), top_k=0)
    assert asked.counted == [len(PROMPT.token_ids) + len(response(teacher, "the sum is"))]


@pytest.mark.parametrize(("context", "most"), [(100, 8), (10, 6), (7, 4)])
async def test_it_may_write_more_tokens_than_the_student_as_far_as_its_context_allows(context: int, most: int) -> None:
    teacher = Recorder(says=[65] * most)
    written = await asking(teacher, PAIRS["bytes", "bytes"], context).teacher_response()
    assert [sampling.max_tokens for _, sampling in teacher.generated] == [most]
    assert len(written.token_ids) == 4, "and what is too long for the student is cut"


def test_inspect_shows_a_chunks_difference_at_each_of_its_tokens() -> None:
    said, own = [-0.5, -0.25, -2.5], [-1.0, -1.0, -2.0]
    sample = SampleRecord(
        iteration=1, response_ids=[5, 6, 7], behavior_logprobs=own, teacher_logprobs=said, teacher_chunks=[0, 0, 1]
    )
    for position in (0, 1):
        assert "advantage +1.250 of tokens 0 to 1 together" in token_label(sample, position, "x")
    assert token_label(sample, 2, "x").endswith("advantage -0.500")
