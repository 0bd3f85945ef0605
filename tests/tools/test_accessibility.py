"""Every page passes axe-core in a real browser, on a wide screen and on a phone's, in light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from evaluation_files import written
from rich.console import Console
from run_files import make_run, metrics_row, spot_sample

from spot_async.tools.compare.page import comparison_page
from spot_async.tools.compare.reading import paired, read_evaluated
from spot_async.tools.compare.statistics import compare
from spot_async.tools.forecast.command import read_forecast
from spot_async.tools.forecast.view import forecast_page
from spot_async.tools.inspect.command import show_sample
from spot_async.tools.inspect.report import read_report, report_page
from spot_async.tools.inspect.samples import samples_page

axe = pytest.importorskip("axe_core_python")
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")

SCRIPT = Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
RUN = """<script>addEventListener("load", () => axe.run().then(({violations}) => {
  const found = document.createElement("pre");
  found.id = "found";
  const places = each => each.nodes.map(node => node.html.slice(0, 200));
  found.textContent = JSON.stringify(violations.map(each => [each.id, places(each)]));
  document.body.replaceChildren(found);
}));</script>"""


@pytest.fixture
def violations(tmp_path: Path) -> Callable[[str, int, bool], list[object]]:
    """What axe-core finds in a page. The page's own policy would not let it run, so that is taken out."""

    def found(page: str, width: int, dark: bool) -> list[object]:
        file = tmp_path / "page.html"
        bare = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page)
        file.write_text(bare.replace("</body>", f"<script>{SCRIPT}</script>{RUN}</body>"), encoding="utf-8")
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
                   f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
                   *(["--blink-settings=preferredColorScheme=0"] if dark else []), "--virtual-time-budget=60000",
                   "--dump-dom", f"file://{file}"]  # fmt: skip
        shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
        (said,) = re.findall(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
        return list(json.loads(html.unescape(said)))

    return found


def report(run: Path) -> str:
    rows = [metrics_row(i) | {"replica/student/mean_in_flight": 2.0, "replica/student/limit_decreases": float(i == 2)}
            for i in (1, 2, 3)]  # fmt: skip
    return report_page(read_report(make_run(run, [spot_sample(i) for i in (1, 2, 3)], rows)), written="12:00:00")


def sample(run: Path) -> str:
    make_run(run, [spot_sample()])
    show_sample(Console(quiet=True), run, "0", run / "page.html")
    return (run / "page.html").read_text()


def listed(run: Path) -> str:
    return samples_page("run", make_run(run, [spot_sample(1), spot_sample(2)]).samples(), [1], "iteration 2")


def comparison(run: Path) -> str:
    make_run(run, [], [metrics_row(i) | {"evaluation/avg@8": i / 10} for i in (1, 2, 3)])
    written(run, {"AMC23": [1, 2]})
    written(run.with_name("other"), {"AMC23": [2, 2]}, model_fingerprint="g")
    runs = [read_evaluated(f"{name}={run.with_name(name)}") for name in (run.name, "other")]
    benchmarks = paired(runs, ())
    found = compare([each.name for each in runs], benchmarks, baseline=0, k=None, draws=100, seed=0, confidence=0.95)
    return comparison_page(found, runs, ["a note"])


def forecast(run: Path) -> str:
    """One that an experiment recorded, with tables by tier and with other keys."""
    run.mkdir()
    with tarfile.open(Path(__file__).parents[2] / "experiments/mechanism/results/part-three.tar.gz") as archive:
        recorded = archive.extractfile(next(each for each in archive if re.fullmatch(r"forecasts/.*\.json", each.name)))
        assert recorded is not None
        (run / "forecast.json").write_bytes(recorded.read())
    return forecast_page(read_forecast(run / "forecast.json"))


@pytest.mark.parametrize("page", [report, sample, listed, comparison, forecast])
@pytest.mark.parametrize(("width", "dark"), [pytest.param(1280, False, marks=pytest.mark.long), (390, True)])
def test_axe_finds_nothing(
    violations: Callable[[str, int, bool], list[object]], page: Callable[[Path], str], width: int, dark: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    assert violations(page(tmp_path / "run"), width, dark) == []
