"""The example's models, one of them with a softmax padded further, by every method on real servers.

`tests/running/test_padded_softmax.py` has all methods and both sides on the local engine. Here SPOT runs with either
side wider on both kinds of server, and each other method with one side wider on vLLM and the other on SGLang. The
padding is likelier than the tokens (`padded_models.py`). Each kind of server is started once for a width of a model
and used by all runs, which send the student's own first weights to it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import StartServer
from padded_models import padded_model
from parity import Dense, decisions, own, soon
from wider_heads import with_wider_heads

import spot_async
from spot_async.backends.openai.backend import OpenAIBackend
from spot_async.backends.sglang.backend import SglangBackend
from spot_async.backends.vllm.backend import VllmBackend
from spot_async.types import SamplingSettings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "running_sum"
COMMON, PADDED = 48, 64
NATS = 2e-4  # in float32, as in `test_runs.py`
BATCH = 4
SIDES = ("student", "teacher")
# The wide side of each run that is not nightly: it asks for all that padding could bend.
OFTEN = {("vllm", "spot"): "teacher"}
CASES = [
    pytest.param(kind, method, wide, marks=[] if OFTEN.get((kind, method)) == wide else [pytest.mark.nightly])
    for kind, first in (("vllm", 0), ("sglang", 1))
    for number, method in enumerate(("opd", "eopd", "grpo", "kd", "spot"))
    for wide in (SIDES if method == "spot" else [SIDES[(first + number) % 2]])
]
Serve = Callable[[str, str, bool], tuple[Path, Any]]


@pytest.fixture(scope="session")
def padded_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Directories by role, and by whether they are the wider ones.

    vLLM wants wider heads, which change nothing. On a CPU it keeps a packed copy of an output layer that is tied to the
    embedding, and continues with it after an update; so it is untied.
    """
    root, found = tmp_path_factory.mktemp("padded"), {}
    for role in ("student", "teacher"):
        found[role, False] = untied(with_wider_heads(EXAMPLE / role, root / role))
        found[role, True] = padded_model(found[role, False], root / f"{role}-padded", rows=PADDED - COMMON)
    return found


@pytest.fixture(scope="module")
def serve(request: pytest.FixtureRequest, padded_pairs: dict[tuple[str, bool], Path]) -> Iterator[Serve]:
    """`serve(kind, role, wide)`: the model and the backend section of a server, started when first asked for."""
    with ExitStack() as stack:

        @functools.cache
        def url(kind: str, role: str, wide: bool) -> str:
            start: StartServer = request.getfixturevalue(f"start_{kind}")
            longest = {"vllm": "--max-model-len", "sglang": "--context-length"}[kind]
            return stack.enter_context(start(padded_pairs[role, wide], longest, "512")).url

        yield lambda kind, role, wide: (padded_pairs[role, wide], {"kind": kind, "url": url(kind, role, wide)})


