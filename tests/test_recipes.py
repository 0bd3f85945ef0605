"""The recipes of configs/paper: each can start where its models and data lie, and holds the paper's settings."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from paper_directory import DATED_TEMPLATE, PROBLEMS, SHAPES, TEMPLATE, make_data, make_interpreter
from typer.testing import CliRunner

from spot_async.checks import device_shares
from spot_async.checks.plan import plan_evaluation, plan_training
from spot_async.cli import app
from spot_async.config.loading import load_config
from spot_async.data.prompts import PromptSchedule
from spot_async.errors import ConfigError
from spot_async.models.files import read_model
from spot_async.models.model_size import size_of
from spot_async.run_directory.layout import name_of
from spot_async.tools.check import requirements

pytestmark = pytest.mark.usefixtures("trusted_templates")
PAPER = Path(__file__).parents[1] / "configs" / "paper"
RECIPES = sorted(path.relative_to(PAPER).as_posix() for path in PAPER.glob("[tf]*-*/*.yaml")) + sorted(
    path.relative_to(PAPER).as_posix() for path in PAPER.glob("table[123]/*.yaml")
)
SIZES = ("Qwen3-0.6B-Base", "Qwen3-1.7B-Base", "Qwen3-4B-Base", "Qwen3-4B", "Qwen3-8B")
LLAMAS = ("Llama-3.2-3B-Instruct", "Llama-3.1-8B-Instruct")


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory, random_model):
    """A working directory as the recipes want it: tiny stand-ins for models, data and servers under the real names."""
    directory = tmp_path_factory.mktemp("paper")
    stand_in = random_model(max_position_embeddings=40960)
    (stand_in / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "models").mkdir()
    for name in SIZES:
        (directory / "models" / name).symlink_to(stand_in)
    for name in LLAMAS:
        (directory / "models" / name).mkdir()
        for file in stand_in.iterdir():
            (directory / "models" / name / file.name).symlink_to(file)
        (directory / "models" / name / "chat_template.jinja").unlink()
        (directory / "models" / name / "chat_template.jinja").write_text(DATED_TEMPLATE)
    for server in ("sglang", "vllm"):
        packages = directory / f".venv-{server}" / "packages"
        (packages / server).mkdir(parents=True)
        (packages / server / "__init__.py").touch()
        make_interpreter(packages.parent / "bin" / "python", f"env PYTHONPATH={packages} {sys.executable}")
    make_data(directory / "data")
    before = Path.cwd()
    os.chdir(directory)
    yield directory
    os.chdir(before)


def iterations(config, problems: int) -> int:
    """Of as many usable problems."""
    return PromptSchedule(
        [None] * problems,
        batch_size=config.training.batch_size,
        run_seed=0,
        shuffle=True,
        epochs=config.training.epochs,
        iterations=config.training.iterations,
    ).iterations


def test_there_is_one_for_every_row():
    methods = ["eopd", "grpo", "kd", "opd", "spot"]
    assert [r for r in RECIPES if r.startswith("table1/")] == sorted(
        f"table1/qwen3-{size}-{method}.yaml" for size in ("0.6b", "1.7b", "4b") for method in methods
    )
    assert len([r for r in RECIPES if r.startswith("table2/")]) == 5
    assert len([r for r in RECIPES if r.startswith("table3/")]) == 2
    assert len([r for r in RECIPES if r.startswith("figure-beta/")]) == 4
    assert [r for r in RECIPES if r.startswith("table-llama/")] == [
        f"table-llama/{method}.yaml" for method in ("eopd", "grpo", "opd", "spot")
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_could_start_and_holds_the_papers_settings(recipe):
    config = load_config(PAPER / recipe, here(recipe))
    plan = plan_training(config)
    assert not plan.reads_clock  # the same prompts on any day
    training, sampling, kind = config.training, config.sampling, config.policy.kind
    is_kd, is_grpo, is_llama, is_4b = kind == "kd", kind == "grpo", "llama" in recipe, "4b" in recipe
    assert training.learning_rate == (1e-5 if is_kd else 3e-6)
    assert (training.schedule, training.warmup_iterations) == ("cosine", 0)
    assert (training.weight_decay, training.max_grad_norm, training.clip) == (0.01, 1.0, 0.2)
    assert training.batch_size == 128
    assert training.batch_size // training.mini_batch_size == (1 if is_kd else 4)
    assert (training.dtype, training.behavior) == ("bfloat16", "recomputed")
    assert training.loss_aggregation == ("token_mean" if is_kd or is_grpo else "sequence_mean")
    assert (training.dual_clip, training.reference_kl) == ((3.0, 1e-3) if is_grpo else (None, 0.0))
    assert training.epochs == (2 if is_4b and not is_kd else 3)
    if not is_kd:
        assert iterations(config, 14_116 if is_4b else 7_500) == (220 if is_4b else 174)
    assert config.data.train.layout == ("dapo" if is_4b else "math")
    assert len(plan.problems) == PROBLEMS
    assert sampling.temperature == 1.0
    assert sampling.top_p == (0.8 if is_llama else 1.0)
    assert (sampling.max_prompt_tokens, sampling.max_response_tokens) == (1024, 4096)
    assert (config.prompt.template, config.prompt.thinking) == (("student", None) if is_grpo else ("teacher", False))
    assert config.verifier.kind == "boxed_match"
    assert plan.policy.needs.samples_per_prompt == (8 if is_grpo else 1)
    assert config.evaluation.preset == "paper"
    assert list(config.evaluation.benchmarks) == ["MATH500", "AMC23", "Minerva", "HMMT", "AIME24", "AIME25"]
    assert (config.evaluation.temperature, config.evaluation.top_p, config.evaluation.seed) == (1.0, 0.8, 42)
    assert config.student.model == f"models/{student_of(recipe)}"
    if is_grpo:
        assert config.teacher is None
        assert config.reference.model == config.student.model
    else:
        assert config.teacher.model == ("models/Llama-3.1-8B-Instruct" if is_llama else "models/Qwen3-8B")


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_could_start_under_vllm_as_well_and_is_the_same_run(recipe, tmp_path):
    over = with_servers(tmp_path, recipe, "vllm-grpo.yaml" if recipe.endswith("grpo.yaml") else "vllm.yaml")
    config, under_sglang = load_config(over, here(recipe)), load_config(PAPER / recipe, here(recipe))
    plan = plan_training(config)
    other = config.reference if config.teacher is None else config.teacher
    assert {config.student.backend.kind, other.backend.kind} == {"vllm"}
    launched = [each.launch for model in (config.student, other) for each in model.backend.servers()]
    assert [each.devices for each in launched] == ["0", "1", "2", "3"]
    assert {each.python for each in launched} == {".venv-vllm/bin/python"}
    reference = plan.reference
    assert (reference and reference.model) == (config.reference.model if config.teacher is None else None)
    assert without_backends(config) == without_backends(under_sglang)


def with_servers(tmp_path: Path, recipe: str, *servers: str) -> Path:
    """A user's file of one line."""
    over = tmp_path / "mine.yaml"
    over.write_text(f"base: [{', '.join(f'{PAPER}/{name}' for name in (recipe, *servers))}]\n")
    return over


