"""What the trainer says of its devices: its count of arithmetic, its figures over all ranks, and where they are shown.

There is no GPU here. A stand-in says of itself what torch says of one.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from event_files import records
from makers import MakeModel, MakeSample, MakeSettings, MakeTrainer
from metrics_page import of_area, scrape
from rich.console import Console
from run_files import make_run
from small_runs import NAMED
from torch.utils.flop_counter import FlopCounterMode

from spot_async.backends.shared.launch import free_port
from spot_async.base import wire
from spot_async.config import LoraConfig
from spot_async.config.loading import validate
from spot_async.loop.events import IterationFinished, PhaseTimes
from spot_async.models.model_size import read_size, size_of, training_operations
from spot_async.run_directory.layout import RunDirectory
from spot_async.telemetry.console import RunConsole
from spot_async.telemetry.prometheus import family_of
from spot_async.telemetry.run_log import RunLog
from spot_async.telemetry.sinks import open_sinks
from spot_async.telemetry.totals import performance_words, run_performance
from spot_async.tools.inspect.report import read_report
from spot_async.trainer import metrics
from spot_async.trainer.messages import Batch, Trained, UpdateShare
from spot_async.trainer.metrics import Meters
from spot_async.trainer.rank import StudentTrainer

GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"
PERFORMANCE = of_area("perf")


class StandInCard:
    """torch, as a rank with one GPU sees it, with the peaks of memory that it is given one after another."""

    def __init__(self, name: str, *peaks_gib: tuple[float, float]) -> None:
        self.name, self.peaks_gib = name, list(peaks_gib)
        self.cuda = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def get_device_name(self, device: torch.device) -> str:
        return self.name

    def max_memory_allocated(self, device: torch.device) -> int:
        return int(self.peaks_gib[0][0] * GIB)

    def max_memory_reserved(self, device: torch.device) -> int:
        return int(self.peaks_gib[0][1] * GIB)

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        del self.peaks_gib[0]

    def tensor(self, values: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)  # there is no device but the CPU


class OtherRank:
    """A strategy of two ranks, of which the other one counts this, and has these peaks in bytes."""

    ranks = 2

    def __init__(self, work: list[float], memory: list[float]) -> None:
        self.work, self.memory = work, memory

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.tensor(self.work, dtype=torch.float64)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.maximum(values, torch.tensor(self.memory, dtype=torch.float64))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandInCard]:
    """Put a stand-in where the meters look for a GPU."""

    def put(name: str = H100, *peaks_gib: tuple[float, float]) -> StandInCard:
        found = StandInCard(name, *(peaks_gib or [(40.0, 60.0)] * 9))
        monkeypatch.setattr(metrics, "torch", found)
        return found

    return put


def of_gpu(trainer: StudentTrainer, model: Path, **training: Any) -> StudentTrainer:
    """Let a trainer on the CPU measure as if it were on the stand-in."""
    settings = trainer._training.model_copy(update={"dtype": "bfloat16", **training})
    trainer._meters = Meters(settings, model, torch.device("cuda", 0))
    return trainer


@pytest.mark.parametrize(
    ("training", "looks"),
    [
        ({}, False),
        ({"behavior": "recomputed"}, False),
        ({"behavior": "recomputed"}, True),
        ({"lora": {"rank": 3, "alpha": 6}}, False),
    ],
    ids=str,
)
def test_the_count_is_that_of_the_products_that_the_trainer_makes(
    student: Path, student_trainer: MakeTrainer, supervision: MakeSample, training: dict[str, Any], looks: bool
) -> None:
    trainer = student_trainer(packing=False, mini_batch_size=1, **training)
    trainer.model.set_attn_implementation("eager")  # whose products torch's counter knows
    sample, as_long = supervision(1, 12), supervision(6, 12)
    if looks:
        (share,) = trainer.divide(Batch(0, (sample, as_long), is_look=True))
        trainer.keep(trainer.losses.look(share.updates[0]))
    with FlopCounterMode(display=False, depth=1) as counter:
        report = trainer.train(Batch(0, (sample, as_long)))
    counts = counter.get_flop_counts()
    made = {str(name): count for name, count in counts["ResponseLogprobs"].items()}
    # Before 5.18, transformers made rotary angles by a product.
    made["aten.bmm"] -= sum(counts.get("ResponseLogprobs.student.model.rotary_emb", {}).values())
    size, tokens = read_size(student), len(sample.prompt_ids) + len(sample.response_ids) - 1
    assert size is not None
    # Eager attention multiplies with all tokens, those that come later too.
    expected = made["aten.mm"] + made["aten.bmm"] * (tokens + 1) / (2 * tokens)
    lora = LoraConfig.model_validate(training["lora"]) if "lora" in training else None
    if lora is not None:  # below the first adapters nothing is trained, so nobody asks for their inputs' gradients
        expected += 2 * 2 * tokens * (size.hidden * (size.queries + 2 * size.keys) + 3 * size.hidden * lora.rank)
    # The first update's log pi_old comes from its training pass, and the second one's from a look, if there was one.
    again = training.get("behavior") == "recomputed" and not looks
    first, second = (
        training_operations(size, [tokens], rows=12, lora=lora, recomputes_behavior=each) for each in (False, again)
    )
    assert expected == first + second
    counted = report.performance["tflops_per_rank"] * report.metrics["train_s"] * 1e12
    assert counted == pytest.approx(expected)


def test_padding_and_layers_computed_again_do_not_count(student_trainer: MakeTrainer, supervision: MakeSample) -> None:
    batch = Batch(0, tuple(supervision(i, tokens) for i, tokens in enumerate((4, 30))))

    def operations(name: str, **training: Any) -> float:
        report = student_trainer(name, micro_batch_tokens=200, **training).train(batch)
        return report.performance["tflops_per_rank"] * report.metrics["train_s"]

    plain = operations("plain")
    assert plain > 0
    assert operations("again", recompute_layers=True) == pytest.approx(plain)
    assert operations("padded", packing=False) == pytest.approx(plain)


@pytest.mark.parametrize(
    ("kind", "keys", "windows"),
    [
        ("qwen3", {"use_sliding_window": False, "sliding_window": 3}, [None, None, None]),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}, [None, None, 3]),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [3, None, 3],
        ),
        ("mistral", {"sliding_window": 3}, [3, 3, 3]),
        ("mistral", {"sliding_window": None}, [None, None, None]),
        ("mistral", {}, [None, None, None]),  # the architecture's own, 4,096
        ("llama", {}, [None, None, None]),
    ],
)
def test_attention_is_counted_for_the_tokens_in_each_layers_window(
    kind: str, keys: dict[str, Any], windows: list[int | None]
) -> None:
    shape = {
        "num_hidden_layers": 3, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 6,
        "vocab_size": 11,
    }  # fmt: skip
    size = size_of({"model_type": kind, **shape, **keys})
    assert size is not None
    attended = sum(min(token + 1, window or 7) for window in windows for token in range(7))
    matrices = 6 * 7 * 3 * size.layer_matrices
    assert training_operations(size, [7], rows=0) == matrices + 12 * size.queries * attended


def test_figures_are_of_all_ranks_over_the_time_that_the_trainer_is_busy(
    student: Path,
    trainer_settings: MakeSettings,
    supervision: MakeSample,
    card: Callable[..., StandInCard],
    tmp_path: Path,
) -> None:
    card(H100, (40.0, 60.0), (50.0, 55.0), (50.0, 55.0))
    samples = [supervision(i, 10 + i) for i in range(3)]
    parts = (samples[:2], samples[2:])
    updates = [UpdateShare(("of", "both", "ranks"), 99, dict(enumerate(part)), ()) for part in parts]
    training = trainer_settings(student, tmp_path, dtype="bfloat16").training
    rank = Meters(training, student, torch.device("cuda", 0))
    size = read_size(student)
    assert size is not None
    lengths = [len(each.prompt_ids) + len(each.response_ids) - 1 for each in samples]
    own = training_operations(size, lengths, rows=10 + 11 + 12)
    other = OtherRank([1000.0, 3 * own, 312e12], [30.0 * GIB, 70.0 * GIB])
    found = rank.read(updates, other, 4.0)  # type: ignore[arg-type]
    assert found.keys() == PERFORMANCE
    assert found["tokens_per_s_per_rank"] == (sum(lengths) + 1000) / 4 / 2
    assert found["tflops_per_rank"] == pytest.approx(4 * own / 4 / 2 / 1e12)
    assert found["mfu"] == pytest.approx(4 * own / 4 / (989e12 + 312e12))
    assert (found["max_memory_allocated_gib"], found["max_memory_reserved_gib"]) == (40.0, 70.0)
    again = rank.read(updates, other, 4.0)  # type: ignore[arg-type]
    assert again["max_memory_allocated_gib"] == 50.0  # of this iteration alone
    unknown = OtherRank([1000.0, own, math.nan], [0.0, 0.0])
    assert rank.read(updates, unknown, 4.0).keys() == PERFORMANCE - {"mfu"}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "model", "training", "absent"),
    [
        (H100, "qwen3", {}, set()),
        ("NVIDIA GeForce RTX 4090", "qwen3", {}, {"mfu"}),
        (H100, "qwen3", {"dtype": "float32"}, {"mfu"}),
        (H100, "qwen3_moe", {}, {"mfu", "tflops_per_rank"}),
    ],
)
def test_what_nobody_knows_of_a_card_or_an_architecture_is_left_out(
    random_architecture: MakeModel,
    make_trainer: MakeTrainer,
    supervision: MakeSample,
    card: Callable[..., StandInCard],
    tmp_path: Path,
    name: str,
    model: str,
    training: dict[str, Any],
    absent: set[str],
) -> None:
    card(name)
    directory = random_architecture(model)
    trainer = of_gpu(make_trainer(directory, tmp_path), directory, **training)
    report = trainer.train(Batch(0, (supervision(1, 6),)))
    assert report.performance.keys() == PERFORMANCE - absent


def test_a_rank_on_the_cpu_has_a_speed_and_no_device(student_trainer: MakeTrainer, supervision: MakeSample) -> None:
    trainer = student_trainer()
    sample = supervision(1, 6)
    report = trainer.train(Batch(0, (sample,)))
    assert report.performance.keys() == {"tokens_per_s_per_rank", "tflops_per_rank"}
    tokens = len(sample.prompt_ids) + len(sample.response_ids) - 1
    assert report.performance["tokens_per_s_per_rank"] == pytest.approx(tokens / report.metrics["train_s"])
    assert trainer.train(Batch(1, ())).performance == {}  # nothing was trained


def test_a_gpus_figures_arrive_in_console_report_and_every_sink(
    student: Path,
    student_trainer: MakeTrainer,
    supervision: MakeSample,
    card: Callable[..., StandInCard],
    tmp_path: Path,
) -> None:
    from tensorboardX.proto.event_pb2 import Event

    card()
    trainer = of_gpu(student_trainer("trainer"), student)
    report = trainer.train(Batch(0, (supervision(1, 6),)))
    arrived = wire.decode(wire.encode(Trained(0, report)), Trained)
    assert isinstance(arrived, Trained)
    figures = {"tokens_per_s_per_rank": 12345.6, "tflops_per_rank": 350.0, "mfu": 0.354}  # of a larger student
    report = msgspec.structs.replace(arrived.report, performance=arrived.report.performance | figures)
    finished = IterationFinished(1, [], report, PhaseTimes())

    files = make_run(tmp_path / "run")
    screen, port = io.StringIO(), free_port()
    stages = SimpleNamespace(all=(), tokens_generated=0)
    config = validate(NAMED | {"telemetry": {"prometheus_port": port, "tensorboard": True}})
    with open_sinks(config, files.path) as sinks:
        RunLog(RunDirectory(files.path), stages, sinks).on(finished)
        RunConsole(Console(file=screen, width=200), iterations=1).on(finished)
        scraped = scrape(port, f'iterations_total{{run="{files.path.name}"}} 1.0')

    names = {f"perf/{name}" for name in PERFORMANCE}
    row = json.loads((files.path / "metrics.jsonl").read_text())
    assert {name for name in row if name.startswith("perf/")} == names
    assert "trainer: 12,346 tokens/s a GPU, MFU 35.4 %, peak 40.0 GiB" in screen.getvalue()
    label = f'{{of="",run="{files.path.name}"}}'
    assert all(f"{family_of(name)[0]}{label} {row[name]}" in scraped for name in names)
    (events,) = (files.path / "tensorboard").iterdir()
    written = {value.tag for each in records(events.read_bytes()) for value in Event.FromString(each).summary.value}
    assert names <= written
    page = read_report(files)
    assert dict(page.facts)["trainer"] == "12,346 tokens/s a GPU, MFU 35.4 %, peak 40.0 GiB"
    (time,) = (section for section in page.sections if section.title == "Time")
    assert {each.title for each in time.plots if each.title.startswith("Trainer: ")} == {
        "Trainer: tokens per second",
        "Trainer: share of the GPUs' arithmetic",
        "Trainer: peak memory",
    }


def test_a_runs_rates_are_over_its_busy_time_and_its_peaks_the_highest() -> None:
    rows = [
        {
            "train/train_s": 3.0,
            "perf/tokens_per_s_per_rank": 100.0,
            "perf/mfu": 0.2,
            "perf/max_memory_allocated_gib": 9.0,
        },
        {
            "train/train_s": 1.0,
            "perf/tokens_per_s_per_rank": 500.0,
            "perf/mfu": 0.4,
            "perf/max_memory_allocated_gib": 7.0,
        },
        {"train/train_s": 0.1},  # nothing was trained
    ]
    found = run_performance(rows)
    assert found == {"tokens_per_s_per_rank": 200.0, "mfu": pytest.approx(0.25), "max_memory_allocated_gib": 9.0}
    assert performance_words(found) == "200 tokens/s a GPU, MFU 25.0 %, peak 9.0 GiB"
    assert performance_words(run_performance([{"train/train_s": 1.0}])) == ""
