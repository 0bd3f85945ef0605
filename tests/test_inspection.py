"""Runs as people look at them: samples in the terminal and as pages, reports; whatever state the run is in."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from rich.console import Console
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.errors import DataError
from spot_async.inspection.pages import report_page, sample_page
from spot_async.inspection.reading import RunFiles, token_texts
from spot_async.inspection.report import read_report
from spot_async.inspection.terminal import sample_view
from spot_async.inspection.view import colourings, probability, shortened, verdict_text, visible

HOSTILE = "<script>document.title='owned'</script>\x1b]0;owned\x07 \u202e{{ 7*7 }}&amp;<img src=x onerror=alert(1)>"
CONFIG = """
policy: {kind: spot}
student: {model: nowhere, backend: {slots: 8}}
training: {iterations: 4, batch_size: 2, mini_batch_size: 1}
stages: {rollout: {concurrency: 8}, probe: {concurrency: 16}}
"""


def spot_sample(iteration=1, problem_id="p0", **changes):
    candidate = {"token_id": 5, "token": "five", "teacher": 0.5, "student": 0.07, "prior": 0.6, "value": 1.0,
                 "target": 0.8, "verdicts": ["correct"], "continuations": ["so \\boxed{1}"]}  # fmt: skip
    other = candidate | {"token_id": 6, "token": "six", "student": 0.2, "prior": 0.4, "value": 0.0, "target": 0.2,
                         "verdicts": ["wrong"], "continuations": ["so \\boxed{2}"]}  # fmt: skip
    return {
        "iteration": iteration,
        "problem_id": problem_id,
        "problem": "what?",
        "answer": "1",
        "tier": None,
        "response": "abc",
        "verdict": "correct",
        "finish_reason": "stop",
        "version": "0.0",
        "response_ids": [5, 7, 1],
        "behavior_logprobs": [-0.1, -2.0, -0.3],
        "teacher_logprobs": [-0.2, -0.5, -5.3],
        "teacher_entropy_nats": [0.1, 0.2, 0.3],
        "acquisition_score": [0.04, 0.01, None],
        "selected_positions": [0],
        "branches": [
            {"position": 0, "sampled": "six", "retained": True, "score_parts": {"entropy": 0.3},
             "candidates": [candidate, other]}
        ],
    } | changes  # fmt: skip


def metrics_row(iteration):
    return {
        "iteration": iteration,
        "rollout/accuracy": 0.25,
        "rollout/tokens": 12.0,
        "spot/selected": 1.0,
        "spot/retained": 1.0,
        "train/loss": 0.5,
        "train/grad_norm": 1.5,
        "time/iteration_s": 10.0,
        "time/wait_for_batch_s": 8.0,
        "time/train_s": 1.5,
        "time/update_weights_s": 0.5,
        "wait/probe_s": 7.0,
        "wait/rollout_s": 1.0,
        "stage/probe/requests": 8.0,
        "stage/probe/mean_in_flight": 5.0,
        "stage/probe/mean_queued": 1.0,
        "stage/rollout/requests": 2.0,
    }


def make_run(path, samples=(), rows=(), summary=None):
    path.mkdir()
    (path / "config.yaml").write_text(CONFIG)
    (path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return RunFiles(path)


def terminal(renderable, width=100):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system="truecolor").print(renderable)
    return out.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def page_of(files, wanted="0", texts=None):
    number, sample = files.sample(wanted)
    return sample_page(number, sample, colourings(sample, texts or token_texts(files, sample.response_ids)))


class Tags(HTMLParser):
    """Tags and attributes of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def assert_harmless(page):
    tags = Tags(page).tags
    assert {tag for tag, _ in tags}.isdisjoint({"script", "img", "iframe", "object", "link", "base", "form"})
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on") or name in ("src", "srcdoc")]
    assert all(attrs["href"].startswith("#") for _, attrs in tags if "href" in attrs)
    assert "http:" not in page
    assert "https:" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_text_that_a_model_wrote_stays_text_on_the_page(tmp_path):
    sample = spot_sample(problem=HOSTILE, answer=HOSTILE, problem_id=HOSTILE, tier=HOSTILE, verdict=HOSTILE)
    sample["branches"][0]["sampled"] = HOSTILE
    sample["branches"][0]["candidates"][0] |= {"token": HOSTILE, "continuations": [HOSTILE], "verdicts": [HOSTILE]}
    sample["branches"][0]["candidates"][1]["continuations"] = [HOSTILE * 20]  # folded
    page = page_of(make_run(tmp_path / "run", [sample]), texts=[HOSTILE, '" onclick="x', "\n"])
    assert_harmless(page)
    text = Tags(page).text
    assert text.count("<script>document.title='owned'</script>") > 20
    assert "{{ 7*7 }}" in text


