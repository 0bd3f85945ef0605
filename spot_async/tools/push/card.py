"""Writes a student's model card from the files of its run. Pure text: nothing is uploaded here.

A card names models of the hub by their ids, and everything else by its last name: paths of a machine are left out. It
states no licence, which only its owner can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from spot_async.base.text import visible, with_error
from spot_async.config import as_list
from spot_async.models.hub import NAME, HubName
from spot_async.run_directory.reading import RunFiles

METHODS = {
    "spot": "SPOT (on-policy distillation with sparse probing and outcome calibration)",
    "opd": "OPD (on-policy distillation)",
    "eopd": "EOPD (on-policy distillation with a forward KL where the teacher is uncertain)",
    "grpo": "GRPO (reinforcement learning from verified outcomes)",
    "kd": "KD (distillation on the teacher's responses)",
}
ON_POLICY = ("spot", "opd", "eopd")  # that distil
FILES = ("save", "load")  # keys of a policy that name files
TRAINING = ("epochs", "iterations", "batch_size", "mini_batch_size", "learning_rate", "schedule",
            "schedule_iterations", "warmup_iterations", "weight_decay", "max_grad_norm", "clip", "dual_clip",
            "reference_kl", "loss_aggregation", "behavior", "importance_cap", "lora", "dtype")  # fmt: skip


def model_card(files: RunFiles, name: str, version: str, *, is_best: bool) -> str:
    """Return the card of a finished run's student, as Markdown. `name` is what it is called on the hub."""
    config, summary = files.config(), files.summary() or {}
    kind = str((config.get("policy") or {}).get("kind", "")).rpartition(":")[2]
    student, teacher = _model(config, "student"), _model(config, "teacher")
    data = list(_data(config))
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["spot-async", *(["on-policy-distillation"] if kind in ON_POLICY else []), kind],
        **({"base_model": of_hub.model} if (of_hub := on_hub(config, "student")) else {}),
        **({"datasets": found} if (found := [each for each, is_hubs in data if is_hubs]) else {}),
    }
    taught = "" if teacher is None else f" with the teacher {teacher}"
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
        f"# {name.rpartition('/')[2]}",
        "",
        f"{student} trained by {METHODS.get(kind, kind)}{taught}, with spot-async {version}.",
        "",
        "## Data",
        "",
        *_data_lines(data, summary),
        "",
        "## Figures",
        "",
        *_figure_lines(summary, is_best=is_best),
        "",
        "## Settings",
        "",
        "```yaml",
        yaml.safe_dump(_settings(config), sort_keys=False, allow_unicode=True).rstrip(),
        "```",
        "",
        "## Licence",
        "",
        "None is stated here. The licences of the base model, the teacher and the data may bind what is published.",
    ]
    return visible("\n".join(lines)) + "\n"


def on_hub(config: Mapping[str, Any], role: str) -> HubName | None:
    """Return a role's model of the hub; None for a directory. A run records those of the hub with their commit."""
    found = NAME.fullmatch(str((config.get(role) or {}).get("model") or ""))
    name = None if found is None else HubName(found["model"], found["revision"])
    return name if name is not None and name.is_pinned else None


def _model(config: Mapping[str, Any], role: str) -> str | None:
    model = (config.get(role) or {}).get("model")
    if model is None:
        return None
    if (found := on_hub(config, role)) is not None:
        return f"[{found.model}](https://huggingface.co/{found.model}/tree/{found.revision})"
    return f"`{Path(str(model)).name}`"


def _data(config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the name of each training set, and whether it is a data set of the hub."""
    for path in as_list(((config.get("data") or {}).get("train") or {}).get("path")):
        is_hubs = NAME.fullmatch(str(path)) is not None and not Path(str(path)).suffix
        yield str(path) if is_hubs else Path(str(path)).name, is_hubs


def _data_lines(data: Sequence[tuple[str, bool]], summary: Mapping[str, Any]) -> Iterator[str]:
    names = ", ".join(f"[{each}](https://huggingface.co/datasets/{each})" if hub else f"`{each}`" for each, hub in data)
    usable = (summary.get("problems") or {}).get("usable")
    problems = "" if usable is None else f", {usable:,} problems"
    yield f"Trained on {names or 'unnamed problems'}{problems}, in {summary.get('iterations', 0):,} iterations."


def _figure_lines(summary: Mapping[str, Any], *, is_best: bool) -> Iterator[str]:
    before, after = (((summary.get(label) or {}).get("tiers") or {}) for label in ("before", "after"))
    best = summary.get("best")
    if is_best and best is not None:
        figure = with_error(best["value"], best.get("standard_error"))
        yield f"This is the student of iteration {best['iteration']}, the best of the evaluations during training:"
        yield f"{figure} percent. It was picked by the problems that it is measured on, so this is optimistic."
        yield ""
        yield "The last student of the run, for comparison:"
        yield ""
    if not after:
        yield "The trained student was not evaluated."
        return
    ks = {name: row.get("pass_k") for name, row in after.items()}
    yield "Percent and standard error over the problems that were held out, before and after training."
    yield ""
    yield "| problems | n | Avg, before | Avg, after | Pass@k, before | Pass@k, after |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, row in after.items():
        earlier = before.get(name) or {}
        cells = [_figure(earlier, "avg"), _figure(row, "avg"), _figure(earlier, "pass"), _figure(row, "pass")]
        shown = name.replace("|", "/")
        yield f"| {shown} (k = {ks[name]}) | {row['problems']} | {' | '.join(cells)} |"


def _figure(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else with_error(value, row.get(f"{name}_standard_error"))


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that say how the student was trained, without those that name files or machines."""
    policy, training = config.get("policy") or {}, config.get("training") or {}
    return {
        "policy": {key: value for key, value in policy.items() if key not in FILES},
        "sampling": config.get("sampling"),
        "training": {key: training[key] for key in TRAINING if training.get(key) is not None},
        "max_staleness": config.get("max_staleness"),
        "verifier": (config.get("verifier") or {}).get("kind"),
        "seed": (config.get("run") or {}).get("seed"),
    }
