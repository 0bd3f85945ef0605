"""Uploads the student of a finished run to the Hugging Face hub, with a model card from the files of the run.

A card names models of the hub by their ids, and everything else by its last name: paths of a machine are left out. It
states no licence, which only its owner can.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from spot_async.base.files import as_json, read_json
from spot_async.base.text import first_line, visible, with_error
from spot_async.base.writers import refuse_foreign_writers
from spot_async.config import as_list, model_sections
from spot_async.errors import ConfigError, DataError
from spot_async.models.hub import NAME, HubName, access_token, hub_api, refused_token, the_hub
from spot_async.models.small_files import is_small
from spot_async.models.weight_files import ADAPTER_CONFIG
from spot_async.models.whole import check_whole
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.reading import RunFiles
from spot_async.tools.compare.tables import markdown_table
from spot_async.tools.inspect.held_out import ResultTable, figures_of, result_table

METHODS = {
    "spot": "SPOT (on-policy distillation with sparse probing and outcome calibration)",
    "opd": "OPD (on-policy distillation)",
    "eopd": "EOPD (on-policy distillation with a forward KL where the teacher is uncertain)",
    "grpo": "GRPO (reinforcement learning from verified outcomes)",
    "kd": "KD (distillation on the teacher's responses)",
}
ON_POLICY = ("spot", "opd", "eopd")  # that distil
TRAINING = ("epochs", "iterations", "batch_size", "mini_batch_size", "learning_rate", "schedule",
            "schedule_iterations", "warmup_iterations", "weight_decay", "max_grad_norm", "clip", "dual_clip",
            "reference_kl", "loss_aggregation", "behavior", "importance_cap", "lora", "dtype")  # fmt: skip


def model_card(files: RunFiles, name: str, version: str, *, is_best: bool) -> str:
    """Return the card of a finished run's student, as Markdown. `name` is what it is called on the hub."""
    config, summary = files.config(), files.summary() or {}
    last = figures_of(files, "after") or figures_of(files, "before")
    kind = str((config.get("policy") or {}).get("kind", "")).rpartition(":")[2]
    student, *teachers = (_model(config, role) for role in model_sections(config) if role != "reference")
    data = list(_data(config))
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["spot-async", *(["on-policy-distillation"] if kind in ON_POLICY else []), kind],
        **({"base_model": of_hub.model} if (of_hub := on_hub(config, "student")) else {}),
        **({"datasets": found} if (found := [each for each, is_hubs in data if is_hubs]) else {}),
    }
    taught = f" with the teacher{'s' if len(teachers) > 1 else ''} {' and '.join(teachers)}" if teachers else ""
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
        *_figure_lines(summary, result_table(summary, config, last), is_best=is_best),
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
    found = NAME.fullmatch(str(model_sections(config)[role].get("model") or ""))
    name = None if found is None else HubName(found["model"], found["revision"])
    return name if name is not None and name.is_pinned else None


def _model(config: Mapping[str, Any], role: str) -> str:
    if (found := on_hub(config, role)) is not None:
        return f"[{found.model}](https://huggingface.co/{found.model}/tree/{found.revision})"
    return f"`{Path(str(model_sections(config)[role].get('model'))).name}`"


