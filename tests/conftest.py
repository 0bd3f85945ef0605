"""What several test files build alike: tiny random models, supervision for them, and a trainer in this process.

Tests import nothing from each other, so builders are fixtures that return functions. torch and transformers
are imported inside: most files need neither, and importing them takes seconds.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch; also for the processes that tests start
# Tests, and our modules for the processes that they start, are compiled once even where the shell says to keep nothing.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
# What we print is that of no terminal, wherever the tests run, and no proxy stands between them and their servers.
os.environ.update({"COLUMNS": "80", "LINES": "25"})
os.environ.update(dict.fromkeys(["FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS"], ""))
os.environ.update(dict.fromkeys(["http_proxy", "https_proxy", "all_proxy"], ""))

import contextlib
import gc
import re
import shutil
import signal
import sqlite3
import ssl
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import hypothesis
import msgspec
import numpy as np
import pytest
import structlog
from makers import MakeBatch, MakeSample, MakeTargets, MakeTrainer
from whole_distributions import dense_scores, heavy_tailed, recomputed  # noqa: F401 - fixtures

from spot_async.base.processes.resources import keep_rows_apart
from spot_async.config import TrainingConfig
from spot_async.trainer.messages import Batch
from spot_async.trainer.settings import TrainerSettings
from spot_async.types import Divergence, Pull, SoftTargets, Supervision, VersionSpan, WeightVersion

keep_rows_apart()  # as a server does; nothing above computes with torch

if TYPE_CHECKING:
    import torch

    from spot_async.serving.engine.engine import Engine
    from spot_async.trainer.rank import StudentTrainer

sys.dont_write_bytecode = False  # of this process, as PYTHONDONTWRITEBYTECODE above
VOCAB = 50
collect_ignore = ["servers"]  # those need installed servers: `make test-servers`

# Whether a property holds must depend on the code alone: every run tries the same examples, and nothing is timed, as a
# busy machine is slow. `--hypothesis-profile=explore` tries new examples.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("explore", hypothesis.settings.get_profile("repeatable"), derandomize=False)
hypothesis.settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported now stays: looking through it for garbage again and again takes a tenth of the time."""
    gc.disable()
    collected = yield
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()
    return collected


@pytest.fixture(scope="module", autouse=True)
def looked_through() -> Iterator[None]:
    """Garbage of a file is found when the file ends. What the file imported stays, too."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    """The usual certificates are read once, and not again by each endpoint, which takes 20 ms."""
    read = httpx.create_ssl_context
    usual = read()

    def context(**given: Any) -> ssl.SSLContext:
        is_usual = given in ({}, {"verify": True}) and not {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys()
        return usual if is_usual else read(**given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "create_ssl_context", context)
        yield


@pytest.fixture(scope="session", autouse=True)
def flushed() -> Iterator[None]:
    """This process does not wait for the disk: what it wrote outlives it, and no test cuts the power. `crashes/disk.py`
    forgets what was not flushed, and so tests whether the right files are.
    """
    connect = sqlite3.connect

    def connected(*given: Any, **settings: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*given, **settings)
        if not settings.keys() & {"uri", "factory"}:
            with contextlib.suppress(sqlite3.Error):  # of a file that is none of its own, or locked
                connection.execute("PRAGMA synchronous = OFF")
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        patch.setattr(sqlite3, "connect", connected)
        yield


@pytest.fixture
def asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that failed is sent again after a twenty-fifth of the delay."""
    monkeypatch.setattr("spot_async.base.retry.BASE_DELAY_S", 0.01)


@pytest.fixture
def trusted_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates are not tried in a process of their own first, as `test_template_trial.py` has it."""
    for room in ("data.prompts", "models.bridges"):
        monkeypatch.setattr(f"spot_async.{room}.overdoes", lambda *call: None)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories of small random Qwen3 models and a tokenizer of whole words, `w0` to the last of the vocabulary."""
    made: dict[str, Path] = {}

    def make(**choices: Any) -> Path:
        if str(choices) not in made:
            made[str(choices)] = new(**choices)
        return shutil.copytree(made[str(choices)], tmp_path_factory.mktemp("model"), dirs_exist_ok=True)

    def new(*, seed: int = 0, special_tokens: int = 0, **changes: Any) -> Path:
        import torch
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

        directory = tmp_path_factory.mktemp("model")
        torch.manual_seed(seed)
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,  # far from uniform distributions
        }
        config = Qwen3Config(**{**sizes, **changes})
        Qwen3ForCausalLM(config).save_pretrained(directory)
        names = [f"w{i}" for i in range(config.vocab_size)]
        words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="w0", eos_token="w1", extra_special_tokens=names[:special_tokens]
        ).save_pretrained(directory)
        return directory

    return make


