"""What is asked of a teacher with a tokenizer of its own, and what inspect shows of its chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from spot_async.config import SamplingConfig
from spot_async.models.chunks import Reading
from spot_async.run_directory.samples import SampleRecord
from spot_async.stages.services import Services, StagesSettings, TeacherService
from spot_async.stages.stages import Stages
from spot_async.stages.teachers import NOTHING_SCORED
from spot_async.testing.services import capabilities, generation
from spot_async.tools.inspect.view import token_label
from spot_async.types import PolicyNeeds, Problem, Prompt

PROMPT = Prompt(ordinal=0, problem=Problem(id="p", text="", answer="1"), token_ids=np.arange(4, dtype=np.int32))


async def test_a_teacher_is_asked_for_no_more_than_has_room_in_its_context_and_for_nothing_at_all_of_no_text() -> None:
    asked: list[int] = []
    room: list[int | None] = []

    class Own:
        limit = ends = None

        def read(self, response_ids: Any, most_tokens: int | None = None) -> Reading:
            room.append(most_tokens)
            chunks = np.arange(len(response_ids) if response_ids.any() else 0, dtype=np.int32)
            return Reading(*[chunks] * 5, chunks[:0]).within(most_tokens or 0)

        def wider(self, *given: Any) -> None:
            pass

        def scores(self, said: Any, reading: Reading, top_k: int) -> Any:
            return said

    class Teacher:
        async def score(self, request: Any, *, top_k: int) -> Any:
            asked.append(len(request.response_ids))
            return msgspec.structs.replace(NOTHING_SCORED, logprobs=np.zeros(len(request.response_ids), np.float32))

    server: Any = Teacher()
    vocabulary: Any = SimpleNamespace(end_token_ids=(1,))
    own: Any = Own()
    services = Services(
        student=server,
        verifier=server,
        vocabulary=vocabulary,
        teachers={"": TeacherService(server=server, vocabulary=vocabulary, own_tokens=own)},
        capabilities={"teacher": capabilities(9, max_context_tokens=10)},
    )
    stages = Stages(services, StagesSettings(), PolicyNeeds(teacher_top_k=1, asked_top_k=0)).for_prompt(PROMPT)
    await stages.score(np.ones(8, np.int32), top_k=0)
    await stages.score(np.zeros(8, np.int32), top_k=0)
    assert room == [6, 6]
    assert asked == [6]


@pytest.mark.parametrize(("context", "most"), [(100, 8), (10, 6), (7, 4)])
async def test_it_may_write_more_tokens_than_the_student_as_far_as_its_context_allows(context: int, most: int) -> None:
    asked: list[int] = []

    class Own:
        limit = ends = None
        most_for_one = 2
        prefix = stop = staticmethod(lambda ids: ids)
        written = staticmethod(lambda response, is_start: response)

    class Teacher:
        async def generate(self, prompt_ids: Any, sampling: Any, **given: Any) -> Any:
            asked.append(sampling.max_tokens)
            return generation(np.full(sampling.max_tokens, 3), finish_reason="length")

    server: Any = Teacher()
    vocabulary: Any = SimpleNamespace(end_token_ids=(1,))
    own: Any = Own()
    services = Services(
        student=server,
        verifier=server,
        vocabulary=vocabulary,
        teachers={"": TeacherService(server=server, vocabulary=vocabulary, own_tokens=own)},
        capabilities={"teacher": capabilities(9, max_context_tokens=context)},
    )
    settings = StagesSettings(sampling=SamplingConfig(max_response_tokens=4))
    response = await Stages(services, settings, PolicyNeeds(teacher_responses=1)).for_prompt(PROMPT).teacher_response()
    assert asked == [most]
    assert len(response.token_ids) == 4, "and what is too long for the student is cut"


def test_inspect_shows_a_chunks_difference_at_each_of_its_tokens() -> None:
    sample = msgspec.convert(
        {
            "iteration": 1,
            "problem_id": "p",
            "verdict": "correct",
            "response_ids": [5, 6, 7],
            "behavior_logprobs": [-1.0, -1.0, -2.0],
            "teacher_logprobs": [-0.5, -0.25, -2.5],
            "teacher_chunks": [0, 0, 1],
        },
        SampleRecord,
    )
    for position in (0, 1):
        assert "advantage +1.250 of tokens 0 to 1 together" in token_label(sample, position, "x")
    assert token_label(sample, 2, "x").endswith("advantage -0.500")