@pytest.mark.parametrize(("kind", "method", "wide"), CASES)
def test_a_padded_pair_trains_and_loses_no_prompt(
    kind: str,
    method: str,
    wide: str,
    serve: Serve,
    dense_logprobs: Dense,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    student, student_backend = serve(kind, "student", wide == "student")
    teacher, teacher_backend = serve(kind, "teacher", wide == "teacher")
    judge = "reference" if method == "grpo" else "teacher"  # GRPO has no teacher; its reference is of another width
    config = [
        f"student={json.dumps({'model': str(student), 'backend': student_backend})}",
        f"{judge}={json.dumps({'model': str(teacher), 'backend': teacher_backend})}",
        "sampling.max_response_tokens=40",
        *("training.iterations=2", "training.warmup_iterations=0"),
        *(f"training.batch_size={BATCH}", f"training.mini_batch_size={BATCH}"),
        *("evaluation.samples=1", "evaluation.max_response_tokens=24"),
        f"data.train={first_problems('train', 2 * BATCH, tmp_path)}",
        f"evaluation.problems={first_problems('heldout', 6, tmp_path)}",
        *(["policy.samples=3"] if method == "grpo" else []),
        f"run.directory={tmp_path / 'run'}",
    ]
    outcome = spot_async.run(f"configs/running_sum/{method}.yaml", config)
    assert outcome.prompts == {"trained": 2 * BATCH}
    assert not (tmp_path / "run" / "dead_letters.jsonl").exists()
    samples = rows(tmp_path / "run" / "samples.jsonl")
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert max(max(sample["response_ids"]) for sample in samples) < COMMON
    assert all(row.get("teacher/masked", 0.0) == 0.0 for row in metrics)
    assert all(abs(row.get("train/mismatch_max", 0.0)) < NATS for row in metrics), metrics
    prompts = prompts_of(tmp_path / "run")
    for sample in (each for each in samples if each.get("version") == "0.0"):
        given = [*prompts[sample["problem_id"]], *sample["response_ids"]]
        response = np.array(sample["response_ids"])
        behaviour = decisions(dense_logprobs(student, given), given[: -len(response)], response)
        np.testing.assert_allclose(sample["behavior_logprobs"], own(behaviour, response), rtol=0, atol=NATS)
        if method != "grpo":
            scored = decisions(dense_logprobs(teacher, given), given[: -len(response)], response)
            np.testing.assert_allclose(sample["teacher_logprobs"], own(scored, response), rtol=0, atol=NATS)
        for branch in sample.get("branches", []):
            row = scored[branch["position"], :COMMON]
            best = np.argsort(-row, kind="stable")[: len(branch["candidates"])]
            assert {each["token_id"] for each in branch["candidates"]} == set(best.tolist())
    if method == "spot":
        assert sum(row["spot/selected"] for row in metrics) > 0
    if method == "eopd":
        assert sum(row["eopd/gated"] for row in metrics) > 0


# vLLM's are at temperature 1 whatever is asked.
@pytest.mark.parametrize(("kind", "temperature"), [("vllm", 1.0), ("sglang", 1.0), ("sglang", 0.7)])
async def test_a_servers_masked_tokens_come_with_log_probabilities_of_the_whole_softmax(
    kind: str, temperature: float, serve: Serve, dense_logprobs: Dense, tmp_path: Path
) -> None:
    model, section = serve(kind, "teacher", True)
    backend_class: Any = {"vllm": VllmBackend, "sglang": SglangBackend}[kind]
    prompt = np.array([5, 9, 12, 30, 7, 22, 14], np.int32)
    settings = backend_class.Settings.model_validate(section)
    async with backend_class(settings, role="teacher", model=str(model), run_directory=tmp_path) as backend:
        for seed in range(4):
            sampling = SamplingSettings(
                max_tokens=40, stop_token_ids=(1,), seed=seed, vocab_limit=COMMON, temperature=temperature
            )
            reply = await backend.generate(prompt, sampling, top_k=4, deadline=soon())
            whole = decisions(dense_logprobs(model, [*prompt, *reply.token_ids]), prompt, reply.token_ids)
            whole = whole / temperature
            whole = whole - np.log(np.exp(whole).sum(axis=1, keepdims=True))
            assert reply.token_ids.max() < COMMON
            np.testing.assert_allclose(reply.logprobs, own(whole, reply.token_ids), rtol=0, atol=NATS)
            assert np.exp(whole[:, COMMON:]).sum(axis=1).max() > 0.9  # a missing mask would be noticed
    if kind == "sglang":
        return  # its /v1 names tokens by text, which the example's tokenizer cannot be compared with
    open_settings = OpenAIBackend.Settings.model_validate({"kind": "openai", "url": section["url"]})
    async with OpenAIBackend(open_settings, role="teacher", model=str(model), run_directory=tmp_path) as endpoint:
        sampling = SamplingSettings(max_tokens=40, stop_token_ids=(1,), seed=3, vocab_limit=COMMON)
        assert (await endpoint.generate(prompt, sampling, deadline=soon())).token_ids.max() < COMMON


def untied(directory: Path) -> Path:
    """The same model with an output layer of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(directory)
    return directory


def first_problems(name: str, count: int, folder: Path) -> Path:
    """All of them would be rendered, which takes longer than the training does."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join((EXAMPLE / "data" / path.name).read_text().splitlines(keepends=True)[:count]))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts_of(run: Path) -> dict[str, list[int]]:
    """Rendered prompts by problem, as the run's own configuration makes them."""
    from spot_async.checks.plan import plan_training
    from spot_async.config.loading import load_config

    schedule = plan_training(load_config(run / "config.yaml")).schedule
    return {prompt.problem.id: prompt.token_ids.tolist() for prompt, _ in zip(schedule, range(2 * BATCH), strict=False)}