@pytest.fixture(params=["fast", "general"])
def engine_for(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    """Makes serving engines, `make(directory, **settings)`, all of them on one of the two paths."""

    def make(directory: Path, **settings: object) -> Engine:
        from spot_async.serving.engine.engine import Engine
        from spot_async.serving.engine.fused import fused
        from spot_async.serving.engine.model import load_model
        from spot_async.serving.settings import EngineSettings

        at_once = {name: settings.pop(name) for name in [*settings] if hasattr(Engine, name)}
        chosen = EngineSettings(**{"slots": 8, **settings})  # type: ignore[arg-type]
        model = load_model(directory, chosen)
        engine = Engine(fused(model) if request.param == "fast" else model, chosen)
        vars(engine).update(at_once)
        return engine

    return make


@pytest.fixture(scope="session")
def random_architecture(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directories of small random models of many architectures, each made once: `make(name, seed)`."""
    import torch
    import transformers

    vocab_size = 61
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    context = {"max_position_embeddings": 160}
    configs: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
        "qwen3": lambda: transformers.Qwen3Config(**sizes, **context, head_dim=8, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**sizes, **context),
        "llama": lambda: transformers.LlamaConfig(
            **sizes, **context, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, head_dim=12
        ),
        "plain_llama": lambda: transformers.LlamaConfig(**sizes, **context),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=150),
        "gemma2": lambda: transformers.Gemma2Config(
            **sizes,
            **context,
            head_dim=8,
            query_pre_attn_scalar=8,
            final_logit_softcapping=2.0,
            attn_logit_softcapping=1.0,
        ),
        "granite": lambda: transformers.GraniteConfig(
            **sizes, **context, logits_scaling=0.3, attention_multiplier=0.5, residual_multiplier=0.4
        ),
        "mistral": lambda: transformers.MistralConfig(**sizes, max_position_embeddings=140, sliding_window=140),
        "mixtral": lambda: transformers.MixtralConfig(**sizes, **context, num_local_experts=4, sliding_window=None),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **sizes, **context, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "glm4_moe": lambda: transformers.Glm4MoeConfig(
            **sizes, **context, head_dim=8, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16
        ),
        "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(
            **sizes, **context, moe_num_experts=8, moe_k=2, moe_intermediate_size=16
        ),
        # Layers that read their modules' weights themselves.
        "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
            **sizes,
            **context,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "lfm2": lambda: transformers.Lfm2Config(**sizes, **context, layer_types=["conv", "full_attention"]),
        "falcon_h1": lambda: transformers.FalconH1Config(
            **sizes, **context, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
        ),
        # With a buffer in its files.
        "gemma4": lambda: transformers.Gemma4TextConfig(
            **sizes, **context, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=0, num_kv_shared_layers=0
        ),
    }
    made: dict[tuple[str, int], Path] = {}

    def make(name: str = "qwen3", seed: int = 0) -> Path:
        if (name, seed) not in made:
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(configs[name]())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim > 1:
                        parameter.normal_(std=0.3)  # far from uniform distributions
                for buffer in model.state_dict().keys() & dict(model.named_buffers()):
                    model.get_buffer(buffer).uniform_(0.5, 1.5)
            made[name, seed] = tmp_path_factory.mktemp(f"{name}-{seed}")
            model.save_pretrained(made[name, seed])
        return made[name, seed]

    return make


@pytest.fixture(scope="session")
def student(random_model: Callable[..., Path]) -> Path:
    """The student that trainer tests train; nobody writes to it."""
    return random_model(attention_dropout=0.5)  # training must not apply it


@pytest.fixture(scope="session")
def supervision() -> Callable[..., Supervision]:
    """Trajectories whose behaviour lies near a random student's log-probabilities, so that no ratio is extreme."""

    def make(ordinal: int, tokens: int, *targets: SoftTargets, **arrays: Any) -> Supervision:
        draw = np.random.default_rng(ordinal)
        behavior = draw.normal(-4.0, 1.0, tokens).astype(np.float32)
        fields: dict[str, Any] = {
            "behavior_logprobs": behavior,
            "pulls": (Pull(logprobs=behavior + draw.normal(0.0, 1.0, tokens).astype(np.float32)),),
            "reference_logprobs": behavior + draw.normal(0.0, 0.3, tokens).astype(np.float32),
        }
        return Supervision(
            prompt_ordinal=ordinal,
            problem_id=f"problem-{ordinal}",
            prompt_ids=draw.integers(0, VOCAB, 3 + ordinal % 5).astype(np.int32),
            response_ids=draw.integers(0, VOCAB, tokens).astype(np.int32),
            version=WeightVersion(0, 0),
            **{"soft_targets": targets, **fields, **arrays},
        )

    return make


@pytest.fixture(scope="session")
def soft_targets() -> Callable[..., SoftTargets]:
    """Targets of `k` candidates at given positions: of cross-entropies, less a `baseline` in all or without, or of a
    divergence, which may need a tail."""

    def make(
        positions: list[int], k: int, divergence: Divergence | None = None, *, baseline: float | None = None
    ) -> SoftTargets:
        draw = np.random.default_rng(k)
        rows, has_tail = len(positions), divergence is not None and not divergence.is_conditional
        ids = np.array([draw.permutation(VOCAB)[:k] for _ in positions], np.int32).reshape(rows, k)
        cells = draw.dirichlet(np.ones(k + has_tail), rows).astype(np.float32).reshape(rows, k + has_tail)
        return SoftTargets(
            positions=np.array(positions, np.int32),
            token_ids=ids,
            probabilities=cells[:, :k],
            weights=draw.uniform(0.1, 1.0, rows).astype(np.float32),
            tails=cells[:, k] if has_tail else None,
            divergence=divergence,
            baselines=None if baseline is None else baseline * draw.dirichlet(np.ones(k), rows).astype(np.float32),
        )

    return make


@pytest.fixture(scope="session")
def mixed_batch(supervision: Any, soft_targets: Any) -> Callable[[], list[Supervision]]:
    """Unequal lengths, one token, no targets, empty targets, unsorted positions, different k, given advantages,
    positions that the teacher could not be asked about, divergences of several kinds, pulls beside a reward, baselines
    beside other targets, a bonus for the entropy, also where there is no policy term, tokens that were only read."""
    jsd = Divergence(forward=0.3, reverse=0.7, forward_skew=0.3, reverse_skew=0.7)

    def with_reads(sample: Supervision, *reads: range) -> Supervision:
        is_read = np.isin(np.arange(len(sample.response_ids)), [t for read in reads for t in read])
        spans = [VersionSpan(t, t + 1, None if each else sample.version, bool(each)) for t, each in enumerate(is_read)]
        return msgspec.structs.replace(sample, version_spans=tuple(spans), policy_mask=~is_read)

    def make() -> list[Supervision]:
        pulls = (Pull(logprobs=np.full(8, -2.0, np.float32), clip=(-0.5, np.inf)),) * 2
        return [
            supervision(0, 12, soft_targets([7, 2, 11], 4)),
            supervision(1, 1, soft_targets([0], 4)),
            supervision(
                2, 30, policy_mask=np.arange(30) % 3 > 0, entropy_bonus=np.linspace(-0.2, 0.4, 30, dtype=np.float32)
            ),
            supervision(3, 5, soft_targets([], 4)),
            with_reads(supervision(4, 9, soft_targets([0, 3], 16), soft_targets([8, 0], 4, baseline=0.8)), range(4, 7)),
            with_reads(
                supervision(5, 17, pulls=(), advantages=np.linspace(-2, 2, 17, dtype=np.float32)),
                *(range(2, 5), range(11, 17)),
            ),
            supervision(6, 6, soft_targets([1, 1, 4], 3), pulls=()),
            supervision(
                7,
                8,
                soft_targets([6, 0], 5, jsd),
                soft_targets([3], 4, Divergence(reverse=1.0, clip=0.4)),
                soft_targets([5, 2], VOCAB, Divergence(forward=1.0, is_conditional=True, temperature=2.0)),
                pulls=pulls,
                advantages=np.ones(8, np.float32),
            ),
        ]

    return make


@pytest.fixture(scope="session")
def small_batch(supervision: MakeSample, soft_targets: MakeTargets) -> MakeBatch:
    """The batch of an iteration: four samples, one of a single token, one with soft targets at some positions."""

    def make(iteration: int) -> Batch:
        targets = [soft_targets(at, 4, baseline=0.5) for at in ([], [], [0, 5], [])]
        given = enumerate(zip((9, 1, 7, 12), targets, strict=True), start=4 * iteration)
        return Batch(iteration, tuple(supervision(ordinal, tokens, target) for ordinal, (tokens, target) in given))

    return make


@pytest.fixture(scope="session")
def trainer_settings() -> Callable[..., TrainerSettings]:
    """Settings of a short run: `make(model, run_directory, temperature=..., seed=..., **training)`."""

    def make(
        model: Path,
        run_directory: Path,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        merged_every: int = 1,
        publishes_beside: bool = False,
        **training: Any,
    ) -> TrainerSettings:
        training = {"iterations": 10, "batch_size": 8, "mini_batch_size": 8, "learning_rate": 1e-3, **training}
        return TrainerSettings(
            training=TrainingConfig(**training),
            model_directory=str(model),
            run_directory=str(run_directory),
            temperature=temperature,
            seed=seed,
            iterations=training["iterations"],
            merged_every=merged_every,
            publishes_beside=publishes_beside,
        )

    return make


@pytest.fixture(scope="module")
def make_trainer(
    trainer_settings: Callable[..., TrainerSettings], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., StudentTrainer]]:
    """A trainer in this process, its only rank; called as `trainer_settings` is."""
    import torch

    from spot_async.trainer.parallel import process_group, strategy_of
    from spot_async.trainer.rank import StudentTrainer

    cpu = torch.device("cpu")

    def make(*paths: Path, **choices: Any) -> StudentTrainer:
        settings = trainer_settings(*paths, **choices)
        return StudentTrainer(settings, strategy_of(settings.training), cpu)

    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # undone at once: no process that a test starts may inherit it
            patch.setenv("RANK", "0")
            patch.setenv("WORLD_SIZE", "1")
            stack.enter_context(process_group(str(tmp_path_factory.mktemp("group")), cpu, "fsdp2"))
        yield make


@pytest.fixture
def student_trainer(make_trainer: MakeTrainer, student: Path, tmp_path: Path) -> MakeTrainer:
    """Makes trainers of the `student`, in the test's folder or one in it: `student_trainer("its name", **choices)`."""
    return lambda name="", **choices: make_trainer(student, tmp_path / name, **choices)


@pytest.fixture(scope="session")
def dense_loss() -> Callable[..., torch.Tensor]:
    """The loss of one mini-batch, straight from a model's full-vocabulary logits; shares no code with the trainer."""
    import torch
    from dense_rows import dense_row_loss

    def loss_of(model: Any, batch: list[Supervision], training: TrainingConfig, temperature: float) -> torch.Tensor:
        reads = [
            [t for span in sample.version_spans if span.is_read for t in range(span.start, span.end)]
            for sample in batch
        ]
        total_tokens = sum(len(sample.response_ids) - len(read) for sample, read in zip(batch, reads, strict=True))
        loss = torch.zeros((), dtype=torch.float64)
        for sample, read in zip(batch, reads, strict=True):
            prompt, response = sample.prompt_ids.tolist(), sample.response_ids.tolist()
            counted = len(response) - len(read)
            logits = model(torch.tensor([prompt + response])).logits[0] / temperature
            token_losses = []
            for t, token in enumerate(response):
                if t in read:
                    continue
                logprob = logits[len(prompt) + t - 1].log_softmax(-1)[token]
                old = float(sample.behavior_logprobs[t])
                token_loss = torch.zeros((), dtype=torch.float64)
                advantage = None
                if sample.pulls or sample.advantages is not None:
                    advantage = 0.0 if sample.advantages is None else float(sample.advantages[t])
                for pull in sample.pulls:
                    least, most = pull.clip or (-np.inf, np.inf)
                    difference = min(max(float(pull.logprobs[t]) - old, least), most)
                    advantage += difference * (1.0 if pull.weights is None else float(pull.weights[t]))
                if sample.policy_mask is not None and not sample.policy_mask[t]:
                    advantage = None  # still one of the response's tokens
                if advantage is not None:
                    ratio = (logprob - old).exp()
                    surrogate = min(ratio * advantage, ratio.clamp(1 - training.clip, 1 + training.clip) * advantage)
                    if training.dual_clip is not None and advantage < 0:
                        surrogate = max(surrogate, torch.tensor(training.dual_clip * advantage))
                    token_loss = token_loss - surrogate
                if training.reference_kl:
                    log_ratio = (float(sample.reference_logprobs[t]) - logprob).clamp(-20, 20)
                    token_loss = token_loss + training.reference_kl * (log_ratio.exp() - 1 - log_ratio).clamp(max=10)
                if sample.entropy_bonus is not None:
                    row = logits[len(prompt) + t - 1].log_softmax(-1)
                    token_loss = token_loss + float(sample.entropy_bonus[t]) * (row.exp() * row).sum()
                token_losses.append(token_loss)
            trajectory_loss = sum(token_losses) / counted
            for target in sample.soft_targets:
                for n, position in enumerate(target.positions.tolist()):
                    row = logits[len(prompt) + position - 1].log_softmax(-1)
                    trajectory_loss = trajectory_loss + float(target.weights[n]) * dense_row_loss(row, target, n)
            share = 1 / len(batch) if training.loss_aggregation == "sequence_mean" else counted / total_tokens
            loss = loss + share * trajectory_loss
        return loss

    return loss_of


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nothing that is logged is shown."""
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="session")
def few_problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 of the example's 8000 problems, where a plan's prompts need not be rendered all."""
    data = Path(__file__).parents[1] / "examples" / "running_sum" / "data"
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text("".join((data / "train.jsonl").read_text().splitlines(keepends=True)[:200]))
    return path


@pytest.fixture(scope="session")
def faults() -> ModuleType:
    """`support/faulty_proxy.py`: a proxy that damages, delays and refuses."""
    import faulty_proxy

    return faulty_proxy


@pytest.fixture(scope="module")
def servers_on_threads() -> Iterator[None]:
    """Servers of kind `local` are started as `support/server_on_thread.py` does, for as long as a file's tests run."""
    import server_on_thread

    from spot_async.backends.local.server import LocalServer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalServer, "_launch", server_on_thread.launch)
        yield


