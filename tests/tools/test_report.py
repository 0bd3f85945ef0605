"""The report of a run: its curves, its bottleneck, its table, and what it says about what is missing."""

from __future__ import annotations

import io
import re
import threading
import time

import msgspec
import pytest
import yaml
from rich.console import Console
from run_files import CONFIG, Tags, make_run, metrics_row, spot_sample

from spot_async.cli.runs import show_outcome
from spot_async.errors import DataError
from spot_async.evaluation.metrics import BenchmarkFigures, Estimate, EvaluationFigures
from spot_async.run_directory.layout import RunDirectory
from spot_async.run_directory.reading import RunFiles
from spot_async.running.summary import TrainOutcome
from spot_async.stages.services import STAGE_SERVERS
from spot_async.telemetry.bottleneck import RunTimes, StageUse, judge
from spot_async.telemetry.totals import limit_use, run_times, stage_slots
from spot_async.tools.inspect.held_out import ResultTable
from spot_async.tools.inspect.inspect_command import write_report
from spot_async.tools.inspect.report import length_histogram, read_report, report_page
from spot_async.tools.inspect.troubles import troubles_at


def write_evaluation(run, when, avg=None, error=None, pass_at=None, settings=None, samples=8):
    """Write the file of an evaluation of one benchmark; of none without `avg`."""
    mean = None if avg is None else Estimate(value=avg, standard_error=error)
    benchmark = BenchmarkFigures(
        problems=1, samples=samples, tokens=1, mean_tokens=Estimate(value=1.0, standard_error=None), truncated=0.0,
        verdicts={}, avg=mean, pass_at={k: Estimate(value=v, standard_error=None) for k, v in (pass_at or {}).items()},
    )  # fmt: skip
    figures = EvaluationFigures(
        model="m", model_fingerprint="f", settings=settings or {}, settings_fingerprint="s",
        benchmarks={} if mean is None else {"one": benchmark}, macro=None, tokens=1, truncated=0.0, verdicts={},
    )  # fmt: skip
    (run / f"evaluation-{when}.json").write_bytes(msgspec.json.encode(figures))


def test_a_report_has_its_curves_its_verdict_and_its_table(tmp_path):
    after = EVALUATED | {"tiers": {"all": TIER | {"avg": 0.5}}}
    summary = {"prompts": {"trained": 8, "left_over": 1}, "before": EVALUATED, "after": after}
    summary["change"] = {"all": {"avg": 0.25, "avg_standard_error": 0.04}}
    files = make_run(tmp_path / "run", [spot_sample(i) for i in (1, 2, 3, 4)], map(metrics_row, (1, 2, 3, 4)), summary)
    drawn = {"evaluation.temperature": 0.6, "evaluation.top_p": 0.8, "evaluation.samples": 8}
    write_evaluation(tmp_path / "run", "after", settings=drawn)
    report = read_report(files)
    assert "temperature 0.6, top-p 0.8, 8 samples a problem; training draws at temperature 1, " in report.results.note
    shares = re.findall(r"\d+ %(?: of that for \w+)?", report.bottleneck.sentence)
    assert shares == ["80 %", "88 % of that for probe", "12 % of that for rollout"]
    assert "(7.1 of 16 probe requests in fl" in report.bottleneck.advice[0]  # 5 over 10 s, in 7 s of waiting for them
    assert report.results.rows[0][2:] == ("25.0 ±5.0", "50.0 ±5.0", "+25.0 ±4.0", "50.0 ±10.0", "50.0 ±10.0")
    assert report.notes == ()
    assert report.headline == "25.0 \N{RIGHTWARDS ARROW} 50.0 % held out (Avg@8), +25.0 ±4.0"
    text = Tags(report_page(report)).text
    assert text.index(report.headline) < text.index("Results on held-out") < text.index("Where the time went")
    titles = {plot.title for section in report.sections for plot in section.plots}
    assert {"Loss and its parts", "Calibration shift", "Which tokens were probed", "Time per phase"} - titles == {
        "Calibration shift"
    }
    assert "8 trained, 1 left over" in Tags(report_page(report)).text