def test_hostile_names_stay_text_in_the_report(tmp_path):
    samples = [spot_sample()]
    samples[0]["branches"][0]["sampled"] = HOSTILE
    files = make_run(tmp_path / "run", samples, [metrics_row(1)])
    (tmp_path / "run" / "dead_letters.jsonl").write_text(json.dumps({"reason": HOSTILE}) + "\n")
    page = report_page(read_report(files))
    assert_harmless(page)
    assert Tags(page).text.count("document.title='owned'") >= 2


def test_a_terminal_gets_no_escape_sequence_from_a_model(tmp_path):
    sample = spot_sample(problem=HOSTILE)
    sample["branches"][0]["candidates"][0] |= {"token": HOSTILE, "continuations": [HOSTILE]}
    number, record = make_run(tmp_path / "run", [sample]).sample("0")
    for colouring in colourings(record, [HOSTILE, "[red]", "\r"]):
        shown = terminal(sample_view(number, record, colouring))
        assert "\x1b]" not in shown
        assert "\x07" not in shown
        assert "\u202e" not in shown
        assert "[red]" in shown


def test_a_sample_shows_scores_candidates_probes_and_targets(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample()])
    number, record = files.sample("0")
    found = colourings(record, ["one ", "two ", "three"])
    assert [colouring.palette for colouring in found] == ["score", "advantage"]
    assert [token.level for token in found[0].tokens] == [1.0, 0.5, 0.0]  # root of the share of the highest
    assert [token.level for token in found[1].tokens] == pytest.approx([-0.1 / 3, 0.5, -1.0])
    assert [token.mark for token in found[0].tokens] == [1, None, None]
    assert "masked" in found[0].tokens[2].label

    for shown in (plain(terminal(sample_view(number, record, found[0]))), Tags(page_of(files)).text):
        for expected in ("position 0", "five", "50 %", "7 %", "60 %", "80 %", "✓ correct", "✗ wrong", "\\boxed{2}"):
            assert expected.lower() in shown.lower(), expected
    assert re.search(r"▸ +“six”", plain(terminal(sample_view(number, record, found[0]))))


def test_a_sample_of_another_policy_shows_what_there_is(tmp_path):
    opd = {k: v for k, v in spot_sample().items() if k not in ("acquisition_score", "selected_positions", "branches")}
    grpo = {k: v for k, v in opd.items() if not k.startswith("teacher")} | {"advantage": -0.7, "left_out": None}
    bare = {"iteration": 1, "problem_id": "bare", "response_ids": [5, 7]}
    files = make_run(tmp_path / "run", [opd, grpo, bare])
    palettes = [
        [colouring.palette for colouring in colourings(files.sample(str(i))[1], ["a", "b", "c"])] for i in range(3)
    ]
    assert palettes == [["advantage"], ["surprise"], ["surprise"]]
    assert "advantage -0.700" in Tags(page_of(files, "1")).text
    page_of(files, "2")


def test_samples_are_found_by_number_and_by_their_latest_problem(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(i, f"p{i % 2}") for i in range(1, 5)])
    assert files.sample("2")[1].iteration == 3
    assert files.sample("p1") == (2, files.sample("2")[1])
    for missing in ("4", "p9"):
        with pytest.raises(DataError, match="number from 0 to 3, or a problem's id"):
            files.sample(missing)


def test_a_run_killed_in_the_middle_of_a_line_is_read_up_to_it(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(1), spot_sample(2)], [metrics_row(1), metrics_row(2)])
    for name in ("samples.jsonl", "metrics.jsonl"):
        path = tmp_path / "run" / name
        path.write_bytes(path.read_bytes()[:-30])
    assert [sample.iteration for sample in files.samples()] == [1]
    assert files.sample("0")[1].iteration == 1
    assert len(files.metrics()) == 1
    with pytest.raises(DataError, match="no sample '1'"):
        files.sample("1")
    assert "was stopped before its end" in report_page(read_report(files))


