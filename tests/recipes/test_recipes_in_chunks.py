"""Methods that look at the student in training, where a teacher knows chunks of tokens alone: against dense float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from recipes import recipe
from transformers import AutoModelForCausalLM

from spot_async.testing.losses import live_batch, loss_of
from spot_async.testing.services import generation, token_scores
from spot_async.testing.simulation import ScriptedStages, make_policy, simulated_prompts

CHUNKS = ([0, 0, 1, 2, 2, 2, -1], [0, 1, 1, 2, 3, 3])  # -1: in none


@pytest.mark.parametrize("name", ["tip", "demystifying_opd"])
async def test_what_revise_makes_of_pulls_follows_the_chunks(name, student):
    draw, policy = np.random.default_rng(5), make_policy(recipe(name))
    exact = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float64)
    drafts, rows, owns, teachers = [], [], [], []
    for chunks in map(np.array, CHUNKS):
        prompt, ids = next(simulated_prompts()), draw.integers(5, 40, len(chunks))
        logits = exact(torch.tensor([[*prompt.token_ids, *ids]])).logits[0]
        rows.append(logits[len(prompt.token_ids) - 1 : -1].log_softmax(-1))
        owns.append(rows[-1].gather(1, torch.tensor(ids)[:, None])[:, 0])
        even = -draw.exponential(2, chunks.max() + 2)[chunks]
        teachers.append(torch.tensor(even))
        scores = token_scores(even, chunks=chunks.astype(np.int32), valid=chunks >= 0)
        sampled = generation(ids, owns[-1].detach().numpy())
        drafts += await policy.supervise(prompt, ScriptedStages(sampled, scores))
    model = AutoModelForCausalLM.from_pretrained(student)
    found = loss_of(policy.revise(live_batch(drafts, loss_of(drafts, model).live)), model)

    entropies = [-(each.exp() * each).sum(-1).detach() for each in rows]
    known = [torch.tensor(chunks) >= 0 for chunks in CHUNKS]
    least = torch.cat([each[mask] for each, mask in zip(entropies, known, strict=True)]).quantile(0.5)
    losses = []
    for n, chunks in enumerate(CHUNKS):
        advantages = torch.zeros(len(chunks), dtype=torch.float64)
        for chunk in range(max(chunks) + 1):
            places, own = torch.tensor(chunks) == chunk, owns[n].detach()
            total = own[places].sum()
            parts = (teachers[n][places].sum() - total) * own[places] / total
            if name == "demystifying_opd":
                advantages[places] = parts.sign() * parts.abs().log1p()
            else:  # TIP: the unsure half has weight 2, and a chunk the mean of its tokens'
                advantages[places] = parts * 2 * (entropies[n][places] >= least).double().mean()
        np.testing.assert_allclose(found.advantages[n], advantages, rtol=1e-3, atol=1e-5)
        losses.append(-(advantages * (owns[n] - owns[n].detach()).exp()).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    assert found.policy == pytest.approx(loss.item(), rel=1e-4)
    for name, gradient in found.gradient.items():
        np.testing.assert_allclose(gradient, exact.get_parameter(name).grad, rtol=2e-3, atol=1e-5, err_msg=name)