def without_backends(config) -> dict[str, Any]:
    tree = config.model_dump()
    for role in ("student", "teacher", "reference"):
        (tree[role] or {}).pop("backend", None)
    return tree


def here(recipe: str) -> list[str]:
    """What is elsewhere than the recipe says."""
    return ["data.train.path=data/dapo_math.jsonl"] if "4b" in recipe else []


def test_the_papers_other_evaluations_can_start_and_keep_to_its_protocol():
    found = {}
    for path in sorted((PAPER / "evaluation").glob("[!s]*.yaml")):
        mmlu = "evaluation.benchmarks.MMLU-Pro"
        files = [f"{mmlu}.path=data/mmlu_pro_test.jsonl", f"{mmlu}.examples.path=data/mmlu_pro_validation.jsonl"]
        config = load_config(
            path, [*(files if path.stem == "out-of-domain" else []), f"student.model=models/{LLAMAS[0]}"]
        )
        assert (config.evaluation.preset, config.evaluation.seed) == ("paper", 42)
        assert [each.launch.devices for each in config.student.backend.servers()] == ["0", "1", "2", "3"]
        found[path.stem] = plan_evaluation(config, read_model("student", config.student.model))
        assert not any(each.reads_clock for each in found[path.stem])
        assert config.evaluation.pass_k == ([4, 8, 16, 32] if path.stem == "pass-at-k" else [])
    assert {stem: [(each.name, each.samples) for each in planned] for stem, planned in found.items()} == {
        "math": [(name, 8) for name in ("MATH500", "AMC23", "Minerva", "HMMT", "AIME24", "AIME25")],
        "out-of-domain": [("GPQA-Diamond", 8), ("MMLU-Pro", 1), ("AlpacaEval", 1)],
        "pass-at-k": [("AIME24", 64), ("AIME25", 64), ("AMC23", 64)],
    }
    choice, knowledge, outputs = found["out-of-domain"]
    assert (choice.verifier.kind, knowledge.verifier.kind, outputs.verifier) == (*["multiple_choice"] * 2, None)
    assert knowledge.sources[0].problem.text.count("The answer is") == 5


