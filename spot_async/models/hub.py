"""Downloads models of the Hugging Face hub, and finds in its cache those that were downloaded.

A model's name in a configuration is a directory, `org/name`, or `org/name@revision`. Once downloaded, it is
`org/name@commit`: that is found without the network, and is what a run directory records. Only configuration, tokenizer
and safetensors are downloaded: no code, and nothing that is pickled.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spot_async.base.secrets import SECRETS
from spot_async.base.text import first_line
from spot_async.config import ROLES, Config, ModelConfig, teacher_role
from spot_async.errors import ConfigError, DataError
from spot_async.models.small_files import CONFIG_FILE, is_small
from spot_async.models.weight_files import ADAPTER_CONFIG, INDEX_FILE, SINGLE_FILE, weight_files

if TYPE_CHECKING:  # slow to import, and most runs have no model of the hub
    from huggingface_hub.hf_api import ModelInfo

HUB = "https://huggingface.co"
CONNECT_TIMEOUT_S = 10.0
NAME = re.compile(r"(?P<model>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?")
COMMIT = re.compile("[0-9a-f]{40}")
FOLDERS = ("models", "runs")  # where our documents keep directories: no name in them is ever asked for
PATH = "give the path of a Hugging Face model directory"

Say = Callable[[str], None]


@dataclass(frozen=True)
class HubName:
    """A model of the hub, at a revision; None is its main branch."""

    model: str
    revision: str | None

    def __str__(self) -> str:
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and COMMIT.fullmatch(self.revision) is not None

    @property
    def directory(self) -> Path:
        """Where the cache has a pinned model."""
        from huggingface_hub import constants

        folder = f"models--{self.model.replace('/', '--')}"
        return Path(constants.HF_HUB_CACHE) / folder / "snapshots" / str(self.revision)


def hub_name(name: str) -> HubName | None:
    """Return the model of the hub that a name means; None for a path.

    A path that exists wins. Without a revision, a name in a directory that exists is a path too, which may be misspelt.
    """
    found = NAME.fullmatch(name)
    if found is None or Path(name).exists():
        return None
    folder = Path(name).parent
    if found["revision"] is None and (folder.is_dir() or folder.name in FOLDERS):
        return None
    return HubName(found["model"], found["revision"])


def local_path(name: str) -> str:
    """Return the directory in the cache for the name of a downloaded model, and any other name as it is."""
    found = hub_name(name)
    return name if found is None or not found.is_pinned else str(found.directory)


def is_same_model(one: str, other: str) -> bool:
    """Whether two names mean one model. Without a revision, a model of the hub may be any."""
    if one == other or Path(one).resolve() == Path(other).resolve():
        return True
    first, second = hub_name(one), hub_name(other)
    if first is None or second is None or first.model != second.model:
        return False
    return first.revision is None or second.revision is None


def with_downloads(config: Config, say: Say | None = None, *, weights: Collection[str] = ROLES) -> Config:
    """Download the models of the hub that a configuration names, and return it with their commits in the names.

    `weights` names the roles whose models are loaded. Of other models only the small files are downloaded. `say` is
    given a line for each download; without it, as without a terminal, there is no progress bar. Raise ConfigError or
    DataError, in one line.
    """
    changes = {}
    for role, model in config.models.items():
        if (name := hub_name(model.model)) is not None:
            kind = "teacher" if role in config.teachers_by_role else role
            needed = kind in weights and (role == "student" or not is_elsewhere(model))
            changes[role] = model.model_copy(update={"model": str(_downloaded(role, name, needed, say))})
    if not changes:
        return config
    teachers = {name: changes.pop(teacher_role(name), each) for name, each in config.teachers.items()}
    return config.model_copy(update={**changes, "teachers": teachers})


def is_elsewhere(model: ModelConfig) -> bool:
    """Whether only servers that run already serve the model. They have its weights."""
    return all(each.place is not None and each.place.is_attached for each in model.backend.servers())


def _downloaded(role: str, name: HubName, weights: bool, say: Say | None) -> HubName:
    """Return the pinned name of a model whose files are in the cache when this returns."""
    from huggingface_hub import constants

    if name.is_pinned and _is_whole(name.directory, weights):
        return name
    if constants.HF_HUB_OFFLINE:
        return _cached(role, name, weights)
    info = _asked(role, name)
    pinned = replace(name, revision=info.sha)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    wanted = _wanted(role, name, sizes, weights)
    if _is_whole(pinned.directory, weights):
        _note_revision(name, pinned)
        return pinned
    if say is not None:
        size = sum(sizes[each] for each in wanted)
        say(f"{role}.model: downloading {pinned}, {size / 1e6:,.1f} MB, to {constants.HF_HUB_CACHE}")
    try:
        # The configuration comes last: where it is, the small files are whole, also after a download that was stopped.
        _download(pinned, wanted - {CONFIG_FILE}, is_shown=say is not None and sys.stderr.isatty())
        _download(pinned, {CONFIG_FILE}, is_shown=False)
        _note_revision(name, pinned)
    except Exception as error:  # noqa: BLE001 - whatever the hub, the network and the disk may raise
        if (refused := _refusal(name, error)) is not None:  # a model that all may look at need not be open to all
            raise ConfigError(f"{role}.model: {refused}") from None
        raise DataError(
            f"{role}.model: {pinned} could not be downloaded whole from {the_hub()}: {first_line(error)}; the same "
            "command continues"
        ) from None
    return pinned


def _is_whole(directory: Path, weights: bool) -> bool:
    """Whether a directory of the cache has all of a model's files."""
    if not (directory / CONFIG_FILE).is_file():
        return False
    try:
        return not weights or all(file.is_file() for file in weight_files(directory))
    except DataError:
        return False