def test_a_run_beside_an_environment_shows_its_turns_and_the_most_frequent_errors(tmp_path):
    played = {"turns": 1.5, "read_share": 0.2, "calls": 0.9, "errors": 0.5, "killed": 0.25, "unreadable": 0.0}
    played |= {"out_of_turns": 0.25, "out_of_tokens": 0.0, "reward": 0.5}
    rows = [metrics_row(i) | {f"environment/{name}": share for name, share in played.items()} for i in (1, 2)]
    texts = [(number, f"KeyError: 'item {number}'") for number in range(1, 12) for _ in range(number)]
    samples = [spot_sample(failed_turns=[[turn, "error", text], [12, "killed", "late" * 99]]) for turn, text in texts]
    files = make_run(tmp_path / "run", samples, rows)
    (files.path / "config.yaml").write_text("policy: {kind: opd}\nenvironment: {replayable: false, sandbox: none}\n")
    report = read_report(files)
    (section,) = (each for each in report.sections if each.title == "Turns")
    drawn = {plot.title: plot.figure for plot in section.plots}
    assert "iteration 2: anything 90 %, an error 50 %, killed 25 %" in drawn["What the environment answered"]
    assert {"Turns", "Ends without an answer", "Tokens that were only read", "Reward of the environment"} < {*drawn}
    first, *rest = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", drawn["Most frequent errors"])
    assert (first[0], len(first[1]), first[2]) == ("killed", 201, "66")
    assert rest == [("error", f"KeyError: &#39;item {number}&#39;", str(number)) for number in range(11, 2, -1)]
    assert {*report.facts} >= {
        ("resuming", "not exact: environment.replayable=false"),
        ("episodes", "not shut in: environment.sandbox=none"),
    }
    (files.path / "config.yaml").write_text("environment: 5\n")
    with pytest.raises(DataError, match="environment is no section"):
        read_report(files)
    plain = read_report(make_run(tmp_path / "plain", [spot_sample()], [metrics_row(1)]))
    assert "Turns" not in {each.title for each in plain.sections}
    assert not {"resuming", "episodes"} & dict(plain.facts).keys()


def test_a_watched_report_is_written_again_as_the_run_grows_and_for_the_last_time_when_it_ends(tmp_path):
    files, page = make_run(tmp_path / "run", [], [metrics_row(1)]), tmp_path / "run" / "report.html"
    directory = RunDirectory.open(files.path)
    watching = threading.Thread(
        target=write_report, args=(Console(file=io.StringIO()), files.path, None), kwargs={"watch_s": 0.02}
    )
    end_s = time.monotonic() + 60
    with directory.locked():
        watching.start()
        for iteration in (1, 2, 3):
            while not (page.exists() and f"iterations: {iteration} of 4" in (text := Tags(page.read_text())).text):
                assert watching.is_alive()
                assert time.monotonic() < end_s
            assert ("meta", {"http-equiv": "refresh", "content": "0"}) in text.tags
            assert re.search(r"left: about \d+ s.*written: \d\d:\d\d:\d\d, and every 0 s", text.text)
            directory.append("metrics.jsonl", [metrics_row(iteration + 1)])
        directory.write_summary({})
    watching.join(timeout=60)
    assert not watching.is_alive()
    ended = Tags(page.read_text())
    assert "iterations: 4 of 4" in ended.text
    assert not [attributes for _, attributes in ended.tags if attributes.get("http-equiv") == "refresh"]


@pytest.mark.parametrize(
    ("cells", "headline"),
    [
        (("34.4 ±3.6", "32.8 ±3.5", "-1.7 ±3.7"), "34.4 → 32.8 % held out (Avg@1), -1.7 ±3.7: no measurable change"),
        (("32.5 ±1.6", "51.2 ±1.7", "+18.8 ±1.8"), "32.5 → 51.2 % held out (Avg@1), +18.8 ±1.8"),
        (("0.0", "100.0", "+100.0"), "0.0 → 100.0 % held out (Avg@1), +100.0"),
        (("32.5 ±1.6",), "32.5 % held out (Avg@1) ±1.6"),
    ],
)
def test_the_headline_says_what_training_came_to(cells, headline):
    headings = ("tier", "n", *(f"Avg@1 {when}" for when in ("before", "after", "change")[: len(cells)]))
    assert ResultTable(headings, (("all", "180", *cells),), "").headline == headline


