"""Reads data sets of the Hugging Face hub with the `datasets` library. No code of a data set is executed.

The library retries for a long time when it cannot reach the hub. So we first ask once, briefly, whether the hub answers
at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spot_async.base.text import first_line
from spot_async.config import ProblemSetConfig
from spot_async.data.keys import about, setting
from spot_async.errors import DataError
from spot_async.models.hub import the_hub

CONNECT_TIMEOUT_S = 10.0


def read_hub(name: str, settings: ProblemSetConfig, key: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the data set `name`. Raises DataError if it does not exist or cannot be reached."""
    import datasets  # slow to import

    _require_answer(name, key)
    try:
        found = datasets.load_dataset(
            name, name=settings.subset, split=settings.split, revision=settings.revision, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - whatever the hub, the network and a data set's files may raise
        raise DataError(
            f"{about(key)}cannot load {name}, no file here, from {the_hub()}: {first_line(error)}"
        ) from None
    if isinstance(found, dict):
        if len(found) > 1:
            raise DataError(f"{setting(key, 'split')}: required for {name}, one of: {', '.join(map(str, found))}")
        (found,) = found.values()
    if datasets.config.HF_HUB_OFFLINE and settings.revision is not None:
        _require_revision(found.cache_files, settings.revision, name, key)
    for columns in found:
        yield dict(columns)


def _require_revision(cache_files: list[dict[str, Any]], revision: str, name: str, key: str) -> None:
    """Raise DataError if another revision was loaded. Offline, the library takes the newest in its cache regardless."""
    cached = {Path(file["filename"]).parent.name for file in cache_files}  # folders are named after commits
    if cached != {revision}:
        raise DataError(
            f"{setting(key, 'revision')}: {revision} of {name} is not the newest copy in the cache, which is of "
            f"{', '.join(sorted(cached)) or 'no commit'}; name that commit, or unset HF_HUB_OFFLINE"
        )


def _require_answer(name: str, key: str) -> None:
    """Raise DataError unless the hub answers. In offline mode, do not ask.

    Any answer except a server error will do: `load_dataset` says itself why a data set is refused.
    """
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    if datasets.config.HF_HUB_OFFLINE:
        return
    try:
        HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(name, timeout=CONNECT_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - which library connects, and so what it raises, the hub's client decides
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            return
        raise DataError(
            f"{about(key)}{name} is no file here, and cannot be had from {the_hub()}: {first_line(error)}; check path "
            "and network, or set HF_HUB_OFFLINE=1 to use a copy in the cache"
        ) from None