@pytest.fixture(scope="module")
def trainer_on_thread() -> Iterator[None]:
    """Trainers, of one rank each, are started as `support/trainer_on_thread.py` does, for as long as a file's tests
    run. What runs ask of their servers at their start is answered as `support/kept_replies.py` does.
    """
    import kept_replies
    import trainer_on_thread

    from spot_async.backends.local.server import LocalServer
    from spot_async.running import services
    from spot_async.trainer.handle import TrainerProcess

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerProcess, "_make_ranks", trainer_on_thread.make)
        patch.setattr(services, "diagnose", kept_replies.diagnose)
        patch.setattr(LocalServer, "post", kept_replies.post)
        yield


@pytest.fixture(scope="session")
def running_server() -> Callable[..., AbstractContextManager[str]]:
    """The address of a `spot-async serve` while it runs: `running_server(model, *options, key=None)`."""

    @contextlib.contextmanager
    def running(model: Path, *options: str, key: str | None = None) -> Iterator[str]:
        environment = {name: value for name, value in os.environ.items() if name != "SPOT_ASYNC_API_KEY"}
        environment |= {"SPOT_ASYNC_API_KEY": key} if key else {}
        command = [sys.executable, "-m", "spot_async", "serve", str(model), "--port", "0", *options]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        try:
            first = process.stderr.readline()
            assert re.match(rf"serving {re.escape(str(model))} with \w+ on 127.0.0.1 port ", first), (
                first + process.stderr.read()
            )
            yield f"http://127.0.0.1:{first.split()[-1]}"
            process.send_signal(signal.SIGINT)  # as Ctrl-C does
            assert process.wait(timeout=300) == 0
            assert process.stderr.read() == "stopped\n", "it complained"
        finally:
            process.kill()
            process.wait()

    return running


@pytest.fixture(scope="session")
def paid_endpoint() -> Callable[..., AbstractContextManager[str]]:
    """The address of `paid_endpoint.py` while it runs, a process of its own: `paid_endpoint("--vocabulary", "48")`."""

    @contextlib.contextmanager
    def running(*options: str) -> Iterator[str]:
        command = [sys.executable, str(Path(__file__).parent / "paid_endpoint.py"), *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()
            process.wait()

    return running