def _data(config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the name of each training set, and whether it is a data set of the hub."""
    sets = as_list((config.get("data") or {}).get("train") or {})
    for path in [path for each in sets for path in as_list(each.get("path"))]:
        is_hubs = NAME.fullmatch(str(path)) is not None and not Path(str(path)).suffix
        yield str(path) if is_hubs else Path(str(path)).name, is_hubs


def _data_lines(data: Sequence[tuple[str, bool]], summary: Mapping[str, Any]) -> Iterator[str]:
    names = ", ".join(f"[{each}](https://huggingface.co/datasets/{each})" if hub else f"`{each}`" for each, hub in data)
    usable = (summary.get("problems") or {}).get("usable")
    problems = "" if usable is None else f", {usable:,} problems"
    yield f"Trained on {names or 'unnamed problems'}{problems}, in {summary.get('iterations', 0):,} iterations."


def _figure_lines(summary: Mapping[str, Any], results: ResultTable | None, *, is_best: bool) -> Iterator[str]:
    best = summary.get("best")
    if is_best and best is not None:
        figure = with_error(best["value"], best.get("standard_error"))
        yield f"This is the student of iteration {best['iteration']}, the best of the evaluations during training:"
        yield f"{figure} percent. It was picked by the problems that it is measured on, so this is optimistic."
        yield ""
        yield "The last student of the run, for comparison:"
        yield ""
    if results is None or not summary.get("after"):
        yield "The trained student was not evaluated."
        return
    yield results.note.replace("\n", "\n\n")  # a paragraph each
    yield ""
    yield markdown_table(results.headings, results.rows)


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that say how the student was trained, without those that name files or machines."""
    training = config.get("training") or {}
    return {
        "policy": config.get("policy") or {},
        "sampling": config.get("sampling"),
        "training": {key: training[key] for key in TRAINING if training.get(key) is not None},
        "max_staleness": config.get("max_staleness"),
        "verifier": (config.get("verifier") or {}).get("kind"),
        "seed": (config.get("run") or {}).get("seed"),
    }


REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
CARD = "README.md"


@dataclass(frozen=True)
class Upload:
    """What is to be uploaded: files of a directory by their names on the hub, and contents that are made for it."""

    files: dict[str, Path]
    made: dict[str, bytes]

    @property
    def card(self) -> str:
        return self.made[CARD].decode()


def prepare(run: Path, repository: str, *, is_best: bool) -> Upload:
    """Return what the student of a finished run has to upload. Raises ConfigError or DataError if it has none."""
    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(f"REPO {repository!r}: give the name of a repository of the hub, such as me/my-student")
    files = RunFiles(run)
    refuse_foreign_writers([run])
    directory = RunDirectory.open(run)
    if files.is_evaluation:
        raise DataError(f"{run} holds an evaluation, which has no student: give a training run")
    if not directory.has_summary or directory.is_in_use():
        raise DataError(f"{run} has not come to its end: continue it by spot-async train --resume {run}")
    student = (run / ("best" if is_best else "student")).resolve()
    if not student.is_dir():
        reason = "was not evaluated during training" if is_best else "has trained nothing"
        raise DataError(f"{run} has no {'best' if is_best else 'trained'} student: it {reason}")
    refuse_foreign_writers([student, *_published(student)])  # a link could lead to any file of this user's
    check_whole(student)
    config = files.config()
    found = {each.relative_to(student).as_posix(): each for each in _published(student)}
    made = {
        name: _without_path(path, config) for name, path in found.items() if name.rpartition("/")[2] == ADAPTER_CONFIG
    }
    made[CARD] = model_card(files, repository, directory.version or "", is_best=is_best).encode()
    return Upload({name: path for name, path in found.items() if name not in made}, made)


def _published(student: Path) -> Iterator[Path]:
    """Yield the files of a student that may be ours, and not those of an editor or a file system, or copies."""
    for path in sorted(student.rglob("*")):
        is_ours = is_small(path.name) or path.name.endswith((".index.json", ".safetensors"))
        if is_ours and path.is_file() and not path.name.startswith(".") and not path.name.endswith("~"):
            yield path


def _without_path(path: Path, config: dict[str, Any]) -> bytes:
    """Return an adapter's configuration with its base as others know it, not as a path of this machine."""
    base = on_hub(config, "student")
    name = base.model if base is not None else Path(str(config["student"]["model"])).name
    return as_json(read_json(path, dict[str, Any]) | {"base_model_name_or_path": name})


def show(screen: Console, upload: Upload, repository: str) -> None:
    """Print the files and the card that would be uploaded."""
    size = sum(path.stat().st_size for path in upload.files.values())
    screen.print(Text(f"to {repository}, {size / 1e6:,.1f} MB: {', '.join(sorted({*upload.files, *upload.made}))}"))
    screen.rule(CARD, align="left")
    screen.print(Text(upload.card))


def send(upload: Upload, repository: str, message: str, *, is_public: bool, is_update: bool) -> str:
    """Upload, and return the address. A new repository is private unless `is_public`.

    With `is_update` the repository must be there, and gets one more commit. Raises ConfigError for what the hub refuses
    and DataError where it cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if access_token() is None:
        raise ConfigError("HF_TOKEN: not set; give a token of the hub that may write")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set: unset it to upload")
    api = hub_api()
    contents: dict[str, Path | bytes] = {**upload.files, **upload.made}
    try:
        if not is_update:
            api.create_repo(repository, private=not is_public)
        api.create_commit(
            repository,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=each) for name, each in contents.items()],
            commit_message=message,
        )
    except RepositoryNotFoundError:
        raise ConfigError(
            f"REPO {repository}: the account of HF_TOKEN has no such repository: leave --update away"
        ) from None
    except Exception as error:  # noqa: BLE001 - which library connects, and so what it raises, the hub's client decides
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403):
            raise ConfigError(refused_token(status)) from None
        if status == 409 and not is_update:
            raise ConfigError(f"REPO {repository}: is there already: give --update to add a commit to it") from None
        raise DataError(f"{repository} could not be uploaded to {the_hub()}: {first_line(error)}") from None
    return f"{constants.ENDPOINT}/{repository}"
