"""`spot-async check` on real servers: what it finds is what is known of them, and an unsafe run is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import StartServer
from safetensors.numpy import load_file, save_file

from spot_async.checks.diagnosis import Diagnosis
from spot_async.checks.plan import plan_training
from spot_async.config import Config
from spot_async.config.loading import config_from, load_config
from spot_async.tools.check.servers import examine

RUNNING_SUM = Path(__file__).parents[2] / "examples" / "running_sum"
BOTH = {"weight_update": True, "weight_transport": "disk", "vocab_as_students": True}
KNOWN: dict[str, dict[str, Any]] = {
    "vllm": BOTH | {"score_temperature_probed": "one", "generation_temperature_probed": "one", "seeds_probed": True},
    "sglang": BOTH | {"score_temperature_probed": "one", "generation_temperature_probed": "request"},
}


def diagnosis_of(config: Config, directory: Path) -> Diagnosis:
    found: list[Diagnosis] = []
    asyncio.run(examine(config, plan_training(config), directory, found.append))
    return found[0]


def examined(tmp_path: Path, models: Any, student: dict[str, str], *overrides: str) -> Diagnosis:
    """A run with this student and a local teacher."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text("\n".join(json.dumps({"problem": f"one half of {i}", "answer": "1"}) for i in range(16)))
    tree = {
        "student": {"model": str(models.student), "backend": student},
        "teacher": {"model": str(models.teacher)},
        "data": {"train": str(problems)},
        "policy": {"kind": "opd"},
        "sampling": {"max_prompt_tokens": 128, "max_response_tokens": 64},
        "training": {"iterations": 1, "batch_size": 8, "mini_batch_size": 8},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "config.yaml", overrides)
    return diagnosis_of(config, tmp_path)


@pytest.mark.parametrize("kind", KNOWN)
def test_what_is_found_of_a_real_server_is_what_is_known_of_it(
    kind: str, models: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue(f"{kind}_student")
    found = examined(tmp_path, models, {"kind": kind, "url": server.url})
    facts = found.roles["student"].as_tree()
    assert found.refusals == []
    assert {name: facts[name] for name in KNOWN[kind]} == KNOWN[kind]
    assert facts["server"].startswith(kind)
    assert facts["noise_together_nats"] < 1e-4
    assert facts["disagreement_nats"] < 1e-4
    assert 0 < facts["round_trip_s"] < 5
    assert facts["version"] is None  # until the run's first weights are sent
    if facts["score_temperature_probed"] == "one" == facts["generation_temperature_probed"]:
        unsafe = examined(tmp_path, models, {"kind": kind, "url": server.url}, "sampling.temperature=0.7")
        assert any("sampling.temperature=0.7" in line for line in unsafe.refusals)


@pytest.mark.nightly
def test_a_wrong_context_a_wrong_template_and_a_uniform_teacher_are_found(
    start_sglang: StartServer, tmp_path: Path
) -> None:
    """With models that were trained, whose heads are too narrow for vLLM on a CPU."""
    length = ("--context-length", "512")
    uniform = tmp_path / "uniform"
    shutil.copytree(RUNNING_SUM / "teacher", uniform)
    weights = load_file(uniform / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] * 0}, uniform / "model.safetensors")
    texts = [f"a{start}b+{start % 9 + 1}c-2d+{start % 7 + 1}" for start in range(10, 34)]
    rows = [{"problem": one, "answer": "1", "solution": other} for one, other in zip(texts, texts[::-1], strict=True)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "no_role.jinja").write_text("{{ '<|user|>' + messages[0].content }}")

    def found(url: str, **own: Any) -> Diagnosis:
        tree = {
            "student": {"model": str(RUNNING_SUM / "student")},
            "teacher": {"model": str(RUNNING_SUM / "teacher"), "backend": {"kind": "sglang", "url": url}},
            "data": {"train": str(tmp_path / "problems.jsonl")},
            "prompt": {"instruction": "", "teacher": {"max_tokens": 64, **own}},
            "policy": {"kind": "opd"},
            "sampling": {"max_prompt_tokens": 64, "max_response_tokens": 160},
            "training": {"iterations": 1, "batch_size": 8, "mini_batch_size": 8},
        }
        config = config_from(tree)
        return diagnosis_of(config, tmp_path)

    with start_sglang(RUNNING_SUM / "teacher", *length) as server:
        for own, begins in (
            ({}, []),
            ({"text": "{solution}"}, ["prompt.teacher: tokens after the first"]),  # another problem's
            (
                {"template": str(tmp_path / "no_role.jinja")},
                ["prompt.teacher: behind the user's", "prompt.teacher: the first token"],
            ),
        ):
            said = found(server.url, **own)
            assert said.refusals == []
            warnings = [line for line in said.warnings if line.startswith("prompt.teacher")]
            assert len(warnings) == len(begins), warnings
            assert all(line.startswith(begin) for line, begin in zip(warnings, begins, strict=True))
    with start_sglang(uniform, *length) as server:
        assert any("its distributions are uniform" in line for line in found(server.url).refusals)