def _cached(role: str, name: HubName, weights: bool) -> HubName:
    """Return the pinned name of what the cache has of a model. Raises ConfigError if it has not all of it."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(name.model, CONFIG_FILE, revision=name.revision)
    if isinstance(found, str) and _is_whole(Path(found).parent, weights):
        return replace(name, revision=Path(found).parent.name)
    raise ConfigError(
        f"{role}.model: {_tried(name)}, no whole {name} in the hub's cache ({constants.HF_HUB_CACHE}), and "
        f"HF_HUB_OFFLINE is set: unset it, or {PATH}"
    )


def _asked(role: str, name: HubName) -> ModelInfo:
    """Return what the hub says of a model. Raises ConfigError or DataError if it cannot be had."""
    try:
        info: ModelInfo = hub_api().model_info(
            name.model, revision=name.revision, timeout=CONNECT_TIMEOUT_S, files_metadata=True
        )
    except Exception as error:  # noqa: BLE001 - which library connects, and so what it raises, the hub's client decides
        if (refused := _refusal(name, error)) is not None:
            raise ConfigError(f"{role}.model: {refused}") from None
        raise DataError(
            f"{role}.model: {_tried(name)}, and {the_hub()} cannot be reached: {first_line(error)}; check the network, "
            f"{PATH}, or set HF_HUB_OFFLINE=1 to use a copy in the cache"
        ) from None
    return info


def _refusal(name: HubName, error: Exception) -> str | None:
    """Return in words why the hub does not give a model; None for an error that is no answer of the hub."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    status, token = error.response.status_code if isinstance(error, HfHubHTTPError) else None, access_token()
    if isinstance(error, GatedRepoError):
        what = "ask for access with the account of HF_TOKEN" if token else "set HF_TOKEN to a token of one"
        return f"{name} on {the_hub()} is only for accounts that were given access: {what}"
    if isinstance(error, RevisionNotFoundError):
        return f"{name.model} on {the_hub()} has no revision {name.revision!r}"
    if isinstance(error, RepositoryNotFoundError) or (status == 401 and not token):  # 401 also for what is not there
        if token:
            return f"{_tried(name)}, and no {name.model} on {the_hub()} that the account of HF_TOKEN may read: {PATH}"
        return f"{_tried(name)}, and no public {name.model} on {the_hub()}: {PATH}; for a private one set HF_TOKEN"
    return refused_token(status) if status in (401, 403) else None


def _tried(name: HubName) -> str:
    return f"no directory {str(name)!r} ({Path(str(name)).absolute()})"


def access_token() -> str | None:
    """Return the hub's token, which only the environment may name."""
    token = os.environ.get("HF_TOKEN", "").strip()
    SECRETS.learn(token)
    return token or None


def refused_token(status: int) -> str:
    """Say that the hub refused what was asked with the token, or without one."""
    if access_token():
        return f"{the_hub()} refuses HF_TOKEN ({status}): give a token that is valid and may do this"
    return f"{the_hub()} wants a token ({status}): set HF_TOKEN"


def the_hub() -> str:
    """Return what messages call the hub: by its address, if HF_ENDPOINT names a mirror."""
    from huggingface_hub import constants

    return "the hub" if constants.ENDPOINT == HUB else f"the hub (HF_ENDPOINT={constants.ENDPOINT})"


def hub_api() -> Any:
    """Return a client of the hub with the environment's token, or with none. It uses no login that a file keeps."""
    from huggingface_hub import HfApi, constants

    return HfApi(endpoint=constants.ENDPOINT, token=access_token() or False)


def _wanted(role: str, name: HubName, files: Iterable[str], weights: bool) -> set[str]:
    """Return the files to download. Raises DataError for what is no model, or one without safetensors."""
    top = {each for each in files if "/" not in each}
    if CONFIG_FILE not in top:
        reason = "holds an adapter, and no whole model" if ADAPTER_CONFIG in top else "has no config.json"
        raise DataError(f"{role}.model: {name} on {the_hub()} {reason}; give a model of the transformers library")
    if not top & {SINGLE_FILE, INDEX_FILE}:
        raise DataError(
            f"{role}.model: {name} on {the_hub()} has no safetensors, and other weights are not loaded, as they may "
            "hold code: give a model that has them"
        )
    small = {each for each in files if is_small(each)} - {ADAPTER_CONFIG}  # transformers would lay it over the model
    if not weights:
        return small
    if SINGLE_FILE in top:
        return small | {SINGLE_FILE}
    return small | {INDEX_FILE} | {each for each in top if each.endswith(".safetensors")}


def _note_revision(name: HubName, pinned: HubName) -> None:
    """Write into the cache which commit a branch is at, for `_cached`. A download of a commit does not."""
    if not name.is_pinned:
        path = pinned.directory.parents[1] / "refs" / (name.revision or "main")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(pinned.revision))


def _download(name: HubName, files: set[str], *, is_shown: bool) -> None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Silent(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": True})  # type: ignore[no-untyped-call]

    snapshot_download(
        name.model,
        revision=name.revision,
        allow_patterns=sorted(files),
        cache_dir=constants.HF_HUB_CACHE,
        endpoint=constants.ENDPOINT,
        token=access_token() or False,
        tqdm_class=tqdm if is_shown else Silent,
    )
