"""Computes a forecast from what was measured: figures with errors, and the same with other keys. Pure, no server.

`values` derives what is estimated at a position, and `estimates` the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from spot_async.spending.account import FREE
from spot_async.spending.prices import PER_MILLION, Prices
from spot_async.tools.forecast import values
from spot_async.tools.forecast.estimates import (
    RULES,
    Estimate,
    Positions,
    Sums,
    best,
    decision_sums,
    estimate,
    limit,
    method_sums,
    place_sums,
    positions_of,
    ratio,
    rollout_sums,
    value_sums,
)
from spot_async.tools.forecast.measurement import MeasuredPrompt, PolicyKeys
from spot_async.types import Float64Array, Int64Array

GAMMAS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the plot of gains
SHARES = frozenset(  # figures that lie between 0 and 1
    ("student_accuracy", "student_pass", "teacher_accuracy", "mixed_groups", "value_of_student", "value", "kept_share",
     "reach", "capped_share", "agreed_share", "answer_share")
)  # fmt: skip
PAPER_WEIGHT = 35.0  # beta T / M in the paper's setting, if its responses have 700 tokens


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates of one rank: their mean share of a model's probability, and their mean value."""

    share: float
    value: Estimate | None


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """The problems of one tier."""

    tier: str
    prompts: int
    student_accuracy: Estimate | None
    value_variance: Estimate | None
    kept_share: Estimate | None
    gain: Estimate | None
    settled_gain: Estimate | None


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """The selected positions at which the student had sampled one token."""

    token: str
    positions: int
    kept_share: float


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a run with other keys could expect. Files of earlier versions have less in some rows."""

    changes: dict[str, float] = {}  # by key of `policy`; empty for the configuration as it is
    gain: Estimate | None
    kept_share: Estimate | None = None
    settled_gain: Estimate | None = None
    probes_per_prompt: int = 0


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """All that a forecast says, but for the verdict."""

    keys: PolicyKeys
    prompts: int
    rollouts: int  # for each prompt
    probes: int  # for each candidate
    positions: int  # probed in all
    without_evidence: int  # of these, positions with a candidate that has too few verdicts
    figures: dict[str, Estimate | None]
    gain_limit: float | None = None  # what no gamma and no number of probes gains more than, with 95 % confidence
    by_teacher_rank: list[RankRow]
    by_student_rank: list[RankRow]
    by_tier: list[TierRow]  # empty where problems have no tiers
    by_gamma: list[KeyRow]
    by_keys: list[KeyRow]
    never_correct: int  # positions at which no probe was correct
    always_correct: int  # positions at which every probe was
    tokens: list[TokenRow]  # most frequent first


def make_forecast(
    measured: Sequence[MeasuredPrompt], keys: PolicyKeys, *, rollouts: int, probes: int, prices: Prices = FREE
) -> Forecast:
    """Return the forecast of a run with these keys.

    `rollouts` and `probes` are how many were asked for. `prices` are those of the student's servers.
    """
    positions = positions_of(measured, keys)
    sums = rollout_sums(measured) | method_sums(measured) | place_sums(measured, keys)
    sums |= value_sums(positions) | decision_sums(positions, keys)
    of_all = [position for prompt in measured for position in prompt.positions]
    shares = values.shares(positions.correct, positions.judged)
    return Forecast(
        keys=keys,
        prompts=len(measured),
        rollouts=rollouts,
        probes=probes,
        positions=len(of_all),
        without_evidence=len(of_all) - len(positions.owner),
        figures={
            name: estimate(sums, figure, least=0.0, most=1.0) if name in SHARES else estimate(sums, figure)
            for name, figure in figures_of(keys, probes, prices).items()
        },
        gain_limit=limit(sums["most"], sums["positions"]),
        by_teacher_rank=rank_rows(positions, positions.prior, np.arange(positions.prior.shape[-1])),
        by_student_rank=student_rank_rows(positions),
        by_tier=tier_rows(measured, keys),
        by_gamma=[
            key_row(measured, keys, {"gamma": gamma})
            for gamma in sorted({*GAMMAS, *([keys.gamma] if keys.gamma else [])})
        ],
        by_keys=[key_row(measured, keys, changes) for changes in ({}, *changes_to_try(measured, keys))],
        never_correct=int((positions.correct == 0).all(axis=-1).sum()),
        always_correct=int((shares == 1.0).all(axis=-1).sum()),
        tokens=token_rows(measured, keys),
    )


def figures_of(keys: PolicyKeys, probes: int, prices: Prices) -> dict[str, Callable[[Sums], Float64Array]]:
    """Return how each figure follows from sums. Names are those of `Forecast.figures`."""

    def money(sums: Sums) -> Float64Array:
        tokens = prices.prompt * sums["probe_prompt_tokens"] + prices.completion * sums["probe_tokens"]
        every = prices.request * sums["probe_requests"] + PER_MILLION * tokens
        return np.asarray(every / sums["prompts"] * keys.probes / probes)

    def of_training(name: str) -> Callable[[Sums], Float64Array]:
        return lambda sums: np.asarray(sums[name] / sums["prompts"] * keys.probes / probes)

    return {
        "opd_gain": ratio("opd", "contrasted"),
        "reward_gain": ratio("reward", "contrasted"),
        "opd_reward_gain": lambda sums: np.asarray((sums["opd"] + sums["reward"]) / sums["contrasted"]),
        "tilt_gain": partial(tilt_gain, keys),
        "capped_share": ratio("capped", "scored_tokens"),
        "student_accuracy": ratio("correct", "judged"),
        "student_pass": ratio("solved", "groups"),
        "teacher_accuracy": ratio("taught_correct", "taught"),
        "headroom": ratio("headroom", "both"),
        "mixed_groups": ratio("mixed", "groups"),
        "response_tokens": ratio("rollout_tokens", "rollouts"),
        "selected": ratio("selected", "prompts"),
        "value_of_student": ratio("value_of_student", "compared"),
        "value": ratio("value", "positions"),
        "value_variance": ratio("variance", "positions"),
        "kept_share": ratio("kept", "positions"),
        "gain": ratio("gain", "positions"),
        "branch_weight": partial(branch_weight, keys),
        "reach": partial(reach, keys),
        "settled_gain": partial(settled_gain, keys),
        "probe_requests": of_training("probe_requests"),
        "probe_tokens": of_training("probe_tokens"),
        "probe_share": lambda sums: np.asarray(
            sums["probe_tokens"] * keys.probes / probes / sums["first_rollout_tokens"]
        ),
        "probe_money": money,
        **place_figures(),
    }


def place_figures() -> dict[str, Callable[[Sums], Float64Array]]:
    """Return the means of Var_p(V) where rules would probe, less that of the score, and where all of it lies."""

    def over_score(rule: str) -> Callable[[Sums], Float64Array]:
        return lambda sums: means[rule](sums) - means["score"](sums)

    means = {rule: ratio(rule, f"{rule}_positions") for rule in (*RULES, "random", "oracle")}
    return {
        **{f"at_{rule}": mean for rule, mean in means.items()},
        **{f"over_{rule}": over_score(rule) for rule in means},
        "agreed_share": ratio("agreed", "random"),
        "answer_share": ratio("answer", "random"),
    }


def tilt_gain(keys: PolicyKeys, sums: Sums) -> Float64Array:
    """Return gamma Var_p(V) of all selected positions of a response together."""
    selected = np.minimum(keys.positions, sums["selected"] / sums["prompts"])
    return np.asarray(keys.gamma * sums["variance"] / sums["positions"] * selected)


def branch_weight(keys: PolicyKeys, sums: Sums) -> Float64Array:
    """Return beta T / M."""
    return np.asarray(keys.beta * sums["rollout_tokens"] / sums["rollouts"] / keys.positions)


def reach(keys: PolicyKeys, sums: Sums) -> Float64Array:
    """Return w / (1 + w) of w = beta T / M: how much of the way from prior to target the two losses settle at.

    OPD's loss is a mean over T tokens and pulls a decision to the prior p. The branch loss has the weight beta / M and
    pulls to the target. Near the prior both have the same curvature, the Fisher matrix F of the student:

        1/T 1/2 (pi - p)' F (pi - p)  +  beta/M 1/2 (pi - target)' F (pi - target)

    This is smallest at `pi = (p + w target) / (1 + w)`. The values count as fixed, the tilt as small, and all M
    positions as kept: where B+ keeps few, each of those weighs more, and the figure is too small.
    """
    weight = branch_weight(keys, sums)
    return np.asarray(weight / (1.0 + weight))


def settled_gain(keys: PolicyKeys, sums: Sums) -> Float64Array:
    """Return the gain a decision where OPD's loss and the branch loss settle."""
    return np.asarray(reach(keys, sums) * sums["gain"] / sums["positions"])


