"""Pages in a real browser, by finger, by keys, on paper, and while a run writes them."""

from __future__ import annotations

import asyncio
import io
import shutil
import threading
import time
from pathlib import Path

import pytest
from browser import Page, browser
from rich.console import Console
from run_files import make_run, metrics_row, spot_sample

from spot_async.run_directory.layout import RunDirectory
from spot_async.tools.inspect.inspect_command import show_sample, write_report
from spot_async.tools.inspect.view import samples_page

pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
SAID = "getComputedStyle(document.activeElement, '::after').content"  # what the focused element shows at the bottom


@pytest.fixture
def report(tmp_path: Path) -> Path:
    rows = [metrics_row(i) for i in (1, 2, 3)]
    make_run(tmp_path / "run", [spot_sample(i) for i in (1, 2, 3)], rows)
    write_report(Console(quiet=True), tmp_path / "run", None)
    return tmp_path / "run" / "report.html"


async def test_clicks_alone_lead_from_a_report_to_a_token_also_after_a_move(tmp_path: Path) -> None:
    name = "r #1 100% <b>é漢?&"
    make_run(tmp_path / name, [spot_sample(i) for i in (1, 1, 3)], [metrics_row(i) for i in (1, 2, 3)])
    write_report(Console(quiet=True), tmp_path / name, None)
    moved = (tmp_path / name).rename(tmp_path / f"moved {name}")
    numbers = "[...document.querySelectorAll('tbody tr')].map(each => each.cells[0].textContent).join(' ')"
    async with browser(tmp_path / "profile") as page:
        await page.call("Page.navigate", url=(moved / "report.html").as_uri())
        await page.until("document.readyState === 'complete' && !!document.querySelector('.links a')")
        await page.click(".links a")
        assert await page.until(numbers) == "2 1 0"
        await page.click(".links a")  # back
        await page.until("!!document.querySelector('.tip')")
        await page.click(".tip")  # the first iteration's point
        await page.click(".way:has(+ .tip:focus)")
        assert await page.until(numbers) == "1 0"
        await page.click("tbody a")
        await page.until("document.querySelector('h1')?.textContent.startsWith('Sample 1')")
        await page.click(".response span.token")
        assert "position 1" in await shown(page)


async def test_a_point_without_samples_has_no_way_and_keys_go_from_point_to_point(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [spot_sample(1)], [metrics_row(i) for i in (1, 2)])
    write_report(Console(quiet=True), tmp_path / "run", None)
    way = "document.querySelector('.way:has(+ .tip:focus)')?.textContent ?? 'none'"
    async with browser(tmp_path / "profile", width=390) as page:
        await page.open(tmp_path / "run" / "report.html")
        await page.tap(".tip")
        assert await page.value(way) == "samples of iteration 1"
        await page.press("Tab")
        assert "iteration 2: " in await shown(page)
        assert await page.value(way) == "none"


async def shown(page: Page) -> str:
    return str(await page.value(SAID))


async def test_a_plot_tells_its_numbers_by_tap_and_by_key(report: Path, tmp_path: Path) -> None:
    async with browser(tmp_path / "profile", width=390) as page:
        await page.open(report)
        await page.tap(".tip")
        assert "iteration 1: " in await shown(page)
        await page.press("Tab")
        assert "iteration 2: " in await shown(page)
        assert await page.value("document.activeElement.className") == "tip whole"


async def test_every_token_of_a_sample_is_reached_by_key_and_tap(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [spot_sample()])
    show_sample(Console(quiet=True), tmp_path / "run", "0", tmp_path / "page.html")
    async with browser(tmp_path / "profile", width=390) as page:
        await page.open(tmp_path / "page.html")
        tokens = "[...document.querySelector('.response').querySelectorAll('.token')]"
        assert await page.value(f"{tokens}.length") == len(spot_sample()["response_ids"])
        assert await page.value(f"{tokens}.every(each => each.tabIndex === 0)")
        await page.tap(".response span.token")  # a probed one is a link to its branch
        first = await shown(page)
        await page.press("Tab")
        assert first != "none" != await shown(page) != first


async def test_a_list_of_samples_is_searched_and_sorted(tmp_path: Path) -> None:
    of = ((1, "apple"), (2, "pear"), (2, "apple 12"))
    samples = [spot_sample(i) | {"problem_id": name} for i, name in of]
    page_of_them = samples_page("run", make_run(tmp_path / "run", samples).samples.read(), [1, 2], "iteration 2")
    (tmp_path / "page.html").write_text(page_of_them, encoding="utf-8")
    numbers = "[...document.querySelectorAll('tbody tr')].map(each => each.cells[0].textContent).join(' ')"
    async with browser(tmp_path / "profile") as page:
        await page.open(tmp_path / "page.html")
        assert await page.value(numbers) == "2 1 0"
        await page.click("#query")
        await page.write("apple iteration 2")
        assert await page.value(numbers) == "2"
        await page.value("query.select()")
        await page.write("iteration 1")  # the column alone, and not a name that has the number
        assert await page.value(numbers) == "0"
        assert await page.value("document.getElementById('shown').textContent") == "1 of 3 samples"
        await page.value("query.value = ''; query.dispatchEvent(new Event('input'))")
        await page.click("th:nth-child(3) button")
        assert await page.value(numbers) == "0 2 1"
        await page.press("Enter")  # on the heading that was clicked
        assert await page.value(numbers) == "1 2 0"
        assert await page.value("document.querySelector('th:nth-child(3)').ariaSort") == "descending"


async def test_on_paper_colours_stay_and_cards_are_whole(report: Path, tmp_path: Path) -> None:
    show_sample(Console(quiet=True), report.parent, "0", tmp_path / "page.html")
    async with browser(tmp_path / "profile") as page:
        await page.open(tmp_path / "page.html")
        assert (await page.pdf()).startswith(b"%PDF")
        await page.call("Emulation.setEmulatedMedia", media="print")
        for selector in (".token", ".fill", ".card"):
            style = f"getComputedStyle(document.querySelector({selector!r}))"
            assert await page.value(f"{style}.printColorAdjust") == "exact"
        assert await page.value("getComputedStyle(document.querySelector('.card')).breakInside") == "avoid"


def appear(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


@pytest.mark.long
async def test_a_watched_report_loads_itself_again_while_the_run_writes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [], [metrics_row(1)]).path
    directory = RunDirectory.open(run)
    watching = threading.Thread(target=write_report, args=(Console(file=io.StringIO()), run, None, (), 1.0))
    with directory.locked():
        watching.start()
        await asyncio.to_thread(appear, run / "report.html")
        async with browser(tmp_path / "profile") as page:
            await page.open(run / "report.html")
            await page.until("document.body.textContent.includes('iterations: 1 of 4')")
            directory.append("metrics.jsonl", [metrics_row(2)])
            await page.until("document.body.textContent.includes('iterations: 2 of 4')")
            directory.write_summary({})
            await page.until("!document.querySelector('meta[http-equiv=refresh]')")
    await asyncio.to_thread(watching.join, 60)
    assert not watching.is_alive()
