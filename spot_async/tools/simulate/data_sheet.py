"""Rates of a GPU's data sheet, for what nobody has measured or stated: of servers that the run starts on named GPUs.

Programs reach a share of what a data sheet says, and the shares here are assumed. A generating server reads all weights
and every sequence's keys and values once for each step, in 16 bits, so its memory's bandwidth decides. Scoring takes 2
operations a parameter and token. Training takes those of the metric `perf/mfu`, and those of layers that are computed
again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile
from pathlib import Path

from spot_async.base.processes.gpus import GPUS
from spot_async.checks.device_shares import ServerOnDevice, servers_on_devices
from spot_async.checks.served import served_models
from spot_async.config import Config
from spot_async.errors import DataError
from spot_async.models.hub import local_path
from spot_async.models.model_size import ModelSize, forward_operations, read_size, training_operations
from spot_async.tools.simulate.rates import Tree, served_roles
from spot_async.types import PolicyNeeds

TRAINING_SHARE = 0.3  # of the operations per second, without fused kernels: what a run shows as `perf/mfu`
SCORING_SHARE = 0.4
DECODING_SHARE = 0.5  # of the bandwidth
LENGTH_SHARE = 0.5  # of the longest prompt and the longest response: the median
MOST_IN_FLIGHT = 4096  # of which a server's speed is computed


def data_sheet_rates(config: Config, needs: PolicyNeeds, known: Collection[str]) -> Tree:
    """Return rates and lengths for what is not `known`, by `cluster.gpu`.

    Empty where the run starts no server on GPUs that it numbers, or where its models are not here or of an unknown
    architecture.
    """
    served = served_models(config, needs)
    try:
        servers = servers_on_devices(served, config.cluster.device_gib or config.cluster.DEVICE_GIB)
        sizes = {role: read_size(Path(local_path(model.model))) for role, model in served.items()}
    except DataError:
        return {}
    rates: Tree = {"lengths": {"median": LENGTH_SHARE * config.sampling.max_response_tokens,
                               "prompts": LENGTH_SHARE * config.sampling.max_prompt_tokens}}  # fmt: skip
    for role, count in served_roles(config, needs).items():
        model = role if role in served else "student"  # the reference is its base
        here = [server for server in servers if server.role == model]
        size = sizes[model]
        if size is None or not here:
            return {}
        devices = len(here) / count
        if role == ("teacher" if needs.teacher_responses else "student"):
            rates[role] = _decoding(config, size, here, devices)
        else:
            speed = devices * SCORING_SHARE * GPUS[config.cluster.gpu].operations_per_s / (2 * size.parameters)
            rates[role] = {"tokens_per_s": speed}
    student = sizes["student"]
    if config.training.device != "cpu" and student is not None:
        rates["trainer"] = {"tokens_per_s": _training_tokens_per_s(config, student)}
    return {name: own for name, own in rates.items() if name not in known}


def data_sheet_words(config: Config, names: Collection[str]) -> str:
    gpu = GPUS[config.cluster.gpu]
    return (
        f"of a data sheet and not measured: {', '.join(names)} (cluster.gpu={config.cluster.gpu}, "
        f"{gpu.operations_per_s / 1e12:.0f} TFLOP/s and {gpu.bytes_per_s / 1e12:.3g} TB/s; assumed is that training "
        f"reaches {TRAINING_SHARE:.0%} of that, scoring {SCORING_SHARE:.0%} and generation {DECODING_SHARE:.0%}, and "
        f"that half of the responses have at most {LENGTH_SHARE:.0%} of sampling.max_response_tokens)"
    )


def _decoding(config: Config, size: ModelSize, here: list[ServerOnDevice], devices: float) -> Tree:
    """Return a generating server's speed by requests in flight, as far as its cache holds them."""
    bandwidth = devices * DECODING_SHARE * GPUS[config.cluster.gpu].bytes_per_s
    # While it is written, a response has half of its final length on average.
    context = LENGTH_SHARE * (config.sampling.max_prompt_tokens + config.sampling.max_response_tokens / 2)
    room = max(1.0, min(server.cache_tokens for server in here) / context)
    doublings = takewhile(lambda n: n <= min(room, MOST_IN_FLIGHT), (1 << power for power in range(20)))
    levels = {n: n * bandwidth / (2 * size.parameters + n * context * size.cache_bytes_per_token) for n in doublings}
    return {"levels": levels}


def _training_tokens_per_s(config: Config, size: ModelSize) -> float:
    """Return the response tokens that all ranks train a second."""
    training, rows = config.training, round(LENGTH_SHARE * config.sampling.max_response_tokens)
    length = rows + round(LENGTH_SHARE * config.sampling.max_prompt_tokens)
    recomputes = training.behavior_under(config.max_staleness) == "recomputed"
    needed = training_operations(size, [length], rows, lora=training.lora, recomputes_behavior=recomputes)
    again = training.recomputed_layers(size.layers) / size.layers
    needed += round(again * forward_operations(size, [length], 0, training.lora))
    return rows * training.ranks * TRAINING_SHARE * GPUS[config.cluster.gpu].operations_per_s / needed