@pytest.mark.long
def test_a_template_that_writes_todays_date_is_warned_of_until_one_is_given():
    recipe = str(PAPER / "table-llama" / "opd.yaml")
    for command in ("train", "eval"):
        for given, is_warned in ([], False), (["prompt.template_arguments={}"], True):
            shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, [command, recipe, "--dry-run", *given])
            assert shown.exit_code == 0, shown.output
            assert shown.output.count("warning: prompt.template_arguments") == is_warned
            if command == "train":  # the stand-in's tokenizer knows no dates
                assert ("26 Jul 2024 user" in shown.output) != is_warned
    with pytest.raises(ConfigError, match=r"prompt\.template_arguments\.style is not the paper's"):
        load_config(Path(recipe), ["prompt.template_arguments.style=terse"])


def test_runs_of_different_recipes_go_to_different_directories(tmp_path):
    names = [name_of(PAPER / recipe) for recipe in RECIPES]
    assert "paper-table2-full" in names
    assert len({*names}) == len(RECIPES)
    assert name_of(tmp_path / "mine.yaml") == name_of(PAPER.parent / ".." / "mine.yaml") == "mine"


def student_of(recipe: str) -> str:
    if "llama" in recipe:
        return LLAMAS[0]
    if recipe.startswith("table1/"):
        return next(name for name in SIZES if name.lower().removesuffix("-base") in recipe)
    return SIZES[0] if recipe.startswith("table2/") else SIZES[1]


@pytest.mark.parametrize("recipe", [r for r in RECIPES if "table1" not in r or "spot" in r or "kd" in r])
def test_methods_hold_their_settings_but_for_what_is_ablated(recipe):
    policy = load_config(PAPER / recipe).policy
    if policy.kind == "eopd":
        assert (policy.top_k, policy.alpha, policy.tau_nats) == (16, 1.0, 0.8)
    if policy.kind == "kd":
        assert (policy.top_k, policy.forward_kl_weight) == (16, 0.5)
    if policy.kind != "spot":
        return
    name = Path(recipe).stem
    assert (policy.positions, policy.score_top_k, policy.probe_top_k, policy.probes) == (2, 16, 4, 1)
    assert (policy.lambda_mass, policy.lambda_shape, policy.gamma) == (0.5, 0.5, 1.0)
    assert policy.beta == (float(name) if recipe.startswith("figure-beta/") else 0.1)
    assert policy.score_variant.lower() == (name if recipe.startswith("table2/") else "full")
    assert policy.verifier_guidance == (name != "without-verifier-guidance")


