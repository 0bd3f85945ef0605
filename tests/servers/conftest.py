"""Real inference servers and tiny models for them. One server of a kind per session; nothing is skipped.

The interpreters of the servers' environments are named by SPOT_VLLM_PYTHON and SPOT_SGLANG_PYTHON, which
`make test-servers` sets after building them.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch; also for the servers

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from server_process import RunningServer, run_server
from tiny_models import make_model

from spot_async.backends.sglang.process import sglang_command
from spot_async.backends.shared.launch import Doorway, free_port
from spot_async.backends.shared.launch_settings import LaunchSettings
from spot_async.backends.vllm.process import Uses, vllm_command
from spot_async.config import LoraConfig

StartServer = Callable[..., AbstractContextManager[RunningServer]]

# Tiny models on a CPU. Without TORCHDYNAMO_DISABLE the first request for log-probabilities compiles C++ for half a
# minute; with more than one process vLLM's executor spins on every core. A spawned engine imports all of vLLM a second
# time, hence the plugin. A seeded request whose prompt is read in
# chunks ends a vLLM on a CPU ("CPU Generator does not use offset"), so prompts are read whole.
VLLM_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONPATH": str(Path(__file__).parent / "vllm_plugins"),
    "VLLM_PLUGINS": "forked_engine",
}
# vLLM has two model runners: V1, which it takes on CPUs, and V2, which it takes on GPUs. V2's kernels are Triton's, and
# run in Triton's interpreter here: 40 tokens a second.
VLLM_V2_ENVIRONMENT = {
    **VLLM_ENVIRONMENT,
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join([VLLM_ENVIRONMENT["PYTHONPATH"], str(Path(__file__).parent / "vllm_gpu_runner")]),
    "VLLM_PLUGINS": VLLM_ENVIRONMENT["VLLM_PLUGINS"] + ",interpreted_triton",
}
VLLM_ARGUMENTS = [
    *("--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-chunked-prefill"),
    *("--distributed-executor-backend", "uni"),
]
CACHE_GIB = 1 / 16

# PyTorch's own kernels for attention and sampling; the others are for GPUs. Without --sleep-on-idle a server that has
# nothing to do keeps a core busy.
SGLANG_LAUNCHER = Path(__file__).parent / "sglang_cpu_server.py"
SGLANG_ARGUMENTS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
    *("--context-length", "2048"),
]
# So many seconds pass before it looks whether a client has hung up: places that become free before were freed by the
# adapter.
SGLANG_ENVIRONMENT = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "600"}


# Defaults of a server's own, which would make every response the same and bend its log-probabilities.
BENDING = {"top_k": 1, "repetition_penalty": 1.5, "temperature": 0.3}

NO_KEY = ""  # for servers that tests attach to, as one asks an operator's


@dataclass(frozen=True)
class TinyModels:
    """Directories; student, teacher and `other`, a later student, share tokenizer and shapes."""

    student: Path
    teacher: Path
    other: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    root = tmp_path_factory.mktemp("models")
    return TinyModels(
        student=make_model(root / "student", seed=0),
        teacher=make_model(root / "teacher", seed=1),
        other=make_model(root / "other", seed=2),
    )


def interpreter(variable: str) -> str:
    """The interpreter that an environment variable names."""
    python = os.environ.get(variable)
    if not python or not Path(python).exists():
        pytest.fail(f"{variable} names no interpreter: run `make test-servers`", pytrace=False)
    return python


@pytest.fixture(scope="session")
def vllm_launch() -> LaunchSettings:
    """What starts a vLLM server here, with the V1 model runner."""
    return LaunchSettings(
        python=interpreter("SPOT_VLLM_PYTHON"),
        dtype="float32",
        cache_gib=CACHE_GIB,
        arguments=VLLM_ARGUMENTS,
        environment=VLLM_ENVIRONMENT,
    )


@pytest.fixture(scope="session")
def vllm_v2_launch(vllm_launch: LaunchSettings) -> LaunchSettings:
    """The same with the V2 model runner."""
    return vllm_launch.model_copy(update={"environment": VLLM_V2_ENVIRONMENT})


def sglang_wrapper(python: str, directory: Path) -> Path:
    """Write an interpreter that runs our launcher in place of SGLang's."""
    wrapper = directory / "python"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'[ "$1 $2" = "-m sglang.launch_server" ] && shift 2 && set -- "{SGLANG_LAUNCHER}" "$@"\n'
        f'exec "{python}" "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper


@pytest.fixture(scope="session")
def sglang_launch(tmp_path_factory: pytest.TempPathFactory) -> LaunchSettings:
    """What starts an SGLang server here: an interpreter that runs our launcher in place of SGLang's."""
    wrapper = sglang_wrapper(interpreter("SPOT_SGLANG_PYTHON"), tmp_path_factory.mktemp("sglang"))
    return LaunchSettings(
        python=str(wrapper),
        dtype="float32",
        cache_gib=CACHE_GIB,
        arguments=SGLANG_ARGUMENTS,
        environment=SGLANG_ENVIRONMENT,
    )


@pytest.fixture(scope="session")
def start_vllm(vllm_launch: LaunchSettings, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """`start_vllm(model, *arguments, ...)`: a vLLM server until the context ends, by the backend's own command."""
    return vllm_starter(vllm_launch, tmp_path_factory)


@pytest.fixture(scope="session")
def start_vllm_v2(vllm_v2_launch: LaunchSettings, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    return vllm_starter(vllm_v2_launch, tmp_path_factory)


def vllm_starter(launch: LaunchSettings, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    @contextmanager
    def start(
        model: Path,
        *arguments: str,
        max_logprobs: int = 64,
        takes_weights: bool = True,
        scale_out: bool = True,
        port: int | None = None,
        adapters: LoraConfig | None = None,
    ) -> Iterator[RunningServer]:
        port = port or free_port()
        settings = launch.model_copy(update={"arguments": [*launch.arguments, *arguments], "port": port})
        directory = tmp_path_factory.mktemp("vllm")
        doorway = Doorway(port, directory, NO_KEY)
        uses = Uses(max_logprobs=max_logprobs, takes_weights=takes_weights, adapters=adapters)
        command = vllm_command(settings, model, doorway, uses=uses)
        argv = [each for each in command.argv if scale_out or each != "--enable-scale-out"]
        environment, log_path = command.environment, directory / "log"
        with run_server(argv, environment=environment, port=port, model=model, log_path=log_path) as server:
            yield server

    return start


@pytest.fixture(scope="session")
def vllm_student(start_vllm: StartServer, models: TinyModels) -> Iterator[RunningServer]:
    """Everything switched on; tests that change its weights put the student's back."""
    with start_vllm(models.student, "--override-generation-config", json.dumps(BENDING)) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_v2_student(start_vllm_v2: StartServer, models: TinyModels) -> Iterator[RunningServer]:
    with start_vllm_v2(models.student, "--override-generation-config", json.dumps(BENDING)) as server:
        yield server


@pytest.fixture(scope="session")
def start_sglang(sglang_launch: LaunchSettings, tmp_path_factory: pytest.TempPathFactory) -> StartServer:
    """`start_sglang(model, *arguments)`: an SGLang server until the context ends, by the backend's own command."""

    @contextmanager
    def start(
        model: Path, *arguments: str, port: int | None = None, adapters: LoraConfig | None = None
    ) -> Iterator[RunningServer]:
        settings = sglang_launch.model_copy(update={"arguments": [*SGLANG_ARGUMENTS, *arguments]})
        port = port or free_port()
        directory = tmp_path_factory.mktemp("sglang")
        command = sglang_command(settings, model, Doorway(port, directory, NO_KEY), adapters=adapters)
        for name, text in command.files.items():
            (directory / name).write_text(text)
        log_path = directory / "log"
        with run_server(
            command.argv,
            environment=command.environment,
            port=port,
            model=model,
            log_path=log_path,
            ready_path="/model_info",
        ) as server:
            yield server

    return start


@pytest.fixture(scope="session")
def sglang_student(start_sglang: StartServer, models: TinyModels) -> Iterator[RunningServer]:
    """Short prefill chunks, so that prompts are read in parts; tests that change its weights put the student's back."""
    preferred = json.dumps({**BENDING, "min_new_tokens": 2, "stop": ["e"], "logit_bias": {"17": 30.0}})
    with start_sglang(
        models.student, "--chunked-prefill-size", "128", "--preferred-sampling-params", preferred
    ) as server:
        yield server


@pytest.fixture(scope="session")
def dense_logprobs() -> Callable[[Path, Sequence[int]], npt.NDArray[np.float32]]:
    """`dense_logprobs(model, tokens)`: a transformers forward in float32. Row i, (V,), is what comes after token i."""
    import torch
    from transformers import AutoModelForCausalLM

    load = functools.cache(lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())

    def forward(model: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            logits = load(model)(torch.tensor([list(tokens)])).logits[0]
        rows: npt.NDArray[np.float32] = logits.log_softmax(-1).numpy()
        return rows

    return forward
