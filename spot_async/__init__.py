"""On-policy distillation of small reasoning models with sparse probing and outcome calibration.

    outcome = spot_async.run("configs/quickstart.yaml")

What is named in `spot_async.public` is the public API, with `spot_async.types`, `spot_async.protocols` and
`spot_async.errors` behind it. It is loaded when one of its names is first used, and loads neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spot_async.public import *  # noqa: F403  (these are its names)


def __getattr__(name: str) -> Any:
    public = importlib.import_module(f"{__name__}.public")
    names = sorted(each for each in vars(public) if not each.startswith("_"))
    if name == "__all__":
        return names
    if name not in names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(public, name))  # Python asks for it only once


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
