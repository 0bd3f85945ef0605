"""A chat template that never ends, or takes all memory, ends in one line: it is tried in a process of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spot_async.config import PromptConfig
from spot_async.data.prompts import PromptRenderer
from spot_async.errors import DataError
from spot_async.models.bridges import Bridges
from spot_async.models.template_trial import overdoes
from spot_async.models.vocabulary import Vocabulary
from spot_async.types import Problem

STUDENT = Path(__file__).parents[2] / "examples" / "running_sum" / "student"


def excess(template: str) -> str | None:
    return overdoes(Vocabulary.load(STUDENT).tokenizer, template, {}, [{"role": "user", "content": "1+1"}])


def loops(body: str) -> str:
    count = 3
    return "{% for a in range(99999) %}" * count + body + "{% endfor %}" * count


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 30000000000 }}",
        "{% set ns = namespace(a='x') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
        "{% generation %}{{ [1] * 30000000000 }}{% endgeneration %}",
        loops("a text of some length"),
        pytest.param(loops(""), marks=pytest.mark.long),
    ],
)
def test_a_template_without_bounds_is_found_out(template: str) -> None:
    assert "takes more than" in (excess(template) or "")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.role == 'other' %}{% break %}{% endif %}{{ m.content | tojson }}{% endfor %}",
        "{% generation %}{{ strftime_now('%d') }}{{ raise_exception('no') }}{% endgeneration %}",
        "{{ bad syntax",
        "{{ nothing.of.that.name }}",
    ],
)
def test_other_templates_are_left_to_who_uses_them(template: str) -> None:
    assert excess(template) is None


def test_a_prompt_is_not_rendered_by_such_a_template(tmp_path: Path) -> None:
    shutil.copytree(STUDENT, model := tmp_path / "model")
    (model / "chat_template.jinja").write_text(loops("a text of some length"))
    renderer = PromptRenderer(Vocabulary.load(model), PromptConfig())
    with pytest.raises(DataError, match=r"the chat template takes more than .* for one problem") as caught:
        renderer.token_ids(Problem(id="1", text="1+1", answer="2"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("role", ["tool", "user"])
def test_turns_are_not_rendered_by_one_that_is_so_behind_an_answer(tmp_path: Path, role: str) -> None:
    shutil.copytree(STUDENT, model := tmp_path / "model")
    answered = "{% if messages | length > 2 %}" + loops("a text of some length") + "{% endif %}"
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}" + answered)
    with pytest.raises(DataError, match=r"^environment: the chat template takes more than .* for two turns"):
        Bridges(Vocabulary.load(model), {}, role=role)
