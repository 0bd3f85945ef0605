"""The file that a forecast leaves behind for programs: figures, verdict, and everything that was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec

from spot_async.base.files import read_json
from spot_async.errors import ConfigError, DataError
from spot_async.tools.forecast.forecast import Forecast
from spot_async.tools.forecast.measurement import Measurement
from spot_async.tools.forecast.verdict import Verdict

FORMAT = 1  # raised when the file can no longer be read as before


class ForecastFile(msgspec.Struct, frozen=True, kw_only=True):
    """One forecast."""

    format: int = FORMAT
    name: str  # of the configuration
    overrides: list[str]
    worth: float
    verdict: Verdict
    notes: list[str]
    forecast: Forecast
    measurement: Measurement


def read_forecast(path: Path) -> ForecastFile:
    """Return a forecast from its file. Raises DataError if it cannot be read, or is of a newer format."""
    return read_json(path, ForecastFile, newest_format=FORMAT, otherwise="is no file of spot-async forecast")


def check_output(output: Path) -> None:
    """Raise ConfigError if `output` cannot be written, or is another program's file. Nothing is measured then."""
    if output.suffix != ".json":
        raise ConfigError(f"-o {output}: name a .json file; the page goes beside it as .html")
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: no directory {str(output.parent)!r}")
    if output.exists():
        try:
            read_forecast(output)
        except DataError:
            raise ConfigError(f"-o {output}: exists, and forecast did not write it; name another file") from None


def write(found: ForecastFile, output: Path, page: str) -> None:
    """Write the file and the page beside it. Raises DataError if one cannot be written."""
    for path, content in ((output, msgspec.json.encode(found) + b"\n"), (output.with_suffix(".html"), page.encode())):
        try:
            path.write_bytes(content)
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror}): name another file with -o") from None
