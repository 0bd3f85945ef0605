"""Runs as people look at them: samples in the terminal and as pages; whatever state the run is in."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from run_files import Tags, make_run, metrics_row, spot_sample
from typer.testing import CliRunner

from spot_async.base.text import visible
from spot_async.cli import app
from spot_async.errors import DataError
from spot_async.run_directory.reading import RunFiles, token_texts
from spot_async.tools.inspect import inspect_command, view
from spot_async.tools.inspect.report import read_report, report_page
from spot_async.tools.inspect.terminal import response_text, sample_view
from spot_async.tools.inspect.view import PolicySettings, colourings, probability, sample_page, shortened, verdict_text

EXAMPLE_STUDENT = Path(__file__).parents[2] / "examples/running_sum/student"
HOSTILE = "<script>document.title='owned'</script>\x1b]0;owned\x07 \u202e{{ 7*7 }}&amp;<img src=x onerror=alert(1)>"


def terminal(renderable, width=100):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system="truecolor").print(renderable)
    return out.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def page_of(files, wanted="0", texts=None):
    number, sample = files.sample(wanted)
    return sample_page(number, sample, colourings(sample, texts or token_texts(files, sample.response_ids)))


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
    sample = spot_sample(
        problem=HOSTILE, answer=HOSTILE, problem_id=HOSTILE, tier=HOSTILE, verdict=HOSTILE, feedback=HOSTILE
    )
    sample |= {"teacher_prompt": HOSTILE}
    sample["branches"][0] |= {"sampled": HOSTILE, "score_parts": {HOSTILE: 0.5}}
    sample["branches"][0]["candidates"][0] |= {"token": HOSTILE, "continuations": [HOSTILE], "verdicts": [HOSTILE]}
    sample["branches"][0]["candidates"][1]["continuations"] = [HOSTILE * 20]  # folded
    page = page_of(make_run(tmp_path / "run", [sample]), texts=[HOSTILE, '" onclick="x', "\n"])
    assert_harmless(page)
    text = Tags(page).text
    assert text.count("<script>document.title='owned'</script>") > 20
    assert "{{ 7*7 }}" in text


def test_hostile_names_stay_text_in_the_report(tmp_path):
    samples = [spot_sample(failed_turns=[[1, HOSTILE, HOSTILE]])]
    samples[0]["branches"][0]["sampled"] = HOSTILE
    files = make_run(tmp_path / "run", samples, [metrics_row(1)])
    (tmp_path / "run" / "dead_letters.jsonl").write_text(json.dumps({"reason": HOSTILE}) + "\n")
    page = report_page(read_report(files))
    assert_harmless(page)
    tags = Tags(page)
    labels = [attributes.get("aria-label") or "" for _, attributes in tags.tags]
    assert "".join([tags.text, *labels]).count("document.title='owned'") >= 4


def test_a_terminal_gets_no_escape_sequence_from_a_model(tmp_path):
    sample = spot_sample(problem=HOSTILE, feedback=HOSTILE, teacher_prompt=HOSTILE)
    sample["branches"][0]["score_parts"] = {HOSTILE: 0.5}
    sample["branches"][0]["candidates"][0] |= {"token": HOSTILE, "continuations": [HOSTILE]}
    number, record = make_run(tmp_path / "run", [sample]).sample("0")
    for colouring in colourings(record, [HOSTILE, "[red]", "\r"]):
        shown = terminal(sample_view(number, record, colouring))
        assert "\x1b]" not in shown
        assert "\x07" not in shown
        assert "\u202e" not in shown
        assert "[red]" in shown


def test_a_sample_shows_scores_candidates_probes_and_targets(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(teacher_prompt="<|user|>what? because")])
    number, record = files.sample("0")
    found = colourings(record, ["one ", "two ", "three"])
    assert [colouring.palette for colouring in found] == ["score", "advantage"]
    assert [token.level for token in found[0].tokens] == [1.0, 0.5, 0.0]  # root of the share of the highest
    assert [token.level for token in found[1].tokens] == pytest.approx([-0.1 / 3, 0.5, -1.0])
    assert [token.mark for token in found[0].tokens] == [1, None, None]
    assert "masked" in found[0].tokens[2].label

    for shown in (plain(terminal(sample_view(number, record, found[0]))), Tags(page_of(files)).text):
        for expected in (
            "<|user|>what? because",
            "position 0",
            "five",
            "50 %",
            "7 %",
            "60 %",
            "80 %",
            "✓ correct",
            "✗ wrong",
            "\\boxed{2}",
            "entropy H (share of log V) 0.3",
            "mean reward of the candidate's probes",
        ):
            assert expected.lower() in shown.lower(), expected
    assert re.search(r"▸ +“six”", plain(terminal(sample_view(number, record, found[0]))))


def test_a_sample_of_another_policy_shows_what_there_is(tmp_path):
    opd = {k: v for k, v in spot_sample().items() if k not in ("acquisition_score", "selected_positions", "branches")}
    grpo = {k: v for k, v in opd.items() if not k.startswith("teacher")} | {"advantage": -0.7, "left_out": None}
    group = grpo | {"reward": 0.0, "group_rewards": [0.0, 1.0, None, 1.0, 1.0]}
    bare = {"iteration": 1, "problem_id": "bare", "response_ids": [5, 7]}
    files = make_run(tmp_path / "run", [opd, grpo, bare, opd | {"gated_positions": [1]}, group])
    palettes = [
        [colouring.palette for colouring in colourings(files.sample(str(i))[1], ["a", "b", "c"])] for i in range(3)
    ]
    assert palettes == [["advantage"], ["surprise"], ["surprise"]]
    assert "advantage -0.700" in Tags(page_of(files, "1")).text
    rewards = "advantage -0.700 from reward 0: the group's are 0 1 none 1 1 (mean 0.75, standard deviation 0.5)"
    assert rewards in Tags(page_of(files, "4")).text
    page_of(files, "2")
    number, eopd = files.sample("3")
    (coloured,) = colourings(eopd, ["a", "b", "c"])
    assert [token.is_framed for token in coloured.tokens] == [False, True, False]
    framed = [
        attributes for tag, attributes in Tags(page_of(files, "3")).tags if "probed" in attributes.get("class", "")
    ]
    assert ["gate open" in each["aria-label"] for each in framed] == [True]
    shown = terminal(sample_view(number, eopd, coloured))
    assert "Underlined: the positions whose gate was open" in plain(shown)
    assert [span.start for span in response_text(coloured).spans if "underline" in str(span.style)] == [1]


def test_samples_are_found_by_number_and_by_their_latest_problem(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(i, f"p{i % 2}") for i in range(1, 5)])
    assert files.sample("2")[1].iteration == 3
    assert files.sample("p1") == (2, files.sample("2")[1])
    for missing in ("4", "p9"):
        with pytest.raises(DataError, match="number from 0 to 3, or a problem's id"):
            files.sample(missing)


def test_a_problem_whose_id_is_a_number_is_found_when_no_sample_has_it(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(1, "1"), spot_sample(2, "4492"), spot_sample(3, "4492")])
    assert files.sample("1")[0] == 1
    assert files.sample("4492")[0] == 2
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "4492"]).output
    assert "the last sample of 4492, which has 1, 2" in shown
    with pytest.raises(DataError, match="no samples: they are written as each"):
        make_run(tmp_path / "empty").sample("0")


def test_a_sample_no_student_wrote_is_coloured_by_the_teacher(tmp_path):
    sample = spot_sample(teacher_logprobs=[-0.5, -5.0, None], teacher_entropy_nats=[0.5, 4.0, None], branches=[])
    for name in ("acquisition_score", "behavior_logprobs", "version"):
        del sample[name]
    files = make_run(tmp_path / "run", [sample])
    surprise, entropy = colourings(files.sample("0")[1], ["a", "b", "c"])
    assert "under the teacher" in surprise.title
    assert [token.level for token in surprise.tokens] == pytest.approx([0.1, 1.0, 0.0])
    assert entropy.title == "Teacher entropy, nats"
    assert [token.level for token in entropy.tokens] == pytest.approx([0.25, 1.0, 0.0])
    text = Tags(page_of(files)).text
    assert "iteration 1 · 3 tokens" in text
    assert "weights" not in text
    assert "student" not in text


def test_a_sample_that_several_wrote_says_who_wrote_which_tokens(tmp_path):
    writers = [[0, 1, "0.3"], [1, 2, None], [2, 3, "0.4"]]
    given = {"writers": writers, "behavior_logprobs": [-0.5, None, -1.0], "branches": [], "version": "0.3"}
    del (sample := spot_sample(**given))["acquisition_score"]
    files = make_run(tmp_path / "run", [sample])
    (coloured,) = colourings(files.sample("0")[1], ["a", "b", "c"])
    assert ["written by others" in token.label for token in coloured.tokens] == [False, True, False]
    assert ["written by weights 0.4" in token.label for token in coloured.tokens] == [False, False, True]
    for shown in (Tags(page_of(files)).text, plain(terminal(sample_view(*files.sample("0"), coloured), width=200))):
        assert "written by weights 0.3 (0), others (1), weights 0.4 (2)" in shown


def test_a_turn_and_its_answer_begin_a_line_and_the_answer_to_a_killed_one_is_red(tmp_path):
    writers = [[0, 1, "0.3"], [1, 2, "environment"], [2, 3, "0.4"], [3, 4, "environment"], [4, 1 << 60, "environment"]]
    failed = [[1, "killed", "killed: it took longer than 1 s"], [2, "error", "KeyError: 'tea'"]]
    numbers = {"behavior_logprobs": [-0.5, None, -1.0, None], "response_ids": [6, 7, 6, 7], "branches": []}
    sample = spot_sample(writers=writers, failed_turns=failed, **numbers)
    files = make_run(tmp_path / "run", [{**sample, "acquisition_score": None, "teacher_logprobs": None}])
    coloured = colourings(files.sample("0")[1], ["ask", "late", "again", "KeyError"])[0]
    assert [(each.is_read, each.is_of_killed) for each in coloured.tokens] == [
        *((False, False), (True, True), (False, False), (True, False))
    ]
    text = response_text(coloured)
    assert text.plain == "ask\nlate\nagain\nKeyError"
    assert [str(span.style) for span in text.spans if text.plain[span.start : span.end] in ("late", "KeyError")] == [
        *("red", "dim")
    ]
    page = page_of(files, texts=["ask", "late", "again", "KeyError"])
    assert re.findall(r'class="token( read(?: killed)?)? *"[^>]*>(\w+)<', page) == [
        *(("", "ask"), (" read killed", "late"), ("", "again"), (" read", "KeyError"))
    ]
    shown = page.partition('class="response">')[2].partition("</div>")[0]
    assert re.sub("<[^>]*>", "", shown) == "ask\nlate\nagain\nKeyError"


def test_scores_are_named_after_what_chose_the_positions(tmp_path):
    record = make_run(tmp_path / "run", [spot_sample()]).sample("0")[1]
    titles = [
        colourings(record, "abc", PolicySettings(selection))[0].title for selection in ("score", "entropy", "mine:by")
    ]
    assert titles == [
        "Acquisition score (root scale)",
        "Teacher entropy, as a share of the largest possible (root scale)",
        "Score of mine:by (root scale)",
    ]
    make_run(tmp_path / "by_entropy", [spot_sample()], policy="{kind: spot, selection: entropy}")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "by_entropy"), "0"]).output
    assert "Teacher entropy, as a share" in shown
    assert "entropy share 0.04" in (tmp_path / "by_entropy" / "inspect-0.html").read_text()


@pytest.mark.parametrize(
    ("selection", "looks"),
    [
        ("score", "Where the score looks"),
        ("entropy", "Where the teacher is uncertain"),
        ("mine:by", "Where your score looks"),
        ("earliest", None),
        ("random", None),
    ],
)
def test_the_report_names_the_rule_and_shows_its_scores_where_it_has_some(tmp_path, selection, looks):
    sample = spot_sample() if looks else {k: v for k, v in spot_sample().items() if k != "acquisition_score"}
    files = make_run(tmp_path / "run", [sample], [metrics_row(1)], policy=f"{{kind: spot, selection: '{selection}'}}")
    report = read_report(files)
    assert dict(report.facts)["selection"] == selection
    titles = {plot.title for section in report.sections for plot in section.plots}
    assert {title for title in titles if "looks" in title or "uncertain" in title} == ({looks} if looks else set())
    assert "Response" in page_of(files)


def test_without_verifier_guidance_pages_speak_of_no_probe(tmp_path):
    guided = make_run(tmp_path / "guided", [spot_sample()], [metrics_row(1)])
    assert "probed" in Tags(report_page(read_report(guided))).text
    policy = "{kind: spot, selection: random, verifier_guidance: false}"
    files = make_run(tmp_path / "run", [spot_sample()], [metrics_row(1)], policy=policy)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "0"]).output
    assert "Underlined and numbered: the positions that were selected." in shown
    page = (tmp_path / "run" / "inspect-0.html").read_text()
    assert "the teacher's own prior" in page
    titles = {plot.title for section in read_report(files).sections for plot in section.plots}
    assert {"Positions selected", "Where positions were selected"} <= titles
    assert not titles & {
        "Accuracy of probes",
        "Calibration shift",
        "Where the score looks",
        "Positions probed and kept",
    }
    for text in (shown, Tags(page).text.partition("Branches")[2]):
        assert "value" not in text
        assert "before" not in text


def test_pages_say_so_where_the_gate_is_off_and_where_outcomes_are_shuffled(tmp_path):
    policy = "{kind: spot, gate: false, shuffle_outcomes: true, baseline: 0.5}"
    row = metrics_row(1) | {"spot/value_variance": 0.05}
    files = make_run(tmp_path / "run", [spot_sample()], [row], policy=policy)
    path = tmp_path / "run" / "config.yaml"
    report = Tags(report_page(read_report(files))).text
    assert "policy.gate is false" in report
    assert "Variance of the values" not in report  # of one probe, as earlier versions wrote it, it is mostly noise
    path.write_text(path.read_text().replace("kind: spot", "kind: spot, probes: 2"))
    assert "Variance of the values" in Tags(report_page(read_report(files))).text
    CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "0"])
    assert "policy.shuffle_outcomes" in (page := (tmp_path / "run" / "inspect-0.html").read_text())
    assert "the target less a share of the prior (policy.baseline)" in page


def test_of_candidates_that_look_alike_only_the_sampled_one_is_marked(tmp_path):
    sample = spot_sample()
    sample["branches"][0]["sampled"] = "\ufffd"
    for candidate in sample["branches"][0]["candidates"]:
        candidate["token"] = "\ufffd"  # two halves of a character
    files = make_run(tmp_path / "run", [sample])
    number, record = files.sample("0")
    rows = [line for line in plain(terminal(sample_view(number, record, colourings(record, "abc")[0]))).splitlines()
            if "\ufffd" in line and "%" in line]  # fmt: skip
    assert [row.lstrip().startswith("▸") for row in rows] == [False, True]
    assert page_of(files).count(", sampled</span>") == 1


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"acquisition_score": [0.1, 0.2]}, "acquisition_score not shown: 2 values for 0 tokens"),
        ({"branches": [{"position": 3}]}, "Position 3"),
        ({"response_ids": [5, 6], "branches": [{"position": 9}]}, "Position 9"),
        ({"response_ids": [5, 6], "branches": [{"position": -9}]}, "Position -9"),
        ({"response_ids": [5, 6], "behavior_logprobs": [None, -1.0], "teacher_logprobs": [-1.0, None]}, "Advantage"),
        ({"response_ids": [5, 6], "behavior_logprobs": [-1.0, -1.0], "teacher_logprobs": [-1.0]}, "teacher_logprobs n"),
        ({"response_ids": [5, 6], "acquisition_score": [-1.0, 2.0]}, "Acquisition score"),
        ({"response_ids": [5, 6], "acquisition_score": [-1.0, None]}, "Nothing recorded"),
        ({"branches": [{"position": 0, "score_parts": {"gap": None}, "candidates": [{"token_id": 5}]}]}, "gap G –"),
    ],
)
def test_whatever_a_policy_leaves_out_or_gets_wrong_is_still_shown(tmp_path, record, said):
    make_run(tmp_path / "run", [{"iteration": 1} | record], [metrics_row(1)])
    run, runner = str(tmp_path / "run"), CliRunner()
    for arguments in (["report", run], ["inspect", run], ["inspect", run, "0"]):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert said in Tags((tmp_path / "run" / "inspect-0.html").read_text()).text


def test_a_run_killed_in_the_middle_of_a_line_is_read_up_to_it(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(1), spot_sample(2)], [metrics_row(1), metrics_row(2)])
    for name in ("samples.jsonl", "metrics.jsonl"):
        path = tmp_path / "run" / name
        path.write_bytes(path.read_bytes()[:-30])
    assert [sample.iteration for sample in files.samples.read()] == [1]
    assert files.sample("0")[1].iteration == 1
    assert len(files.metrics()) == 1
    with pytest.raises(DataError, match="no sample '1'"):
        files.sample("1")
    assert "The run ended early" in report_page(read_report(files))


def test_damage_elsewhere_is_named_by_its_line(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(), spot_sample()])
    path = tmp_path / "run" / "samples.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"iteration": 1', b'{"iteration": "x"', 1))
    with pytest.raises(DataError, match=r"samples.jsonl:1: .*iteration"):
        files.samples.read()
    path.write_bytes(path.read_bytes().replace(b'"x"', b'1, "problem_id": "\xff"', 1))
    with pytest.raises(DataError, match=r"samples.jsonl:1: .*can't decode byte"):
        files.samples.read()


def test_a_page_about_a_run_whose_name_is_no_utf_8_is_written(tmp_path):
    directory = tmp_path / os.fsdecode(b"run \xff")
    make_run(directory, [spot_sample()], [metrics_row(1)])
    # A process of its own, since only a whole one prepares its screen for such names.
    subprocess.run([sys.executable, "-m", "spot_async", "report", directory], check=True, capture_output=True)
    assert "<title>" in (directory / "report.html").read_text()


def test_the_commands_write_pages_and_fail_in_one_line(tmp_path):
    make_run(tmp_path / "run", [spot_sample()], [metrics_row(1)])
    run, runner = str(tmp_path / "run"), CliRunner()
    assert "p0" in runner.invoke(app, ["inspect", run]).output
    assert runner.invoke(app, ["inspect", run, "--verdict", "wrong"]).output.startswith("0 samples")
    assert runner.invoke(app, ["inspect", run, "p0"]).exit_code == 0
    assert (tmp_path / "run" / "inspect-0.html").exists()
    reported = runner.invoke(app, ["report", run, "--html", str(tmp_path / "page.html")])
    assert reported.exit_code == 0
    files = RunFiles(tmp_path / "run")
    assert reported.output.startswith(read_report(files).bottleneck.sentence[:60])
    assert "page: " in reported.output
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    for arguments in (["report", str(tmp_path)], ["inspect", run, "7"], ["report", run, "--html", "/nowhere/page"]):
        failed = runner.invoke(app, arguments)
        assert failed.exit_code == 2
        assert failed.exception is None or isinstance(failed.exception, SystemExit)


def test_candidates_that_are_special_tokens_are_named(tmp_path):
    """Their text is empty, but an end token among the candidates is what one wants to see."""
    sample = spot_sample()
    sample["branches"][0]["candidates"][0] |= {"token_id": 1, "token": ""}
    run = tmp_path / "run"
    files = make_run(run, [sample])
    assert "token 1 value" in Tags(page_of(files)).text  # nobody knows its name
    (run / "student").symlink_to(EXAMPLE_STUDENT)
    shown = CliRunner().invoke(app, ["inspect", str(run), "0"]).output
    assert "“<|end|>”" in shown
    assert "“<|end|>” value" in Tags((run / "inspect-0.html").read_text()).text


def shown_by_a_browser(page, profile):
    """The document that chromium makes of a page, its script run."""
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
               "--disable-background-networking", "--disable-component-update",
               f"--user-data-dir={profile}"]  # fmt: skip
    command = [*browser, "--dump-dom", f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_pages_of_samples_lead_to_each_other_and_to_the_list(tmp_path):
    samples = [spot_sample(1), spot_sample(2), spot_sample(2), spot_sample(2)]
    samples[2]["problem_id"] = "other"
    make_run(tmp_path / "run", samples)
    page = tmp_path / "pages" / "all #1 100%.html"
    folder = page.parent / "all #1 100%-samples"
    page.parent.mkdir()
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "run"), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert f"page: {page}\n3 pages of samples: {folder}\n" in done.output
    assert sorted(each.name for each in page.parent.iterdir()) == [folder.name, page.name]
    assert sorted(each.name for each in folder.iterdir()) == ["inspect-1.html", "inspect-2.html", "inspect-3.html"]
    back = "../all%20%231%20100%25.html"
    assert links(folder / "inspect-1.html") == [back, "inspect-2.html", "inspect-3.html"]
    assert links(folder / "inspect-2.html") == [back, "inspect-1.html", "inspect-3.html"]
    assert links(folder / "inspect-3.html") == [back, "inspect-2.html", "inspect-1.html"]


def links(page):
    tags = Tags(page.read_text()).tags
    return [attributes["href"] for tag, attributes in tags if tag == "a" and attributes["href"][0] != "#"]


def test_a_report_leads_to_the_samples_of_the_iterations_that_have_some(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_command, "MOST_PAGES", 2)
    run = tmp_path / "run"
    make_run(run, [spot_sample(i) for i in (2, 2, 4)], [metrics_row(i) for i in (1, 2, 3, 4)])
    done = CliRunner().invoke(app, ["report", str(run)])
    assert f"2 pages of 3 samples: {run / 'report-samples'}\n" in done.output
    listed = "report-samples/samples.html"
    assert set(links(run / "report.html")) == {listed, f"{listed}#iteration-2", f"{listed}#iteration-4"}
    assert links(run / listed) == ["../report.html"]
    assert links(run / "report-samples" / "inspect-2.html")[:3] == ["../report.html", "samples.html", "inspect-0.html"]


def test_of_long_responses_fewer_have_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_command, "MOST_TOKENS", 6)
    make_run(tmp_path / "run", [spot_sample() for _ in range(3)], [metrics_row(1)])
    assert "2 pages of 3 samples" in CliRunner().invoke(app, ["report", str(tmp_path / "run")]).output


@pytest.mark.parametrize("samples_every", [0, 1])
def test_a_report_without_samples_leads_nowhere(tmp_path, samples_every):
    make_run(tmp_path / "run", [], [metrics_row(1)])
    with (tmp_path / "run" / "config.yaml").open("a") as file:
        file.write(f"run: {{samples_every: {samples_every}}}\n")
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run")]).exit_code == 0
    assert links(tmp_path / "run" / "report.html") == []
    assert not (tmp_path / "run" / "report-samples").exists()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_lists_all_samples_and_runs_the_pages_own_script_alone(tmp_path):
    samples = [spot_sample(i) for i in (1, 2)]
    samples[0]["problem_id"] = "</script><script>document.title='owned'</script>"
    files = make_run(tmp_path / "run", samples)
    page = tmp_path / "page.html"
    page.write_text(view.samples_page("run", files.samples.read(), [1], "iteration 2"), encoding="utf-8")
    shown = shown_by_a_browser(page, tmp_path / "profile")
    assert "<title>Samples of run</title>" in shown
    assert "2 of 2 samples" in shown
    assert '<a href="inspect-1.html">1</a>' in shown
    assert ">&lt;/script&gt;&lt;script&gt;document.title='owned'&lt;/script&gt;</td>" in shown
    page.write_text(page.read_text().replace("show();", "show(); document.title = 'changed';"), encoding="utf-8")
    assert "<title>Samples of run</title>" in shown_by_a_browser(page, tmp_path / "profile")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_hostile_text_and_runs_none_of_it(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(problem=HOSTILE)])
    (tmp_path / "page.html").write_text(page_of(files), encoding="utf-8")
    shown = shown_by_a_browser(tmp_path / "page.html", tmp_path / "profile")
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