def test_grpo_leaves_thinking_to_the_template_and_the_others_end_it():
    for method, ending in (("grpo", "assistant"), ("opd", "assistant w7")):
        config = load_config(PAPER / "table1" / f"qwen3-0.6b-{method}.yaml")
        plan = plan_training(config)
        assert plan.renderer.text(next(iter(plan.schedule)).problem).endswith(ending)


@pytest.mark.parametrize(
    ("recipe", "servers", "frozen"),
    [
        ("spot", [], "teacher   sglang"),
        pytest.param("grpo", ["vllm-grpo.yaml"], "reference vllm", marks=pytest.mark.long),
    ],
)
def test_a_dry_run_shows_the_estimate_with_its_assumptions(recipe, servers, frozen, tmp_path):
    over = with_servers(tmp_path, f"table1/qwen3-0.6b-{recipe}.yaml", *servers)
    shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["train", str(over), "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert f"{frozen} backend serving models/" in shown.output
    assert "million tokens of the run" in shown.output
    assert "device 3" in shown.output
    assert "None of it is measured" in shown.output

    def gib(pattern):
        return sum(map(float, re.findall(r"\d+\.\d", re.search(pattern, shown.output)[1])))

    rank = gib(r"while it trains +(\d+\.\d)")
    beside = gib(r"student on devices 0, 1, 2, GiB: .*asleep (\d+\.\d)")
    assert gib(r"device 0 +\d+\.\d +(\d+\.\d)") == pytest.approx(rank + beside, abs=0.15)  # rounded parts


@pytest.fixture
def real_sizes(monkeypatch):
    """The stand-ins count as models of the real sizes."""
    for module in (requirements, device_shares):
        monkeypatch.setattr(module, "read_size", lambda directory: size_of(SHAPES[directory.name]))


@pytest.mark.parametrize("size", ["0.6b", "1.7b", "4b"])
def test_lora_fits_one_gpu_by_the_estimate_where_all_weights_of_the_larger_would_not(size, tmp_path, real_sizes):
    def estimate(*overrides):
        recipe = f"table1/qwen3-{size}-spot.yaml"
        config = load_config(with_servers(tmp_path, recipe, "lora.yaml"), [*here(recipe), *overrides])
        return requirements.machine_memory(config, plan_training(config))

    assert [(each.device, each.size) for each in estimate().devices] == [(0, 80)]
    assert estimate().misfits() == []
    too_much = estimate("training.lora=null").misfits()
    assert (too_much != []) == (size != "0.6b")


def test_lora_lies_over_vllm_as_well(tmp_path, real_sizes):
    interpreters = [f"{role}.backend.launch.python=.venv-vllm/bin/python" for role in ("student", "teacher")]
    recipe = "table1/qwen3-1.7b-spot.yaml"
    config = load_config(with_servers(tmp_path, recipe, "vllm.yaml", "lora.yaml"), [*here(recipe), *interpreters])
    estimate = requirements.machine_memory(config, plan_training(config))
    assert [each.device for each in estimate.devices] == [0]
    assert estimate.misfits() == []


@pytest.mark.parametrize(
    ("recipe", "servers"),
    [
        ("table1/qwen3-4b-spot.yaml", []),
        ("table1/qwen3-4b-spot.yaml", ["vllm.yaml"]),
        ("table-llama/grpo.yaml", ["vllm-grpo.yaml"]),
        ("table-llama/spot.yaml", []),
    ],
)
def test_the_largest_students_fit_80_gb_as_they_are_sharded_and_what_is_missing_is_said(
    recipe, servers, tmp_path, real_sizes
):
    def warnings(*overrides):
        config = load_config(with_servers(tmp_path, recipe, *servers), [*here(recipe), *overrides])
        return requirements.machine_memory(config, plan_training(config)).misfits()

    assert warnings() == []
    (whole,) = warnings("training.sharding=none")
    assert whole.startswith("devices 0, 1, 2 would each need ")
    assert "set training.sharding=fsdp2" in whole
