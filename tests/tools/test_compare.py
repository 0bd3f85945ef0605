"""`spot-async compare`: figures, pairs, intervals and files, from the evaluation.json that evaluations write."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from evaluation_files import written
from run_files import make_run, metrics_row, spot_sample
from typer.testing import CliRunner

from spot_async.cli import app
from spot_async.errors import DataError
from spot_async.tools.compare import tables
from spot_async.tools.compare.compute import compute_of, read_compute
from spot_async.tools.compare.reading import PairedBenchmark, paired, read_evaluated
from spot_async.tools.compare.statistics import (
    Column,
    compare,
    exact_p,
    pass_curves,
    percentile_interval,
    resampled_means,
)
from spot_async.tools.pages import svg

ROOT = Path(__file__).parents[2]


def test_the_page_of_a_comparison_has_its_table_its_differences_and_the_runs_curves(tmp_path):
    one, other = written(tmp_path / "one", {"AMC23": [0, 8, 4]}), tmp_path / "other"
    make_run(other, [spot_sample()], [metrics_row(i) | {"rollout/accuracy": 0.5} for i in (1, 2, 3)])
    written(other, {"AMC23": [1], "AIME24": [2]}, file="evaluation-000002.json")
    written(other, {"AMC23": [8, 8, 8]}, model_fingerprint="g")
    page = tmp_path / "page.html"
    assert "page: " in shown(f"<b>one</b>={one}", f"other={other}", "--html", str(page))
    text = page.read_text()
    assert '<td class="number"><strong>100.00</strong></td>' in text
    assert "other minus &lt;b&gt;one&lt;/b&gt;" in text
    assert "<b>one" not in text
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    assert {"Accuracy on held-out problems", "Accuracy in training", "Time of an iteration"} <= set(titles)
    report = tmp_path / "page-runs" / "run-1.html"  # of the only one that trained
    assert {each.name for each in report.parent.iterdir()} == {"run-1.html", "run-1-samples"}
    assert '<a href="page-runs/run-1.html">report of other</a>' in text
    assert '<a href="../page.html">comparison</a>' in report.read_text()
    alone = tmp_path / "alone.html"
    shown(f"a={one}", "--html", str(alone))
    assert "<h2>Training</h2>" not in alone.read_text()


def test_figures_of_other_parsers_are_warned_of(tmp_path):
    old, new = (
        written(tmp_path / name, {"A": [0, 1]}, versions={"sympy": "1.14.0", "latex2sympy2_extended": version})
        for name, version in (("old", "1.0.6"), ("new", "1.11.0"))
    )
    unsaid = written(tmp_path / "unsaid", {"A": [1, 1]})
    text = shown(f"a={old}", f"b={new}", f"c={unsaid}")
    assert "different versions, which may judge differently: latex2sympy2_extended 1.0.6 and 1.11.0.\n" in text
    assert "different versions" not in shown(f"a={old}", f"c={unsaid}")


def shown(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["compare", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["compare", *arguments])
    assert result.exit_code == 2, result.output
    return result.output


def test_macro_is_the_mean_of_benchmarks_whatever_their_sizes():
    small = PairedBenchmark("small", 4, np.array([[4, 0], [0, 0]]))
    large = PairedBenchmark("large", 4, np.array([[1, 4]] * 10))
    comparison = compare(["a", "b"], [small, large], draws=200)
    at = {column: i for i, column in enumerate(comparison.columns)}
    assert comparison.values[0, at[Column("Avg@4", "Avg.")]] == pytest.approx((0.5 + 0.25) / 2)
    assert comparison.values[1, at[Column("Pass@4", "Avg.")]] == pytest.approx(0.5)
    assert comparison.differences[1, at[Column("Avg@4", "large")]] == pytest.approx(0.75)


def test_differences_are_paired_by_problem():
    """Two methods far apart from problem to problem but for one point everywhere: the difference is certain."""
    base = np.random.default_rng(0).integers(0, 8, size=60)
    comparison = compare(["a", "b"], [PairedBenchmark("x", 8, np.stack([base, base + 1], axis=1))], draws=500)
    low, high = comparison.difference_intervals
    assert low[1, 0] == pytest.approx(1 / 8)
    assert high[1, 0] == pytest.approx(1 / 8)
    low, high = comparison.intervals
    assert high[0, 0] - low[0, 0] > 0.1


def test_the_exact_p_is_that_of_mcnemars_test_counted_out():
    for better, worse in itertools.product(range(6), repeat=2):
        pairs = better + worse
        flips = [sum(each) for each in itertools.product((0, 1), repeat=pairs)]
        expected = np.mean([min(each, pairs - each) <= min(better, worse) for each in flips])
        assert exact_p([1] * better + [-1] * worse + [0] * 7) == pytest.approx(expected), (better, worse)
    assert exact_p([1, -1] * 6_000) == 1.0
    assert exact_p([1] * 12_000) == 0.0
    table = PairedBenchmark("x", 1, np.array([[0, 1]] * 9 + [[1, 0]] * 2 + [[1, 1]] * 5))
    assert compare(["a", "b"], [table], draws=99).p_values[1] == pytest.approx([2 * (1 + 11 + 55) / 2**11])


def test_differences_of_the_detectable_size_are_found_in_four_of_five_tries():
    random = np.random.default_rng(5)
    base = random.integers(2, 7, size=200)
    noise = random.integers(-2, 3, size=200)
    least = compare(["a", "b"], [PairedBenchmark("x", 8, np.stack([base, base + noise], axis=1))], draws=99).detectable
    tries = least[1, 0] + random.choice((noise - noise.mean()) / 8, size=(4000, 200))
    found = tries.mean(axis=1) / (tries.std(axis=1, ddof=1) / np.sqrt(200)) > 1.96
    assert found.mean() == pytest.approx(0.8, abs=0.025)


def test_a_difference_that_so_few_problems_cannot_show_is_named(tmp_path):
    one = written(tmp_path / "one", {"x": [1, 0, 1, 0, 1, 0]}, samples=1)
    other = written(tmp_path / "other", {"x": [1, 1, 1, 0, 0, 1]}, samples=1)
    text = shown(f"a={one}", f"b={other}")
    assert re.search(r"x +\+16.67 \[.*\] +1 +\+16.67 \[.*\] *$", text, re.MULTILINE)
    assert "b: in Avg@1 it differs by less than so many problems show in 80 % of tries" in text
    assert "x +16.67 of 86.10 points" in text


def test_intervals_have_the_width_of_the_unbiased_standard_error_and_follow_the_seed():
    values = np.random.default_rng(1).random(40)
    low, high = percentile_interval(resampled_means([values], draws=20_000, seed=3)[0], 0.95)
    error = values.std(ddof=1) / np.sqrt(40)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.03)
    again = percentile_interval(resampled_means([values], draws=20_000, seed=3)[0], 0.95)
    assert (low, high) == tuple(again)
    assert resampled_means([np.ones(12)], draws=500, seed=0)[0].max() == 1.0  # and nothing leaves [0, 1]


def test_resamples_of_thousands_of_problems_need_no_table_of_draws_by_problems():
    """MMLU-Pro has 12,000 problems: 10,000 draws at once would take 2 GB."""
    values, draws = np.random.default_rng(1).random((12_000, 2)), 250
    tracemalloc.start()
    try:
        few, many = resampled_means([values[:30], values], draws=draws, seed=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < draws * len(values) * 8  # one such table of floats
    random = np.random.default_rng(3)
    for found, table in ((few, values[:30]), (many, values)):
        size = len(table)
        drawn = random.multinomial(size - 1, np.full(size, 1 / size), size=draws)
        assert found == pytest.approx(drawn @ table / (size - 1))


def test_95_percent_intervals_hold_the_truth_about_as_often(monkeypatch):
    """The whole of it, with 1,000 evaluations: benchmarks/bootstrap_coverage.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    simulation = importlib.import_module("bootstrap_coverage")
    sets = [simulation.Population("a", 100, 0.6), simulation.Population("b", 40, 0.3)]
    found = simulation.coverage(sets, evaluations=400, samples=8, draws=400, seed=7)
    for name, share in found["macro"].items():
        assert 0.95 - 0.035 < share < 0.95 + 0.035, name  # 3.2 binomial errors of 400


