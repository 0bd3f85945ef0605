"""Uploads the student of a finished run to the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from spot_async.base.text import first_line
from spot_async.base.writers import refuse_foreign_writers
from spot_async.errors import ConfigError, DataError
from spot_async.models.hub import access_token, hub_api, refused_token, the_hub
from spot_async.models.small_files import is_small
from spot_async.models.weight_files import ADAPTER_CONFIG
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.reading import RunFiles
from spot_async.tools.push.card import model_card, on_hub

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
    from spot_async.models.causal_model import check_files, empty_model  # imports torch

    refuse_foreign_writers([student, *_published(student)])  # a link could lead to any file of this user's
    check_files(student, empty_model(student))
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
    return json.dumps(json.loads(path.read_bytes()) | {"base_model_name_or_path": name}, indent=2).encode() + b"\n"


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