def test_what_bent_an_iterations_times_is_marked_in_the_plots_of_servers(tmp_path):
    rows = [metrics_row(i) for i in (1, 2, 3, 4)]
    for row in rows:
        row["replica/student-0/mean_in_flight"] = 3.0
    rows[1]["replica/student-0/limit_decreases"] = 2.0
    rows[2] |= {"replica/teachers.a-1/restarts": 1.0, "stage/probe/retried": 3.0}
    rows[3] |= {"stage/probe/retried": 1.0, "replica/student-0/limit_decreases": 0.0}  # of 8 requests
    assert troubles_at(rows) == {
        2: "iteration 2: student-0: limit lowered 2 x",
        3: "iteration 3: teachers.a-1: restarted 1 x, probe: 3 attempts made again",
    }
    page = report_page(read_report(make_run(tmp_path / "run", [], rows)))
    assert page.count('aria-label="iteration 2: student-0: limit lowered 2 x"') >= 2
    assert "Upright lines: limits lowered, restarts, many attempts made again." in page


def test_samples_are_read_once_and_anew_if_the_run_went_back(tmp_path):
    files = make_run(tmp_path / "run", [spot_sample(i) for i in (1, 1, 2)])
    path, samples = tmp_path / "run" / "samples.jsonl", files.samples
    first, *_ = path.read_bytes().splitlines(keepends=True)
    assert len(samples.read()) == 3
    with path.open("ab") as file:
        file.write(first + first[:9])  # another one, and the beginning of the next
    assert len(samples.read()) == 4
    whole = path.read_bytes()
    path.write_bytes(b"x" * (len(whole) - 9) + first)  # what was read is not looked at again
    assert len(samples.read()) == 5
    path.write_bytes(first)
    assert len(samples.read()) == 1
    path.write_bytes(first + b"{}\n{]\n")
    with pytest.raises(DataError, match=rf"samples.jsonl, byte {len(first)}"):
        samples.read()


def test_evaluations_during_a_run_are_a_curve_with_errors_and_the_best_is_named(tmp_path):
    shares = {1: 0.25, 2: 0.5, 3: 0.5}
    for name, iterations in (("run", 4), ("even", 3)):
        make_run(tmp_path / name, [], [metrics_row(i + 1) for i in range(iterations)])
        for iteration, share in shares.items():
            write_evaluation(tmp_path / name, f"{iteration:06d}", share, 0.125, {8: 0.75})
    files = RunFiles(tmp_path / "run")
    report = read_report(files)
    (card,) = (plot for plot in report.sections[0].plots if plot.title == "Accuracy on held-out problems")
    assert "iteration 2: Avg@8 50 %, Pass@8 75 %" in card.figure
    assert card.figure.count('class="whisker') == 3  # Pass@8 is written without errors
    assert card.figure.count('class="mark"') == 1
    assert dict(report.facts)["best"] == "iteration 2, Avg@8 50.0 ±12.5 %"  # the first of equals
    write_evaluation(tmp_path / "run", "before", 0.625)
    report = read_report(files)
    assert dict(report.facts)["best"] == "iteration 2, Avg@8 50.0 ±12.5 %, no better than before training"
    assert "iteration 0: Avg@8 62 %" in report.sections[0].plots[0].figure
    write_evaluation(tmp_path / "run", "after", 0.875, 0.125, {8: 1.0})
    report = read_report(files)  # the last evaluation during training was before the last iteration
    assert dict(report.facts)["best"] == "iteration 4, Avg@8 87.5 ±12.5 %"
    assert "iteration 4: Avg@8 88 %, Pass@8 100 %" in report.sections[0].plots[0].figure
    write_evaluation(tmp_path / "even", "after", 0.875, 0.125, {8: 1.0})
    report = read_report(RunFiles(tmp_path / "even"))
    assert "88 %" not in report.sections[0].plots[0].figure  # it is that of the last iteration