def rank_rows(positions: Positions, shares: Float64Array, order: Int64Array) -> list[RankRow]:
    """Return a row for each rank. `order` (k,) or (P, k) has the candidates of ranks 1, 2, ..."""
    if not len(positions.owner):
        return []
    order = np.broadcast_to(order, shares.shape)
    ranked = np.take_along_axis(values.shares(positions.correct, positions.judged), order, axis=-1)
    of_rank = np.take_along_axis(shares, order, axis=-1)
    count = positions.per_prompt(np.ones(len(ranked)))
    return [
        RankRow(
            share=float(of_rank[:, rank].mean()),
            value=estimate(
                {"value": positions.per_prompt(ranked[:, rank]), "count": count},
                ratio("value", "count"),
                least=0.0,
                most=1.0,
            ),
        )
        for rank in range(ranked.shape[-1])
    ]


def student_rank_rows(positions: Positions) -> list[RankRow]:
    """Return a row for each rank among the candidates by the student's probability, where that is known."""
    some = positions.where(positions.student_is_known)
    return rank_rows(some, some.student_shares, np.argsort(-some.student_shares, axis=-1, kind="stable"))


def tier_rows(measured: Sequence[MeasuredPrompt], keys: PolicyKeys) -> list[TierRow]:
    """Return the main figures of each tier, in alphabetical order."""
    rows = []
    for tier in sorted({prompt.tier for prompt in measured if prompt.tier is not None}):
        prompts = [prompt for prompt in measured if prompt.tier == tier]
        positions = positions_of(prompts, keys)
        variance = values.value_variance(positions.prior, positions.correct, positions.judged)
        sums = rollout_sums(prompts) | decision_sums(positions, keys) | {"variance": positions.per_prompt(variance)}
        rows.append(
            TierRow(
                tier=tier,
                prompts=len(prompts),
                student_accuracy=estimate(sums, ratio("correct", "judged"), least=0.0, most=1.0),
                value_variance=estimate(sums, ratio("variance", "positions")),
                kept_share=estimate(sums, ratio("kept", "positions"), least=0.0, most=1.0),
                gain=estimate(sums, ratio("gain", "positions")),
                settled_gain=estimate(sums, partial(settled_gain, keys)),
            )
        )
    return rows