def test_the_table_marks_best_and_second_with_ties_as_the_paper_does():
    values = np.array([[0.1333, 0.5], [0.1333, 0.4], [0.1, 0.4], [0.0, 0.3]])
    columns = list(zip(*tables.marks(values), strict=True))
    assert tables.percent(9 / 32) == "28.13"  # halves upwards
    assert columns == [("best", "best", "second", ""), ("best", "second", "second", "")]


def test_a_comparison_is_printed_and_written_in_every_form(tmp_path):
    opd = written(tmp_path / "opd", {"AMC23": [0, 1, 8, 4], "AIME_24": [0, 0, 2]})
    spot = written(tmp_path / "spot", {"AIME_24": [1, 0, 2], "AMC23": [0, 2, 8, 5]})
    output = shown(f"OPD={opd}", f"SPOT={spot}", "-o", str(tmp_path / "out"))
    assert "SPOT minus OPD" in output
    assert "AMC23" in output
    text = (tmp_path / "out" / "comparison.md").read_text()
    header = text.splitlines()[0]
    assert header.index("Avg@8 AMC23") < header.index("Avg@8 Avg.") < header.index("Pass@8 AMC23")
    assert "| OPD | <u>40.63</u> |" in text
    assert "**46.88**" in text  # 15 of 32
    latex = (tmp_path / "out" / "comparison.tex").read_text()
    assert r"\textbf{46.88}" in latex
    assert r"AIME\_24" in latex
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "comparison.csv").read_text())))
    (row,) = [r for r in rows if (r["method"], r["metric"], r["benchmark"]) == ("SPOT", "Avg@8", "AMC23")]
    assert float(row["difference"]) == pytest.approx(2 / 32)
    assert float(row["difference_low"]) <= 2 / 32 <= float(row["difference_high"])
    curves = list(csv.DictReader(io.StringIO((tmp_path / "out" / "pass_at_k.csv").read_text())))
    assert {int(r["k"]) for r in curves} == set(range(1, 9))
    again = shown(str(opd), "-o", str(tmp_path / "out"), "--benchmark", "AMC23")
    assert "This is one run: give another behind it (NAME=RUN)" in again
    assert "This is one run" not in output