def test_held_out_figures_of_an_asynchronous_run_stand_at_the_weights_that_were_measured(tmp_path):
    rows = [metrics_row(i) for i in range(1, 17)]
    rows[5] |= {"evaluation/iteration": 5.0, "evaluation/avg@1": 0.25}
    files = make_run(tmp_path / "run", [], rows)
    for iteration, share in ((5, 0.25), (10, 0.5), (15, 0.75)):
        write_evaluation(tmp_path / "run", f"{iteration:06d}", share, samples=1)
    write_evaluation(tmp_path / "run", "after", 0.625, samples=1)
    report = read_report(files)
    assert dict(report.facts)["best"] == "iteration 15, Avg@1 75.0 %"
    figure = report.sections[0].plots[0].figure
    shown = [f"iteration {iteration}: Avg@1 {share}" for iteration, share in ((5, 25), (10, 50), (15, 75), (16, 62))]
    assert [each for each in shown if each in figure] == shown


def test_a_run_without_teacher_or_reference_section_is_reported(tmp_path):
    reference = {"wait/reference_s": 7.0, "stage/reference/requests": 8.0, "stage/reference/mean_in_flight": 5.6}
    row = {name: value for name, value in metrics_row(1).items() if "probe" not in name and "spot" not in name}
    signal = {"train/advantage_mean": 0.1, "grpo/no_signal": 0.25, "grpo/left_out": 0.0}
    models = "teacher: null\nreference: null"
    files = make_run(tmp_path / "run", [], [row | reference | signal], policy=f"{{kind: grpo}}\n{models}")
    report = read_report(files)
    assert "teacher" not in dict(report.facts)
    assert run_times(files.metrics(), files.config()).stages["reference"].slots is None  # it scores
    notes = {plot.title: plot.note for section in report.sections for plot in section.plots}
    assert notes["Advantage"] == "Mean per token, as the policy gives it."
    assert "Responses without a signal" in notes
    assert "Gated positions" not in notes
    assert "Teacher entropy" not in notes


@pytest.mark.parametrize(
    ("backend", "down", "slots"),
    [("slots: 8, replicas: 2", 0, 16), ("slots: 8, replicas: 2", 1, 8), ("slots: 8, url: [a, b]", 0, None)],
)
def test_slots_are_those_of_all_servers_that_run_and_known_of_servers_that_we_start(backend, down, slots):
    config = yaml.safe_load(f"student: {{backend: {{{backend}}}}}")
    assert stage_slots(config, "probe", down) == slots


@pytest.mark.parametrize("stage", ["score", "candidates", "verify", "reference"])
def test_what_does_not_generate_takes_no_slots(stage):
    config = {role: {"backend": {"slots": 8}} for role in ("student", "teacher", "reference")}
    assert stage_slots(config, stage) is None
    assert stage_slots(config, "teacher_response") == 8


ASYNCHRONOUS = {"lag/0": 100.0, "lag/1": 300.0, "train/lag_mean": 0.75, "train/lag_max": 1.0,
                "train/effective_sample_share": 0.9, "train/staleness_kl": 0.01, "train/mismatch_kl": 0.001,
                "publish/wait_for_weights_s": 1.0, "publish/drain_s": 6.0, "publish/update_weights_s": 2.0,
                "time/wait_for_batch_s": 3.0, "time/train_s": 3.0, "time/update_weights_s": 4.0}  # fmt: skip


def test_a_run_with_staleness_says_how_stale_it_was_and_what_publishing_did(tmp_path, capsys):
    rows = [metrics_row(i) | ASYNCHRONOUS | {"weights/served": i - 1.0} for i in (1, 2)]
    files = make_run(tmp_path / "run", [], rows)
    (tmp_path / "run" / "config.yaml").write_text(CONFIG + "max_staleness: 2\n")
    report = read_report(files)
    assert dict(report.facts)["staleness"] == "at most 2; of the tokens 25 % lag 0, 75 % lag 1 (mean 0.75)"
    assert report.bottleneck.sentence.startswith("Publishing bound: the trainer waited 40 % of the time")
    assert "75 % of its work waiting for requests under way" in report.bottleneck.sentence
    (section,) = (each for each in report.sections if each.title == "Staleness")
    figures = {plot.title: plot.figure for plot in section.plots}
    assert "lag 1:  75 %" in figures["Lag of tokens"]
    assert "iteration 2: trained 2, served 1" in figures["Weights trained and served"]
    assert "drain 6" in figures["What publishing did"]
    assert {"Lag by iteration", "What old samples are worth", "What staleness changes"} < figures.keys()
    write_report(Console(), files.path, None)
    assert "staleness: at most 2; of the tokens 25 % lag 0" in " ".join(capsys.readouterr().out.split())


