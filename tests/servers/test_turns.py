"""Students on real servers take turns with an environment that always answers."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from conftest import TinyModels
from test_runs import problems, read_lines, run, write_config
from tiny_models import END_TOKEN

ITERATIONS = 4
__all__ = ["problems"]


@pytest.fixture(scope="module")
def brief(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Models that end a turn after some tokens: random ones hardly ever do."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    model, tokenizer = Qwen3ForCausalLM.from_pretrained(models.student), AutoTokenizer.from_pretrained(models.student)
    model.lm_head.weight.data[tokenizer.convert_tokens_to_ids(END_TOKEN)] *= 3.0
    directory = tmp_path_factory.mktemp("brief") / "student"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return replace(models, student=directory)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_students_turns_are_sampled_behind_exactly_what_is_trained(
    server: str, request: pytest.FixtureRequest, brief: TinyModels, problems: Path, tmp_path: Path
) -> None:
    (tmp_path / "echo.py").write_text(
        "class Echo:\n    def step(self, action):\n        return f'<|im_end|> {len(action)} letters', 1.0, False\n"
    )
    launch = request.getfixturevalue(f"{server}_launch").model_dump()
    if server == "vllm":  # which keeps whole blocks only, of 128 tokens on a CPU: longer than most of these turns
        launch["arguments"] = [*launch["arguments"], "--block-size", "32"]
    started = {"kind": server, "launch": launch}
    config = write_config(tmp_path, brief, problems, started, {"kind": "local"})
    keys = ["environment.object=echo:Echo", "environment.max_turns=3", "policy={kind: opd}", "evaluation=null"]
    keys += ["training.learning_rate=1e-5"]  # so that it does not learn the teacher's long turns
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path))
        run("train", str(config), *keys, f"training.iterations={ITERATIONS}", "sampling.max_response_tokens=400")
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    several = [each for each in samples if len(each["turns"]) > 1]
    assert len(several) > len(samples) / 2
    for each in several:
        reads = [range(start, end) for start, end, who in each["writers"] if who == "environment"]
        assert [read.stop for read in reads] == each["turns"][1:]
        assert all(each["teacher_logprobs"][t] is None for read in reads for t in read)
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    for row in rows:
        # What the trainer reads is what the server read: every sampled token has the same log-probability.
        assert abs(row.get("train/mismatch_max", math.inf)) < 2e-4, row
        assert row["environment/turns"] == fmean(len(s["turns"]) for s in samples if s["iteration"] == row["iteration"])
    # Of a turn's context the server has what it read and wrote in the turns before.
    cached, read = (sum(row[f"traffic/student/{each}_tokens"] for row in rows) for each in ("cached", "prompt"))
    logging.getLogger(__name__).info("%s: %.3f of prompt tokens came from the prefix cache", server, cached / read)
    assert cached > read / 2