def test_a_reader_that_stops_reading_keeps_no_file_from_being_written_and_is_no_failure(tmp_path):
    run = written(tmp_path / "run", {"AMC23": [0, 1, 8, 4]})
    unread, pipe = os.pipe()
    os.close(unread)
    words = [sys.executable, "-m", "spot_async", "compare", str(run), "-o", str(tmp_path / "out")]
    ended = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, timeout=300, check=False)
    os.close(pipe)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert (tmp_path / "out" / "comparison.csv").exists()


def test_curves_have_exact_figures_under_the_pointer_and_other_colours_on_dark_screens(tmp_path):
    run = written(tmp_path / "run", {"AMC23": [0, 1, 8, 4], "AIME24": [0, 0, 2]})
    shown(f"OPD={run}", "--html", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r"<h3>(.*?)</h3><p class=\"quiet\">Unbiased, from 8 responses a problem.", text) == [
        "AMC23", "AIME24", "Avg."
    ]  # fmt: skip
    tips = re.findall(r'aria-label="(\d+ k: [^"]*)"', text)
    assert tips[:4] == ["1 k: OPD 40.6 %", "2 k: OPD 50.9 %", "4 k: OPD 62.1 %", "8 k: OPD 75 %"]
    light, dark = text.split("@media (prefers-color-scheme: dark)")[:2]
    assert f"--c0: {svg.COLOURS[0]};" in light
    assert f"--c0: {svg.DARK_COLOURS[0]};" in dark


def test_a_path_with_an_equals_sign_is_a_run_if_it_exists(tmp_path):
    run = written(tmp_path / "lr=1e-4", {"amc23": [4, 0]})
    assert read_evaluated(str(run)).name == str(run)
    assert read_evaluated(f"slow={run}").name == "slow"