def test_in_a_run_with_staleness_servers_are_used_all_the_time(tmp_path):
    """A strict run's requests run only while the trainer waits for them."""
    row, config = metrics_row(1) | ASYNCHRONOUS, yaml.safe_load(CONFIG)
    assert run_times([row], config).stages["probe"].in_flight == pytest.approx(5 * 10 / 7)
    assert limit_use(row, config, "probe") == pytest.approx(1.0)
    config["max_staleness"] = 1
    assert run_times([row], config).stages["probe"].in_flight == pytest.approx(5.0)
    assert limit_use(row, config, "probe") == pytest.approx(5 / 16)


def test_a_strict_run_says_nothing_of_staleness_but_what_it_would_bring(tmp_path):
    report = read_report(make_run(tmp_path / "run", [], [metrics_row(i) for i in (1, 2, 3)]))
    assert "Staleness" not in [section.title for section in report.sections]
    assert "staleness" not in dict(report.facts)
    assert report.bottleneck.advice[-1] == (
        "an iteration takes 10 s: spot-async simulate CONFIG --from RUN says how long it would take with "
        "max_staleness=1"
    )


def test_a_run_of_soft_targets_alone_has_no_advantage(tmp_path):
    row = metrics_row(1) | {"teacher/entropy_nats": 0.2, "train/advantage_mean": 0.0, "train/loss_branch": 0.5}
    row |= {"replica/student-1/limit": 64.0, "replica/student-1/mean_in_flight": 40.0, "replica/teacher/limit": 512.0}
    report = read_report(make_run(tmp_path / "run", [], [row]))
    figures = {plot.title: plot.figure for section in report.sections for plot in section.plots}
    assert "Advantage" not in figures
    assert "Teacher entropy" in figures
    assert "soft targets" in figures["Loss and its parts"]
    let_in = figures["Servers: requests let in"]
    assert [line in let_in for line in ("student-1: limit", "student-1: in flight", "teacher: limit")] == [True] * 3
    assert "teacher: in flight" not in let_in


def test_of_many_servers_and_stages_no_two_look_alike_and_the_page_knows_all_looks(tmp_path):
    names = [*(f"student-{i}" for i in range(1, 7)), "teacher"]
    row = {f"replica/{name}/{figure}": 64.0 for name in names for figure in ("limit", "mean_in_flight")}
    row |= {f"wait/{stage}_s": 1.0 for stage in (*STAGE_SERVERS, "nothing")}
    row |= {f"stage/{stage}/requests": 8.0 for stage in STAGE_SERVERS}
    report = read_report(make_run(tmp_path / "run", [], [metrics_row(i) | row for i in (1, 2)]))
    figures = {plot.title: plot.figure for section in report.sections for plot in section.plots}
    looks = [
        re.findall(rf'<{mark} class="([^"]*)"', figures[title])
        for mark, title in (("polyline", "Servers: requests let in"), ("polygon", "What the trainer waited for"))
    ]
    assert [len(each) for each in looks] == [len(set(each)) for each in looks] == [14, 9]
    page = report_page(report)
    for name in {name for each in looks for look in each for name in look.split()} - {"d0"}:  # which is no dash
        assert re.search(rf"\.{name} {{", page), name
    assert [look.split()[1] for look in looks[0][::2]] == [look.split()[1] for look in looks[0][1::2]]  # of one server


def test_bins_of_lengths_are_round_and_hold_every_response():
    figure = length_histogram([(1, 0), (1, 146), (2, 146), (2, 10)])
    shares = dict(re.findall(r"\"(\d+ to \d+) tokens: all (\d+) %", figure))
    assert {bin_: share for bin_, share in shares.items() if share != "0"} == {
        "0 to 10": "25", "10 to 20": "25", "140 to 150": "50"
    }  # fmt: skip


