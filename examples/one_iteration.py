"""One iteration of SPOT, from prompts to a gradient step, in one file that you can change.

Run it from the root of a checkout: `python examples/one_iteration.py`. It takes about ten seconds on two cores.
A training run does the same on more prompts, overlaps it with the trainer's ranks, publishes the new weights, and
survives failures. Here the student is stepped by plain torch, so that every line of the loss can be seen.
Section and equation numbers are the paper's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spot_async import (
    Problem,
    Prompt,
    PromptConfig,
    PromptRenderer,
    Sample,
    SamplingConfig,
    Services,
    StagesSettings,
    Supervision,
    TeacherService,
    gather,
    read_model,
    stages_for,
)
from spot_async.backends.local import LocalBackend
from spot_async.policies.spot import SpotPolicy
from spot_async.trainer.divergence import soft_target_loss
from spot_async.trainer.loss import clipped_policy_loss
from spot_async.verification import BoxedMatch

EXAMPLE = Path(__file__).parent / "running_sum"
PROMPTS = 16
MAX_RESPONSE_TOKENS = 160
CLIP = 0.2
LEARNING_RATE = 2e-4


def read_prompts(renderer: PromptRenderer, count: int) -> list[Prompt]:
    """Read the first problems of the training file and render each with the model's chat template."""
    lines = (EXAMPLE / "data" / "train.jsonl").read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    problems = [Problem(id=row["id"], text=row["problem"], answer=row["answer"]) for row in rows]
    return [renderer.prompt(problem, ordinal=ordinal) for ordinal, problem in enumerate(problems)]


async def supervise_all(policy: SpotPolicy, prompts: Sequence[Prompt], run_directory: Path) -> list[Sample]:
    """Roll out, score, probe and calibrate all prompts at once, on two inference servers of our own.

    `policy.supervise` is the inner loop of Algorithm 1. To change the method, derive from `SpotPolicy` or write a
    coroutine of your own over the same stages.
    """
    settings = LocalBackend.Settings()
    student = LocalBackend(settings, role="student", model=str(EXAMPLE / "student"), run_directory=run_directory)
    teacher = LocalBackend(settings, role="teacher", model=str(EXAMPLE / "teacher"), run_directory=run_directory)
    async with student, teacher, BoxedMatch(BoxedMatch.Settings()) as verifier:
        stages = stages_for(
            policy,
            Services(
                student=student,
                teachers={"": TeacherService(server=teacher)},
                verifier=verifier,
                vocabulary=read_model("student", str(EXAMPLE / "student")).vocabulary,
            ),
            StagesSettings(sampling=SamplingConfig(max_response_tokens=MAX_RESPONSE_TOKENS)),
        )
        groups = await gather(policy.supervise(prompt, stages.for_prompt(prompt)) for prompt in prompts)
    return [sample for group in groups for sample in group]


def response_logprobs(student: torch.nn.Module, supervision: Supervision) -> Tensor:
    """Return the student's log-probabilities at every response position: (T, V), with a gradient."""
    ids = torch.tensor(np.concatenate([supervision.prompt_ids, supervision.response_ids]), dtype=torch.int64)
    first_row = len(supervision.prompt_ids) - 1  # the row after reading the prompt decides the first response token
    logits: Tensor = student(ids[None, :-1]).logits[0, first_row:]  # (T, V)
    return logits.log_softmax(dim=-1)


def trajectory_loss(student: torch.nn.Module, supervision: Supervision) -> tuple[Tensor, Tensor]:
    """Return one trajectory's two terms: the mean policy loss over tokens, and beta times the branch loss.

    The first is on-policy distillation (equation 1, in its sampled form): the advantage of a token is the teacher's
    log-probability minus the behaviour policy's. The second pulls the student towards the outcome-calibrated
    targets at the probed positions (section 3.3). Its weights hold beta / |B+| already.
    """
    logprobs = response_logprobs(student, supervision)
    sampled = torch.tensor(supervision.response_ids, dtype=torch.int64)
    behavior = torch.tensor(supervision.behavior_logprobs)
    (teacher,) = supervision.pulls
    advantages = torch.tensor(teacher.logprobs) - behavior  # (T,)
    own = logprobs.gather(-1, sampled[:, None])[:, 0]
    policy_loss = clipped_policy_loss(own, behavior, advantages, clip=CLIP).mean()

    if not supervision.soft_targets:  # B+ is empty: exactly OPD
        return policy_loss, torch.zeros(())
    (targets,) = supervision.soft_targets
    rows = logprobs[torch.tensor(targets.positions, dtype=torch.int64)]  # (N, V)
    candidates = rows.gather(-1, torch.tensor(targets.token_ids, dtype=torch.int64))  # (N, k)
    branch = soft_target_loss(candidates, torch.tensor(targets.probabilities))  # (N,)
    return policy_loss, (torch.tensor(targets.weights) * branch).sum()


def main(run_directory: Path) -> None:
    """Make one batch of supervision, print what was probed, and take one gradient step on it."""
    teacher_files = read_model("teacher", str(EXAMPLE / "teacher"))
    policy = SpotPolicy(SpotPolicy.Settings(positions=2, gamma=1.0, beta=0.1), teacher_files.policy_context)
    prompts = read_prompts(PromptRenderer(teacher_files.vocabulary, PromptConfig(instruction="")), PROMPTS)
    (run_directory / "logs").mkdir(parents=True, exist_ok=True)
    samples = asyncio.run(supervise_all(policy, prompts, run_directory))

    for sample in samples:
        for branch in sample.record["branches"]:
            tried = ", ".join(f"{c['token']} {c['value']} -> {c['target']}" for c in branch["candidates"])
            print(f"{sample.record['problem_id']} at {branch['position']}: {tried}")

    student = AutoModelForCausalLM.from_pretrained(EXAMPLE / "student", dtype=torch.float32, trust_remote_code=False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    trained = [sample.supervision for sample in samples if sample.supervision is not None]
    terms = [trajectory_loss(student, each) for each in trained]
    policy_loss = torch.stack([term for term, _ in terms]).mean()
    branch_loss = torch.stack([term for _, term in terms]).mean()
    (policy_loss + branch_loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    print(f"{len(trained)} trajectories: policy {policy_loss:.4f}, branch {branch_loss:.4f}, gradient norm {norm:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/one_iteration"))