def test_what_cannot_be_paired_is_refused_in_one_line(tmp_path):
    one = written(tmp_path / "one", {"AMC23": [0, 1], "AIME24": [3]})
    other = written(tmp_path / "other", {"AMC23": [0, 1, 2]})
    few = written(tmp_path / "few", {"AMC23": [0, 1]}, samples=4)
    lacks = written(tmp_path / "lacks", {"AMC23": [0, 1]})
    assert "b has no benchmark AIME24" in refused(f"a={one}", f"b={lacks}")
    assert "were not asked the same problems (2 and 3, 'AMC23-2'" in refused(
        f"a={one}", f"b={other}", "--benchmark", "AMC23"
    )
    assert "a has 8 responses a problem and b 4" in refused(f"a={one}", f"b={few}", "--benchmark", "AMC23")
    assert "k is from 1 to 4" in refused(str(few), "--pass-k", "8")
    assert "--baseline c: no such row; there are a" in refused(f"a={one}", "--baseline", "c")
    assert "is given twice" in refused(str(one), str(one))
    assert "no evaluation.json" in refused(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"correct": {"p": 9, "q": 0}}, "AMC23: 9 of 8 responses to problem 'p' are correct"),
        ({"correct": {"p": 8, "q": -1}}, "AMC23: -1 of 8 responses to problem 'q' are correct"),
        ({"correct": {"p": 8}}, "AMC23: 2 problems, but counts of 1"),
        ({"samples": 0}, "AMC23: 0 responses a problem"),
        ({"verdicts": {"correct": 8, "wrong": 7}}, "AMC23: 15 verdicts of 2 x 8 responses"),
    ],
)
def test_figures_that_cannot_be_are_one_line_with_file_benchmark_and_problem(tmp_path, changes, complaint):
    file = written(tmp_path, {"AMC23": [0, 1]}) / "evaluation.json"
    figures = json.loads(file.read_text())
    figures["benchmarks"]["AMC23"] |= changes
    file.write_text(json.dumps(figures))
    assert refused(str(file)).startswith(f"error: {file}: {complaint}")
    file.write_bytes(b'{"model": "\xff"}')
    assert "is no evaluation.json" in refused(str(file))
    assert "Avg.: is what results call" in refused(str(written(tmp_path / "b", {"Avg.": [1], "AMC23": [1]})))


def test_every_setting_that_decides_a_compared_benchmark_and_differs_is_said_and_no_other(tmp_path):
    def run(name, verifier, **rest):
        settings = {
            "evaluation.preset": None,
            "evaluation.temperature": 1.0,
            **{f"evaluation.benchmarks.{each}.verifier": {"kind": verifier} for each in ("A", "B", "C")},
            "evaluation.benchmarks.A.prompts": "1",
        } | rest
        return written(tmp_path / name, {"A": [0, 1], "B": [1, 1], "C": [0, 0]}, model_fingerprint=name, **settings)

    one = run("one", "boxed_match", **{"evaluation.benchmarks.C.samples": 4})
    preset = {"evaluation.preset": "paper", "evaluation.benchmarks.B.verifier": {"kind": "boxed_match"}}
    other = run("other", "math_verify", **preset | {"evaluation.benchmarks.A.verifier": {"kind": "x", "workers": 2}})
    names = ("--benchmark", "A", "--benchmark", "B")
    text = shown(f"a={one}", f"b={other}", *names)
    assert (
        "Warning: evaluated differently: evaluation.benchmarks.A.verifier.kind is boxed_match for a and x for b.\n"
        in (text)
    )
    third = run("third", "boxed_match", **{"evaluation.temperature": None, "evaluation.benchmarks.A.prompts": "2"})
    text = shown(f"a={one}", f"b={one / 'evaluation.json'}", f"c={third}", *names)
    assert "evaluation.temperature is 1.0 for a, b and not set for c; evaluation.benchmarks.A.prompts (or ans" in text
    assert "8 responses each, judged by boxed_match.\n" in text
    assert "Differences from a: points" in text
    single = shown(f"a={other}", *names)
    assert "8 responses each, judged by x (A), boxed_match (B).\n" in single
    assert "Differences" not in single
    assert "Warning: a and b are the same weights, evaluated with the same settings." in text
    assert "c are the same weights" not in text
    assert "A.verifier.kind, evaluation.benchmarks.B.verifier.kind is boxed_match for a and m for b" in shown(
        f"a={one}", f"b={run('m', 'm')}", *names
    )
    limited = {"evaluation.benchmarks.A.verifier": {"kind": "boxed_match", "memory_limit_bytes": 2 << 30}}
    assert "evaluated differently" not in shown(f"a={one}", f"b={run('before', 'boxed_match', **limited)}", *names)


def test_what_is_special_about_a_benchmark_is_said_once_or_of_the_run_it_holds_for(tmp_path):
    one = written(tmp_path / "one", {"Minerva": [0, 1]}, note="judged by x")
    other = written(tmp_path / "other", {"Minerva": [0, 1]})
    text = shown(f"a={one}", f"b={one / 'evaluation.json'}")
    assert text.count("Minerva: judged by x.") == 1
    assert re.search(r"Problems: 2; \d responses each", text)  # the table names the only benchmark
    assert "Minerva of a: judged by x." in shown(f"b={other}", f"a={one}")
    named = written(tmp_path / "named", {"A\x1b[2J": [0, 1], "B": [1, 1]}, note="as\x1b[2J it is")
    text = shown(f"\x1b[2J={named}", f"b={named}")
    assert "\x1b" not in text
    assert text.count("A\u241b[2J") > 2