def test_thirds_are_of_the_iterations_that_have_samples():
    figure = length_histogram([(20, 5), (40, 15), (60, 25), (80, 35), (100, 45), (101, 45)])
    shares = re.findall(r"\"(\d+) to \d+ tokens: (first|last) third (\d+) %", figure)
    assert {(part, int(bin_) // 10 * 10): int(share) for bin_, part, share in shares if share != "0"} == {
        ("first", 0): 50, ("first", 10): 50, ("last", 40): 100
    }  # fmt: skip
    assert "all 50 %" in length_histogram([(20, 5), (40, 15)])


@pytest.mark.parametrize(("p99", "named"), [(0.2, "p99 and longest"), (0.1, "longest")])
def test_of_few_ticks_the_longest_lag_is_drawn_once(tmp_path, p99, named):
    lags = {"loop/lag_p50_s": 0.01, "loop/lag_p99_s": p99, "loop/lag_max_s": 0.2}
    report = read_report(make_run(tmp_path / "run", [], [metrics_row(i) | lags for i in (1, 2)]))
    (figure,) = (plot.figure for each in report.sections for plot in each.plots if plot.title == "Event loop: lag")
    assert f"</svg>{named}</span>" in figure
    assert figure.count("<polyline") == (2 if p99 == 0.2 else 3)


def test_no_share_is_drawn_beyond_all(tmp_path):
    names = ("rollout/accuracy", "probe/accuracy", "rollout/truncated")
    files = make_run(tmp_path / "run", [], [metrics_row(1) | dict.fromkeys(names, 1.0)])
    figures = {plot.title: plot.figure for section in read_report(files).sections for plot in section.plots}
    for title in ("Accuracy in training", "Accuracy of probes", "Cut off and not judged"):
        assert max(map(int, re.findall(r">(\d+) %<", figures[title]))) == 100


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([{"spot/selected": 2.0, "spot/retained": 0.0}] * 2, "No probed position was retained"),
        ([{"spot/selected": 2.0, "spot/retained": 0.0}, {"spot/selected": 2.0, "spot/retained": 0.1}], None),
        ([{"spot/selected": 0.0, "spot/retained": 0.0}], None),
        ([{"grpo/no_signal": 1.0}] * 2, "All responses of each prompt had the same reward"),
        ([{"grpo/no_signal": 1.0}, {"grpo/no_signal": 0.9}], None),
        ([{"rollout/accuracy": 0.0}], None),
        ([{"teacher/masked": 1.0}, {"teacher/masked": 0.9}], "The teacher masked 95.0% of the positions"),
        ([{"teacher/masked": 0.1}] * 2, None),
        ([{"grpo/left_out": 1.0, "train/updates": 0.0}] * 2, "No iteration made a step"),
        ([{"grpo/left_out": 1.0, "train/updates": 0.0}, {"train/updates": 4.0}], None),
    ],
)
def test_a_run_whose_outcomes_taught_nothing_says_so(tmp_path, capsys, metrics, expected):
    rows = [{"iteration": i} | each for i, each in enumerate(metrics, start=1)]
    files = make_run(tmp_path / "run", [], rows)
    page = Tags(report_page(read_report(files))).text
    write_report(Console(), files.path, None)
    show_outcome(TrainOutcome(files.path, len(rows), None, None, None, {}), files.path)
    shown = " ".join(capsys.readouterr().out.split())
    assert ("Little or nothing to learn from" in page) == (expected is not None)
    if expected is not None:
        assert expected in page
        assert shown.count(expected) == 2  # by `report` and at the end of `train`


def test_the_masked_share_is_a_fact_and_a_curve(tmp_path):
    report = read_report(make_run(tmp_path / "run", [], [metrics_row(i) | {"teacher/masked": 0.1 * i} for i in (1, 2)]))
    assert ("masked", "15 % of the positions, by the teacher's server") in report.facts
    assert "Masked positions" in {plot.title for section in report.sections for plot in section.plots}


