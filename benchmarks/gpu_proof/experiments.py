"""The twelve experiments: their parts, what each part needs, how long it may take, and what is expected of it.

Expectations were written down before anything had been measured. Where one has a bound, the page says whether it holds.
The others are for a reader to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gpu_proof.place import Row

# What one card may take for E1 to E6: a lent card has a quarter of an hour in all, and starts within half a minute.
ONE_CARD_S = 840.0
ONE_EXPERIMENT_S = 600.0


class Part(NamedTuple):
    """What one process measures."""

    name: str  # such as "E1 0.6b"
    what: str
    function: str  # module:function of this package
    needs: tuple[str, ...]  # of `running.lacks`
    deadline_s: float
    arguments: tuple[Any, ...] = ()
    environment: dict[str, str] = {}  # set before torch is imported  # noqa: RUF012


class Expectation(NamedTuple):
    words: str
    source: str
    holds: Callable[[list[Row]], bool | None] | None = None  # None: for a reader to judge


class Experiment(NamedTuple):
    title: str
    question: str
    parts: tuple[Part, ...]
    expectations: tuple[Expectation, ...]


def value(rows: list[Row], what: str, figure: str) -> float | None:
    """Return a figure of the row of that name; None if it was not measured."""
    return next((row[figure] for row in rows if row["what"] == what and row.get(figure) is not None), None)


def all_of(figure: str, *, at_most: float, where: str = "") -> Callable[[list[Row]], bool | None]:
    """Whether each row that has the figure, and `where` in its name, stays below a bound."""

    def holds(rows: list[Row]) -> bool | None:
        found = [row[figure] for row in rows if row.get(figure) is not None and where in row["what"]]
        return all(each <= at_most for each in found) if found else None

    return holds


def times(figure: str, more: str, less: str, at_least: float) -> Callable[[list[Row]], bool | None]:
    """Whether a row's figure is so many times another's."""

    def holds(rows: list[Row]) -> bool | None:
        above, below = value(rows, more, figure), value(rows, less, figure)
        return None if above is None or below is None else above >= at_least * below

    return holds


def equal(figure: str, expected: Any) -> Callable[[list[Row]], bool | None]:
    def holds(rows: list[Row]) -> bool | None:
        found = [row[figure] for row in rows if figure in row]
        return all(each == expected for each in found) if found else None

    return holds


HAND, ESTIMATE = "arithmetic by hand", "`spot-async check`"
CARD = ("card",)
SHARDED = {"sharding": "fsdp2"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
OFFLOADED = {"sharding": "fsdp2", "recompute_layers": True, "trajectories": 4}


def _trains(name: str, size: str, deadline_s: float, **keys: Any) -> Part:
    words = ", ".join([size, *(f"{key}={each}" for key, each in keys.items())])
    return Part(name, words, "training:update", CARD, deadline_s, (size, keys))


EXPERIMENTS = {
    "E1": Experiment(
        "Trainer: speed and memory",
        "Is a sharded or compiled student of one GPU faster than a replicated one?",
        (
            _trains("E1 replicated", "0.6b", 32),
            _trains("E1 sharded", "0.6b", 32, **SHARDED),
            _trains("E1 compiled", "0.6b", 120, **SHARDED, compile=True),
            _trains("E1 1.7b", "1.7b", 42, **SHARDED),
        ),
        (
            Expectation(
                "replicated, 0.6b: about 18,900 tokens/s on an H200, with eager layers in float32",
                "benchmarks/README.md, One GPU",
            ),
            Expectation(
                "sharded, 0.6b: 1.5 to 3 times the tokens/s of replicated",
                HAND,
                times("tokens_per_s", "0.6b, sharding=fsdp2", "0.6b", 1.5),
            ),
            Expectation(
                "peak memory is at most 1.1 times the estimate", ESTIMATE, all_of("peak_of_estimate", at_most=1.1)
            ),
            Expectation(
                "attention is called once for a row of documents, not for each document",
                "sources of torch 2.13",
                equal("attention", "spot_one_call"),
            ),
        ),
    ),
    "E2": Experiment(
        "Trainer: 4B on one GPU",
        "Does it fit with what rests on the CPU, and how long is an update then?",
        (
            _trains("E2 optimizer", "4b", 110, **OFFLOADED, offload="optimizer"),
            _trains("E2 all", "4b", 110, **OFFLOADED, offload="all", threads=8),
        ),
        (
            Expectation("both fit 80 GB", ESTIMATE, all_of("peak_gib", at_most=78.0)),
            Expectation(
                "peak memory is at most 1.1 times the estimate", ESTIMATE, all_of("peak_of_estimate", at_most=1.1)
            ),
        ),
    ),
    "E3": Experiment(
        "Trainer: what stays after empty_cache()",
        "How much more than its tensors does torch keep while servers sample?",
        (
            Part("E3 kept", "gradients are kept", "training:after_cache", CARD, 20, (False,)),
            Part("E3 given back", "gradients are given back first", "training:after_cache", CARD, 20, (True,)),
            Part("E3 expandable", "with expandable segments", "training:after_cache", CARD, 20, (True,), EXPANDABLE),
        ),
        (
            Expectation(
                "reserved - allocated < 1 GiB once gradients are given back, as AdamW's moments are made first",
                "sources of torch's allocator",
                all_of("kept_gib", at_most=1.0, where="given back"),
            ),
            Expectation("kept gradients take 2.2 GiB more (0.6b)", HAND),
        ),
    ),
    "E4": Experiment(
        "Publishing weights",
        "How many seconds, alone and beside a step?",
        (
            Part("E4 before", "1.7b, before the next step", "weights:publishing", CARD, 30, (False,)),
            Part("E4 beside", "1.7b, beside the next step", "weights:publishing", CARD, 30, (True,)),
        ),
        (
            Expectation("writing takes less than 1 s a GB", HAND, all_of("s_per_gb", at_most=1.0)),
            Expectation(
                "beside a step it holds up training for less than 0.2 s",
                "sources of torch: a stream of its own waits for no kernel",
                all_of("held_up_s", at_most=0.2, where="beside"),
            ),
        ),
    ),
    "E5": Experiment(
        "Logits in float32",
        "How exact are the trainer's log-probabilities, and what does a larger block of logits bring?",
        (
            Part("E5 exactness", "beside float64 on the device", "logits:exactness", CARD, 20),
            Part("E5 blocks", "time and memory of blocks", "logits:blocks", CARD, 20),
            Part("E5 packings", "one batch, packed in several ways", "logits:packings", CARD, 30),
        ),
        (
            Expectation(
                "the trainer's branch for CUDA: at most 1e-4 nats off float64",
                HAND,
                all_of("nats_at_most", at_most=1e-4, where="trainer"),
            ),
            Expectation(
                "its gradients: at most 5e-3 off float64, which is bfloat16's own rounding",
                HAND,
                all_of("gradient_error", at_most=5e-3, where="trainer"),
            ),
            Expectation(
                "a head that rounds to bfloat16 is 0.1 to 0.25 nats off at most", "logits of 16 to 32 are 0.125 apart"
            ),
            Expectation("two packings: less than 0.05 nats apart on average", HAND, all_of("nats_mean", at_most=0.05)),
            Expectation("blocks of 1<<28 logits take 5 to 10 % less time than 1<<26, and 3 GiB more", HAND),
        ),
    ),
    "E6": Experiment(
        "Tests on the device, LoRA, a checkpoint, and a rank out of memory",
        "Does the trainer do on the device what it does on a CPU?",
        (
            Part("E6 tests", "pytest tests/trainer", "suite:tests", CARD, 100),
            Part(
                "E6 LoRA",
                "0.6b, rank 16",
                "training:update",
                CARD,
                28,
                ("0.6b", {"lora": {"rank": 16, "alpha": 32, "targets": "all"}}),
            ),
            Part("E6 resumed", "a step after a checkpoint", "suite:resumed", CARD, 32),
            Part("E6 out of memory", "micro_batch_tokens=200000", "suite:out_of_memory", CARD, 28),
        ),
        (
            Expectation("no test fails", "they pass on a CPU", all_of("failed", at_most=0)),
            Expectation(
                "LoRA: peak memory is at most 1.1 times the estimate", ESTIMATE, all_of("peak_of_estimate", at_most=1.1)
            ),
            Expectation(
                "a resumed step has the loss of one that was not stopped",
                "the same arithmetic in the same order",
                all_of("loss_apart", at_most=1e-6),
            ),
            Expectation(
                "a rank out of memory ends the run within 10 s, with the reason in its error",
                "docs/failures.md",
                all_of("told_after_s", at_most=10.0),
            ),
        ),
    ),
    "E7": Experiment(
        "Servers keep the contract",
        "Does the contract of backends hold on a GPU, with and without logits in float32?",
        (
            Part("E7 vLLM", "launched as a run does", "servers:conformance", ("card", "vllm"), 150, ("vllm", {})),
            Part(
                "E7 vLLM 16 bits",
                "its head as its type",
                "servers:conformance",
                ("card", "vllm"),
                150,
                ("vllm", {"float32_logits": False}),
            ),
            Part(
                "E7 vLLM two GPUs",
                "tensor parallel",
                "servers:conformance",
                ("two cards", "vllm"),
                150,
                ("vllm", {"tensor_parallel_size": 2}),
            ),
            Part("E7 SGLang", "launched as a run does", "servers:conformance", ("card", "sglang"), 150, ("sglang", {})),
        ),
        (
            Expectation("no check fails within 0.3 nats", "rounding in 16 bits", all_of("failed", at_most=0)),
            Expectation("with logits in float32, less than 0.1 nats at most", HAND),
        ),
    ),
    "E8": Experiment(
        "Check of a normal pair",
        "What does `spot-async check` measure and warn of, with two servers of 0.6B?",
        (
            Part("E8 vLLM", "two servers, logits in float32", "servers:check", ("card", "vllm"), 200, ("vllm", {})),
            Part(
                "E8 vLLM 16 bits",
                "two servers, 16 bits",
                "servers:check",
                ("card", "vllm"),
                200,
                ("vllm", {"float32_logits": False}),
            ),
        ),
        (
            Expectation(
                "safe to train with, and no warning of 0.2 nats", "rounding of logits", all_of("refusals", at_most=0)
            ),
            Expectation("noise of 0.02 nats or less with float32 logits: certified selection is alive", HAND),
        ),
    ),
    "E9": Experiment(
        "Everything on one GPU",
        "Do student, teacher and trainer start on one card, sleep, wake, and survive a killed server?",
        (
            Part("E9 vLLM", "three iterations, memory in each", "servers:one_card", ("card", "vllm"), 300, ("vllm",)),
            Part(
                "E9 SGLang",
                "three iterations, memory in each",
                "servers:one_card",
                ("card", "sglang"),
                300,
                ("sglang",),
            ),
        ),
        (
            Expectation(
                "all start, and three iterations end well",
                "servers that share a card start in turn",
                equal("exit_code", 0),
            ),
            Expectation("a server that is killed is started again", "docs/failures.md", equal("restarted", True)),
        ),
    ),
    "E10": Experiment(
        "One iteration of SPOT",
        "Which server takes less for a SPOT iteration of 0.6B?",
        (
            Part("E10 vLLM", "batch 32, 1,024 tokens", "servers:iteration", ("card", "vllm"), 240, ("vllm",)),
            Part("E10 SGLang", "batch 32, 1,024 tokens", "servers:iteration", ("card", "sglang"), 240, ("sglang",)),
        ),
        (Expectation("vLLM takes less: exact candidates of all positions in one request", "sources of vLLM 0.32"),),
    ),
    "E11": Experiment(
        "Weight updates",
        "How soon are new weights live, by disk and as an adapter?",
        (
            Part("E11 vLLM", "1.7b, by disk and adapter", "weights:updates", ("card", "vllm"), 200, ("vllm", {})),
            Part("E11 SGLang", "1.7b, by disk and adapter", "weights:updates", ("card", "sglang"), 200, ("sglang", {})),
            Part(
                "E11 NCCL",
                "1.7b, by NCCL",
                "weights:updates",
                ("two cards", "vllm"),
                200,
                ("vllm", {"transport": "distributed"}),
            ),
        ),
        (
            Expectation(
                "all weights are live within 10 s of their directory's name", HAND, all_of("live_s", at_most=10.0)
            ),
        ),
    ),
    "E12": Experiment(
        "Several ranks, and two nodes",
        "Do NCCL's ranks train alike, end together, and meet across nodes?",
        (
            Part("E12 replicated", "two ranks", "ranks:together", ("two cards",), 90, ("none",)),
            Part("E12 sharded", "two ranks", "ranks:together", ("two cards",), 90, ("fsdp2",)),
            Part("E12 killed", "one of two ranks is killed", "ranks:killed", ("two cards",), 60),
            Part("E12 two nodes", "a rank on each", "ranks:two_nodes", ("card", "two nodes", "address"), 300),
        ),
        (
            Expectation("two ranks have the loss of one", "the same sums", all_of("loss_apart", at_most=1e-2)),
            Expectation(
                "a killed rank ends the run within 10 s, and is named",
                "docs/failures.md",
                all_of("told_after_s", at_most=10.0),
            ),
        ),
    ),
}

# What is cheap and decides most comes first: a lent card may be taken away.
ORDER = ("E5", "E3", "E1", "E4", "E6", "E2", "E7", "E8", "E10", "E9", "E11", "E12")
PARTS = {part.name: part for experiment in EXPERIMENTS.values() for part in experiment.parts}
