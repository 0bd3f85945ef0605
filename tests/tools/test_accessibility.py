"""Every page passes axe-core in a real browser, on a wide screen and on a phone's, in light and dark."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from browser import Page, browser
from evaluation_files import written
from rich.console import Console
from run_files import make_run, metrics_row, spot_sample

from spot_async.tools.compare.page import comparison_page
from spot_async.tools.compare.reading import paired, read_evaluated
from spot_async.tools.compare.statistics import compare
from spot_async.tools.inspect.inspect_command import show_sample
from spot_async.tools.inspect.report import read_report, report_page
from spot_async.tools.inspect.view import samples_page

axe = pytest.importorskip("axe_core_python")
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")

SCRIPT = Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8")
FOUND = """axe.run().then(({violations}) => JSON.stringify(
  violations.map(each => [each.id, each.nodes.map(node => node.html.slice(0, 200))])
))"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def written_bare(page: str, file: Path) -> None:
    """Write a page with axe-core in it. The page's own policy would not let that run, so it is taken out."""
    bare = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page)
    file.write_text(bare.replace("</body>", f"<script>{SCRIPT}</script></body>"), encoding="utf-8")


async def violations(chromium: Page, file: Path, width: int, dark: bool) -> list[tuple[str, list[str]]]:
    """What axe-core finds in a page."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await chromium.call("Emulation.setEmulatedMedia", features=[scheme])
    shape = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    await chromium.call("Emulation.setDeviceMetricsOverride", **shape)
    await chromium.open(file)
    await chromium.until(f"location.href === {file.as_uri()!r} && document.readyState === 'complete'")
    is_shown = "`${innerWidth} ${matchMedia('(prefers-color-scheme: dark)').matches}`"
    assert await chromium.value(is_shown) == f"{width} {str(dark).lower()}"
    return list(json.loads(await chromium.value(FOUND)))


def report(run: Path) -> str:
    rows = [metrics_row(i) | {"replica/student/mean_in_flight": 2.0, "replica/student/limit_decreases": float(i == 2)}
            for i in (1, 2, 3)]  # fmt: skip
    return report_page(read_report(make_run(run, [spot_sample(i) for i in (1, 2, 3)], rows)), written="12:00:00")


def sample(run: Path) -> str:
    make_run(run, [spot_sample()])
    show_sample(Console(quiet=True), run, "0", run / "page.html")
    return (run / "page.html").read_text()


def listed(run: Path) -> str:
    return samples_page("run", make_run(run, [spot_sample(1), spot_sample(2)]).samples.read(), [1], "iteration 2")


def comparison(run: Path) -> str:
    make_run(run, [], [metrics_row(i) for i in (1, 2, 3)])
    written(run, {"AMC23": [1], "AIME24": [2]}, file="evaluation-000002.json")
    written(run, {"AMC23": [1, 2]})
    written(run.with_name("other"), {"AMC23": [2, 2]}, model_fingerprint="g")
    runs = [read_evaluated(f"{name}={run.with_name(name)}") for name in (run.name, "other")]
    benchmarks = paired(runs, ())
    found = compare([each.name for each in runs], benchmarks, baseline=0, k=None, draws=100, seed=0, confidence=0.95)
    return comparison_page(found, runs, ["a note"])


@pytest.mark.parametrize("page", [report, sample, listed, comparison])
@pytest.mark.parametrize(("width", "dark"), [pytest.param(1280, False, marks=pytest.mark.long), (390, True)])
@pytest.mark.asyncio(loop_scope="module")
async def test_axe_finds_nothing(
    chromium: Page, page: Callable[[Path], str], width: int, dark: bool, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    written_bare(page(tmp_path / "run"), file)
    assert await violations(chromium, file, width, dark) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_axe_finds_what_is_wrong(chromium: Page, tmp_path: Path) -> None:
    """After other pages in the same browser, too."""
    file = tmp_path / "wrong.html"
    written_bare(sample(tmp_path / "run").replace("</body>", '<img src="data:,"></body>'), file)
    assert [rule for rule, _ in await violations(chromium, file, 390, dark=True)] == ["image-alt", "region"]
