"""The running-sum example: its generator, its tokenizer, its problem files and the checkpoints shipped with it."""

import hashlib
import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "running_sum"
MODELS = ("student", "teacher")
MIXES = ((0.34, 0.33, 0.33), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0))


def load_script(name: str) -> ModuleType:
    """A script of the example under the plain name its siblings import it by."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    names = ("task", "tokenizer", "make_data", "measure")
    shadowed = {name: sys.modules[name] for name in names if name in sys.modules}
    yield SimpleNamespace(**{name: load_script(name) for name in names})
    for name in names:
        del sys.modules[name]
    sys.modules.update(shadowed)


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / "data" / name).read_text().splitlines()]


def value_of(problem_text: str) -> int:
    """The answer worked out from the text alone, by a way of its own."""
    return sum(int(number) for number in re.split(r"[a-p]", problem_text)[1:])


def draw(example, mix, count=200, seed=0):
    rng = random.Random(seed)
    problems = example.task.draw_problems(rng)
    for _ in range(count):
        problem = next(problems)
        yield problem, example.task.write_solution(problem, mix, rng)


@pytest.mark.parametrize("mix", MIXES)
def test_solutions_are_right_line_by_line(example, mix):
    for problem, solution in draw(example, mix):
        lines = example.task.read_lines(solution)
        assert all(line.is_exact for line in lines)
        assert tuple(step for line in lines for step in line.steps) == problem.steps
        assert [line.before for line in lines] == [problem.start, *(line.after for line in lines[:-1])]
        assert solution.endswith(f"\\boxed{{{value_of(problem.text)}}}")
        assert example.task.read_answer(solution) == problem.answer == str(value_of(problem.text))


def test_problems_stay_within_their_tier_and_range(example):
    for problem, _ in draw(example, MIXES[0], count=500):
        fewest, most = example.task.TERMS_BY_TIER[problem.tier]
        assert fewest <= 1 + len(problem.steps) <= most
        sums = [problem.start + sum(problem.steps[:i]) for i in range(len(problem.steps) + 1)]
        assert min(sums) >= 0
        assert max(sums) <= example.task.LARGEST_SUM


def test_a_plan_outlives_its_line(example):
    kept = [
        first.strategy == second.strategy
        for problem, solution in draw(example, MIXES[0], count=300)
        if problem.tier == "hard"
        for first, second in [example.task.read_lines(solution)[:2]]
    ]
    assert sum(kept) / len(kept) == pytest.approx(0.85 + 0.15 / 3, abs=0.08)


@pytest.mark.parametrize("line", ["one b15-9=7", "two b15-9=6", "three b15-9-4+5=8"])
def test_a_wrong_line_is_not_exact(example, line):
    assert [read.is_exact for read in example.task.read_lines(line)] == [False]


def test_problem_files_are_what_the_generator_makes(tmp_path):
    script = EXAMPLE / "make_data.py"
    assert subprocess.run([sys.executable, script, "--check"], check=False).returncode == 0
    refused = subprocess.run([sys.executable, script, "--check", "--out", tmp_path], check=False, capture_output=True)
    assert refused.returncode == 1


def test_problem_files_are_disjoint_and_answered():
    train, heldout = rows_of("train.jsonl"), rows_of("heldout.jsonl")
    assert len(train) == 8000
    assert [row["tier"] for row in heldout] == ["easy"] * 60 + ["medium"] * 60 + ["hard"] * 60
    for key in ("id", "problem"):
        assert len({row[key] for row in train + heldout}) == 8180
    assert all(row["answer"] == str(value_of(row["problem"])) for row in train + heldout)


def test_each_training_problem_has_a_right_solution_and_no_style_is_preferred(example):
    rows = rows_of("train.jsonl")
    styles = {"one": 0, "two": 0, "three": 0}
    for row in rows:
        lines = example.task.read_lines(row["solution"])
        assert all(line.is_exact for line in lines)
        steps = [int(step) for step in re.findall(r"[+-]\d", row["problem"])]
        assert [step for line in lines for step in line.steps] == steps
        assert row["solution"].endswith(f"\\boxed{{{row['answer']}}}")
        styles[lines[0].strategy] += 1
    assert max(styles.values()) < 1.1 * min(styles.values())


@pytest.mark.parametrize("name", MODELS)
def test_shipped_tokenizer_is_the_built_one_and_round_trips(example, name):
    from transformers import AutoTokenizer

    shipped = AutoTokenizer.from_pretrained(EXAMPLE / name, local_files_only=True)
    built = example.tokenizer.build_tokenizer()
    assert shipped.get_vocab() == built.get_vocab() == example.tokenizer.vocabulary()
    assert len(shipped) == 48
    assert len({shipped.pad_token_id, shipped.eos_token_id, shipped.unk_token_id}) == 3
    for problem, solution in draw(example, MIXES[0]):
        for text in (problem.text, solution):
            ids = shipped(text)["input_ids"]
            assert ids == built(text)["input_ids"]
            assert shipped.unk_token_id not in ids
            assert shipped.decode(ids) == text
            assert shipped(shipped.decode(ids))["input_ids"] == ids


def test_chat_prompt_is_the_one_pretraining_saw(example):
    from transformers import AutoTokenizer

    shipped = AutoTokenizer.from_pretrained(EXAMPLE / "student", local_files_only=True)
    conversation = example.tokenizer.chat("a15b-9")
    prompt = shipped.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    tokens = ["<|user|>", "a", "1", "5", "b", "-", "9", "<|assistant|>"]
    assert shipped.convert_ids_to_tokens(prompt) == tokens
    assert shipped.apply_chat_template(conversation, tokenize=False) == "<|user|>a15b-9"
    answered = [*conversation, {"role": "assistant", "content": "one b15-9=6 so \\boxed{6}"}]
    ids = shipped.apply_chat_template(answered, return_dict=False)
    assert ids == prompt + shipped("one b15-9=6 so \\boxed{6}")["input_ids"] + [shipped.eos_token_id]


def test_text_outside_the_vocabulary_is_unknown_not_padding(example):
    built = example.tokenizer.build_tokenizer()
    assert built("?Z")["input_ids"] == [built.unk_token_id] * 2


@pytest.mark.parametrize("name", MODELS)
def test_manifest_belongs_to_the_weights_and_states_the_habit(name):
    manifest = json.loads((EXAMPLE / name / "manifest.json").read_text())
    weights = (EXAMPLE / name / "model.safetensors").read_bytes()
    assert manifest["sha256"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert "By design" in manifest["habit"]
    generation = json.loads((EXAMPLE / name / "generation_config.json").read_text())
    assert (generation["pad_token_id"], generation["eos_token_id"]) == (0, 1)


def test_shipped_models_solve_what_their_manifests_say(example):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    easy = [problem for problem in example.task.heldout_problems() if problem.tier == "easy"][:20]
    solved = {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(EXAMPLE / name, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / name, local_files_only=True)
        assert model.config.max_position_embeddings == 512
        measured = example.measure.measure(model, tokenizer, easy, example.measure.SamplingPlan(samples=2))
        solved[name] = measured.accuracy["easy"].mean
    assert solved["student"] > 0.2  # blind guessing among 0..39 would reach 0.025
    assert solved["teacher"] > max(0.6, solved["student"])
