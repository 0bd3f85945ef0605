"""Says so in one line if a run had nothing to learn from its own outcomes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spot_async.checks.score_rows import MOST_MASKED
from spot_async.telemetry.totals import masked_share

REASONS = (
    "too hard problems, too small a sampling.max_response_tokens, or a verifier that finds no answers; "
    "`spot-async inspect` shows what was written"
)


def missing_signal(rows: Sequence[Mapping[str, float]]) -> str | None:
    """Return that line, from the iterations' metrics.

    None if outcomes taught something, or if the policy asks for none.
    """
    if rows and all(row.get("train/updates") == 0 for row in rows):
        return (
            "No iteration made a step: nothing could be trained on, and the weights are those of the start. "
            "`left_out` in samples.jsonl says why of each sample; `spot-async inspect` shows it."
        )
    masked = masked_share(rows)
    if masked is not None and masked > MOST_MASKED:
        return (
            f"The teacher masked {masked:.1%} of the positions: little or nothing was learned from it. `spot-async "
            "check` says why; use a server that takes and names tokens by id."
        )
    selected, retained = (sum(row.get(f"spot/{name}", 0.0) for row in rows) for name in ("selected", "retained"))
    if selected and not retained:
        return (
            "No probed position was retained, because no candidate was judged to lead to a correct answer: this was "
            f"OPD, at the price of the probes. That comes of {REASONS}."
        )
    shares = [row["grpo/no_signal"] for row in rows if "grpo/no_signal" in row]
    if shares and min(shares) == 1.0:
        return (
            "All responses of each prompt had the same reward: there was no advantage to learn from. That comes of too "
            f"easy or {REASONS}."
        )
    return None