def test_damage_elsewhere_is_named_by_its_line(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(), spot_sample()])
    path = tmp_path / "run" / "samples.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"iteration": 1', b'{"iteration": "x"', 1))
    with pytest.raises(DataError, match=r"samples.jsonl:1: .*iteration"):
        list(files.samples())


def test_a_report_has_its_curves_its_verdict_and_its_table(tmp_path):
    tier = {"problems": 3, "avg": 0.25, "avg_standard_error": 0.05, "pass": 0.5, "pass_standard_error": 0.1}
    evaluation = {"samples": 8, "tokens": 1, "tiers": {"all": tier}}
    after = evaluation | {"tiers": {"all": tier | {"avg": 0.5}}}
    summary = {"prompts": {"trained": 8, "left_over": 1}, "before": evaluation, "after": after}
    files = make_run(tmp_path / "run", [spot_sample(i) for i in (1, 2, 3, 4)], map(metrics_row, (1, 2, 3, 4)), summary)
    report = read_report(files)
    assert report.verdict.sentence == (
        "Student bound: the trainer waited 80 % of the time, mostly for probe (88 %) and rollout (12 %)."
    )
    assert "8 slots were full" in report.verdict.advice[0]  # 5 in flight over 10 s, in 7 s of waiting for them
    assert report.results[0].cells == ("25.0 ±5.0", "50.0 ±5.0", "50.0 ±10.0", "50.0 ±10.0", "+25.0")
    assert report.notes == ()
    titles = {plot.title for section in report.sections for plot in section.plots}
    assert {"Loss and its parts", "Calibration shift", "Which tokens were probed", "Time per phase"} - titles == {
        "Calibration shift"
    }
    assert "8 trained, 1 left over" in Tags(report_page(report)).text


@pytest.mark.parametrize(
    ("rows", "summary", "expected"),
    [
        ([], None, "No iteration has finished"),
        ([metrics_row(1)], None, "was stopped before its end"),
        ([metrics_row(1)], {"before": None, "after": None}, "was not evaluated"),
        ([{"iteration": 1, "train/loss": 0.5}], {}, "probes no positions"),
        ([{"iteration": 1}], None, "nothing can be said"),
    ],
)
def test_what_is_missing_is_said(tmp_path, rows, summary, expected):
    page = report_page(read_report(make_run(tmp_path / "run", [], rows, summary)))
    assert expected in Tags(page).text


def test_the_commands_write_pages_and_fail_in_one_line(tmp_path):
    make_run(tmp_path / "run", [spot_sample()], [metrics_row(1)])
    run, runner = str(tmp_path / "run"), CliRunner()
    assert "p0" in runner.invoke(app, ["inspect", run]).output
    assert runner.invoke(app, ["inspect", run, "--verdict", "wrong"]).output.startswith("0 samples")
    assert runner.invoke(app, ["inspect", run, "p0"]).exit_code == 0
    assert (tmp_path / "run" / "inspect-0.html").exists()
    assert runner.invoke(app, ["report", run, "--html", str(tmp_path / "page.html")]).exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    for arguments in (["report", str(tmp_path)], ["inspect", run, "7"], ["report", run, "--html", "/nowhere/page"]):
        failed = runner.invoke(app, arguments)
        assert failed.exit_code == 2
        assert failed.exception is None or isinstance(failed.exception, SystemExit)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_hostile_text_and_runs_none_of_it(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(problem=HOSTILE)])
    (tmp_path / "page.html").write_text(page_of(files), encoding="utf-8")
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    browser += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    command = [*browser, "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "<title>Sample 0: p0</title>" in shown
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt;" in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31m", "a␛[31m"),
        ("\u202eabc", "�abc"),
        ("tab\tline\n", "tab\tline\n"),
        ("\x9b1m", "�1m"),
        ("é漢😀", "é漢😀"),
    ],
)
def test_characters_that_act_are_made_visible(text, shown):
    assert visible(text) == shown


def test_small_texts():
    assert [probability(value) for value in (None, 0.0, 0.00005, 0.0123, 0.5, 1.0)] == [
        "–", "<0.01 %", "<0.01 %", "1.2 %", "50 %", "100 %",
    ]  # fmt: skip
    assert shortened("x" * 1000).endswith("x" * 240)
    assert verdict_text("no_answer") == "∅ no answer"
