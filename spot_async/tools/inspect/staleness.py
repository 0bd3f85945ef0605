"""The part of a report that only asynchronous runs have: how stale samples were, and what publishing did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spot_async.telemetry.bottleneck import PUBLISHES, percent
from spot_async.telemetry.totals import Rows, lag_shares
from spot_async.tools.inspect.plots import Section, lines, present, stacked
from spot_async.tools.pages import svg


def staleness_section(rows: Rows) -> Section:
    """Return plots of how far training, its samples and the served weights are apart; none for a strict run."""
    shares = lag_shares(rows)
    work: dict[str, str] = {phase: f"publish/{phase.replace(' ', '_')}_s" for phase in ("wait for weights", *PUBLISHES)}
    return Section(
        "Staleness",
        present(
            ("Lag of tokens", "Share of all tokens trained on, by the iterations that the weights which sampled them "
             "were behind.",
             svg.row_plot([f"lag {lag}" for lag in shares], [("", [*shares.values()])], format_x=percent)
             if shares else None),
            ("Lag by iteration", "Of the tokens trained on: mean and largest. Never above max_staleness.",
             lines(rows, {"mean": "train/lag_mean", "largest": "train/lag_max"}, from_zero=True)),
            ("Weights trained and served", "By the iterations that made them, as each iteration ends.",
             lines(rows, {"trained": "iteration", "served": "weights/served"}, from_zero=True, smooth=False)
             if any("weights/served" in row for row in rows) else None),
            ("What publishing did", "Seconds of each iteration, beside the trainer. While it waits for weights, it "
             "holds nothing up.",
             stacked(rows, work)),
            ("What old samples are worth", "Effective sample size of the tokens, as a share of their number. 1 is "
             "as good as on-policy.",
             lines(rows, {"effective": "train/effective_sample_share"}, percent, most=1.0)),
            ("What staleness changes", "KL from the weights that sampled to those that train, nats per token: lagging "
             "tokens, and beside them the server's own mismatch.",
             lines(rows, {"staleness": "train/staleness_kl", "server": "train/mismatch_kl"}, from_zero=True)
             if any("train/staleness_kl" in row for row in rows) else None),
        ),
    )  # fmt: skip


def staleness_words(config: Mapping[str, Any], rows: Rows) -> str | None:
    """Return how stale samples could be, and how stale they were; None for a strict run."""
    if not config.get("max_staleness"):
        return None
    shares = lag_shares(rows)
    lags = ", ".join(f"{percent(share)} lag {lag}" for lag, share in shares.items())
    mean = sum(lag * share for lag, share in shares.items())
    return f"at most {config['max_staleness']}" + (f"; of the tokens {lags} (mean {mean:.2f})" if shares else "")
