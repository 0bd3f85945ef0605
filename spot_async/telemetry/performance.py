"""Says how well the trainer used its devices, in an iteration or in a run. `trainer/metrics.py` measures it."""

from __future__ import annotations

from collections.abc import Mapping

from spot_async.telemetry.totals import Rows

RATES = ("tokens_per_s_per_rank", "mfu")
PEAK = "max_memory_allocated_gib"


def run_performance(rows: Rows) -> dict[str, float]:
    """Return the performance of a whole run: rates over the time that the trainer was busy, and the highest peak."""
    found = {}
    for name in RATES:
        parts = [(row[f"perf/{name}"], row["train/train_s"])
                 for row in rows if f"perf/{name}" in row and row.get("train/train_s")]  # fmt: skip
        if parts:
            found[name] = sum(rate * train_s for rate, train_s in parts) / sum(train_s for _, train_s in parts)
    peaks = [row[f"perf/{PEAK}"] for row in rows if f"perf/{PEAK}" in row]
    return found | ({PEAK: max(peaks)} if peaks else {})


def performance_words(performance: Mapping[str, float]) -> str:
    """Return a performance in words; empty where nothing was measured. GPUs are told by their memory."""
    if "tokens_per_s_per_rank" not in performance:
        return ""
    memory_gib, mfu = performance.get(PEAK), performance.get("mfu")
    rank = "rank" if memory_gib is None else "GPU"
    parts = [
        f"{performance['tokens_per_s_per_rank']:,.0f} tokens/s a {rank}",
        "" if mfu is None else f"MFU {100 * mfu:.1f} %",
        "" if memory_gib is None else f"peak {memory_gib:.1f} GiB",
    ]
    return ", ".join(filter(None, parts))