def test_pass_at_k_of_fewer_than_all_responses_says_that_it_is_an_estimate(tmp_path):
    run = written(tmp_path / "run", {"AMC23": [0, 10, 64]}, samples=64)
    assert "Pass@8 (unbiased, from 64)" in shown(str(run), "--pass-k", "8")
    (curve,) = pass_curves(paired([read_evaluated(str(run))]))
    assert curve.values[63, 0] == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="k is from 1 to 64"):
        compare(["a"], paired([read_evaluated(str(run))]), k=65)


def test_compute_is_summed_from_what_the_training_run_recorded(tmp_path):
    row = {
        "time/iteration_s": 10.0,
        "time/evaluate_s": 2.0,
        "time/train_s": 3.0,
        "throughput/generated_tokens_per_s": 50.0,
        "rollout/tokens": 20.0,
        "probe/tokens": 12.0,
        "train/trajectories": 4.0,
        "train/tokens": 80.0,
        "stage/rollout/requests": 4.0,
        "stage/rollout/mean_in_flight": 2.0,
        "stage/probe/requests": 32.0,
        "stage/probe/mean_in_flight": 1.0,
        "stage/score/requests": 4.0,
        "stage/score/mean_in_flight": 0.5,
    }
    found = compute_of([row, row], {"USD": 0.25})
    assert found == {
        **{"iterations": 2, "tokens generated": 800.0, "by probes": 96.0, "scored": 160.0, "trained": 160.0},
        **{"trainer s": 6.0, "hours": pytest.approx(16 / 3600), "USD": 0.25},
        **{"student request-s": 48.0, "teacher request-s": 8.0},  # means are over the time without evaluations
    }
    training = tmp_path / "train"
    for name in ("step-000002", "best-000001", "copied"):
        (training / "weights" / name).mkdir(parents=True)
    (training / "best").symlink_to("weights/best-000001")
    (training / "run.json").write_text('{"format": 1, "command": "train"}')
    (training / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i, **row}) + "\n" for i in (1, 2)))
    # Running totals. A kill, and the start of the resumed run, come after the first 2; an evaluation before the end.
    paid = [(0, 0.01), (1, 0.12), (2, 0.2), (0, 0.21), (2, 0.25), (None, 0.31)]
    (training / "spending.jsonl").write_text(
        "".join(
            json.dumps({"iteration": i, "role": "teacher", "server": "teacher", "currency": "USD", "money": money})
            + "\n"
            for i, money in paid
        )
    )

    def found_for(file, model):
        compute = read_compute(file, model)
        return compute and (compute["iterations"], compute["tokens generated"], compute["USD"])

    elsewhere = written(tmp_path / "eval", {"AMC23": [1, 2]}, model=str(training / "best")) / "evaluation.json"
    whole, half = (2, 800.0, 0.31), (1, 400.0, 0.12)
    assert found_for(elsewhere, training / "weights" / "step-000002") == whole
    assert found_for(elsewhere, training / "best") == half
    assert found_for(training / "evaluation-000001.json", Path("moved/since")) == half
    assert found_for(training / "evaluation-after.json", Path("moved/since")) == whole
    assert found_for(elsewhere, training / "weights" / "copied") is None
    written(training, {"AMC23": [1, 2]}).joinpath("evaluation.json").rename(training / "evaluation-after.json")
    assert found_for(training / "evaluation-before.json", Path("elsewhere/initial")) is None
    both = shown(f"half={elsewhere}", f"whole={training / 'evaluation-after.json'}")
    assert re.search(
        r"Compute of training\s+half +whole *\n.*\n iterations +1 +2 *\n tokens generated +400 +800 *\n", both
    )
    row["throughput/generated_tokens_per_s"] = 1.5e9
    (training / "metrics.jsonl").write_text(json.dumps({"iteration": 1, **row}) + "\n")
    labels = [f"label-{'of-some-length-' * 3}{i}" for i in range(4)]
    names = [f"{label}={training / 'evaluation-after.json'}" for label in labels]
    narrow = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["compare", *names, "--draws", "100"]).output
    assert narrow.count("12,000,000,000") == 4
    assert narrow.count("Compute of training") == 2  # in two parts, side by side they do not fit
    assert "…" not in narrow
    (training / "run.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="has format 99"):
        found_for(elsewhere, training / "best")