def test_figures_that_are_no_numbers_are_left_out(tmp_path):
    row = metrics_row(1) | {"train/grad_norm": None}
    tier = {"problems": 1, "avg": 0.25, "avg_standard_error": None, "pass": 0.5, "pass_standard_error": None}
    files = make_run(
        tmp_path / "run",
        [],
        [row],
        {"after": {"samples": 8, "tokens": 1, "tiers": {"x": tier, "macro": tier | {"pass_k": 4}}}},
    )
    assert "train/grad_norm" not in files.metrics()[0]
    assert read_report(files).results.rows[0][2:] == ("25.0", "50.0")
    assert [row[0] for row in read_report(files).results.rows] == ["x (Pass@8)", "macro (Pass@4)"]
    (tmp_path / "run" / "metrics.jsonl").write_text('{"train/loss": 0.5}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl: a line names no iteration"):
        files.metrics()


def test_a_teacher_that_writes_is_told_of_its_slots():
    advice = judge(RunTimes(9.0, 1.0, 0.0, {"teacher_response": 8.0, "score": 1.0})).advice
    assert "teacher.backend.slots" in advice[0]
    full = StageUse(in_flight=49.0, queued=0.0, limit=64, slots=64)
    advice = judge(RunTimes(9.0, 1.0, 0.0, {"rollout": 9.0}, {"rollout": full})).advice
    assert "64 slots were mostly in use (49 of 64 rollout" in advice[0]


def test_a_limit_is_what_the_servers_let_in_where_that_is_less_than_the_stages_own():
    config = {"stages": {"probe": {"concurrency": 256}}}
    row = {"time/iteration_s": 5.0, "time/evaluate_s": 1.0, "time/wait_for_batch_s": 2.0, "wait/probe_s": 2.0,
           "stage/probe/requests": 9.0, "stage/probe/mean_in_flight": 49.0, "stage/probe/mean_queued": 10.0,
           "replica/student-1/limit": 90.0, "replica/student-2/limit": 106.0, "replica/teacher/limit": 4.0}  # fmt: skip
    use = run_times([row], config).stages["probe"]
    assert (use.in_flight, use.limit, use.is_limit_of_servers) == (98.0, 196, True)
    assert limit_use(row, config, "probe") == 0.5  # of the time in which it could have any
    wide = {name: value for name, value in row.items() if not name.startswith("replica/")}
    assert (run_times([wide], config).stages["probe"].limit, limit_use(wide, config, "probe")) == (256, 98 / 256)


TIER = {"problems": 3, "avg": 0.25, "avg_standard_error": 0.05, "pass": 0.5, "pass_standard_error": 0.1}
EVALUATED = {"samples": 8, "tokens": 1, "tiers": {"all": TIER}}
NOT_JUDGED = {"samples": 1, "tokens": 1, "tiers": {}}


@pytest.mark.parametrize(
    ("rows", "summary", "expected"),
    [
        ([], None, "No iteration has finished"),
        ([metrics_row(1)], None, "The run ended early"),
        ([metrics_row(1)], {"before": None, "after": None}, "The run was not evaluated: there is no table"),
        ([metrics_row(1)], {"before": EVALUATED, "after": None}, "The trained student was not evaluated at the end."),
        ([metrics_row(1)], {"before": NOT_JUDGED, "after": NOT_JUDGED, "change": {}}, "were not judged: there is no"),
        ([{"iteration": 1, "train/loss": 0.5}], {}, "probes no positions"),
        ([{"iteration": 1}], None, "nothing can be said"),
    ],
)
def test_what_is_missing_is_said(tmp_path, rows, summary, expected):
    page = report_page(read_report(make_run(tmp_path / "run", [], rows, summary)))
    assert expected in Tags(page).text
    assert ("Results on held-out problems" in page) == bool(summary and summary.get("before") == EVALUATED)


def test_an_evaluation_while_it_trained_is_none_of_the_trained_student(tmp_path):
    files = make_run(tmp_path / "run", [], [metrics_row(1)], {"before": None, "after": None})
    write_evaluation(tmp_path / "run", "000001", 0.5)
    assert "The trained student was not evaluated at the end." in Tags(report_page(read_report(files))).text