def key_row(measured: Sequence[MeasuredPrompt], keys: PolicyKeys, changes: Mapping[str, float]) -> KeyRow:
    """Return what other keys would bring."""
    other = msgspec.structs.replace(keys, **changes)
    sums = rollout_sums(measured) | decision_sums(positions_of(measured, other), other)
    return KeyRow(
        changes=dict(changes),
        gain=estimate(sums, ratio("gain", "positions")),
        kept_share=estimate(sums, ratio("kept", "positions")),
        settled_gain=estimate(sums, partial(settled_gain, other)),
        probes_per_prompt=other.probes_per_prompt,
    )


def changes_to_try(measured: Sequence[MeasuredPrompt], keys: PolicyKeys) -> list[Mapping[str, float]]:
    """Return changes of keys, by their names in `policy`: each by itself, and gamma and beta together."""
    most_probes = min(
        (each.judged for prompt in measured for position in prompt.positions for each in position.candidates), default=0
    )
    tokens = [length for prompt in measured for length in prompt.rollout_tokens]
    # With this beta, beta T / M is as in the paper's setting.
    beta = float(f"{PAPER_WEIGHT * keys.positions * len(tokens) / sum(tokens):.2g}") if tokens else keys.beta
    is_scored = any("score" in position.score_parts for prompt in measured for position in prompt.positions)
    gammas = [{"gamma": gamma} for gamma in (1.0, 2.0, 4.0, 8.0) if gamma > keys.gamma]
    betas = [{"beta": beta}] if beta > keys.beta else []
    return [
        *gammas,
        *betas,
        *({**gamma, **each} for gamma in gammas for each in betas),
        *({"probes": probes} for probes in (2, 4) if keys.probes < probes < most_probes),
        *({"probe_top_k": k} for k in (2,) if k < keys.probe_top_k),
        *({"positions": count} for count in (1,) if count < keys.positions and is_scored),
    ]


def token_rows(measured: Sequence[MeasuredPrompt], keys: PolicyKeys, most: int = 14) -> list[TokenRow]:
    """Return what was found at the tokens that were selected most often."""
    by_token: dict[str, list[MeasuredPrompt]] = {}
    for prompt in measured:
        for position in best(prompt.positions, keys):
            alone = msgspec.structs.replace(prompt, positions=[position])
            by_token.setdefault(position.sampled, []).append(alone)
    rows = []
    for token, prompts in sorted(by_token.items(), key=lambda each: -len(each[1]))[:most]:
        found = positions_of(prompts, keys)
        if not len(found.owner):
            continue
        kept = values.kept(found.correct, found.judged, keys.probes)
        rows.append(TokenRow(token=token, positions=len(found.owner), kept_share=float(kept.mean())))
    return rows
