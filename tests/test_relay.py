"""The relay, the task of experiments/mechanism: tables, texts, problem files and the checkpoints shipped with it."""

import hashlib
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spot_async.config.loading import load_config
from spot_async.types import Problem, Verdict
from spot_async.verification import BoxedMatch

ROOT = Path(__file__).parents[1]
RELAY = ROOT / "experiments" / "mechanism" / "relay"


def load_script(name):
    """Load a script of the task under the plain name its siblings import it by."""
    spec = importlib.util.spec_from_file_location(name, RELAY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example():
    names = ("task", "tokenizer", "make_data")
    shadowed = {name: sys.modules[name] for name in names if name in sys.modules}
    yield SimpleNamespace(**{name: load_script(name) for name in names})
    for name in names:
        del sys.modules[name]
    sys.modules.update(shadowed)


def test_every_method_leads_to_the_same_state_over_facts_of_its_own(example):
    relay = example.task.RELAY
    first, second, third = relay.facts
    for method in range(4):
        for operation in range(12):
            reached = third[method, operation][second[method, operation][first[method, operation]]]
            assert (reached == relay.result[operation]).all()
    assert len({first[method].tobytes() for method in range(4)}) == 4


def test_the_teachers_favourite_says_nothing_of_what_the_student_knows_best(example):
    relay = example.task.RELAY
    best = relay.known_share.argmax(axis=1)
    ranks = Counter(int((prior > prior[method]).sum()) for prior, method in zip(relay.prior, best, strict=True))
    assert ranks == dict.fromkeys(range(4), 3)
    known = [relay.is_known.transpose(2, 1, 0, 3)[relay.known_share == share].mean() for share in (0.85, 0.6, 0.4, 0.2)]
    assert known == pytest.approx([0.85, 0.6, 0.4, 0.2], abs=0.06)


async def test_written_solutions_are_right_for_the_plain_verifier_and_slips_are_wrong(example):
    relay, random = example.task.RELAY, np.random.default_rng(0)
    starts, operations = relay.problems(random, 50, 3)
    tokenizer = example.tokenizer.build_tokenizer()
    verifier = BoxedMatch(BoxedMatch.Settings())
    for slips in (0.0, 1.0):
        written = example.task.write_solutions(
            relay, starts, operations, relay.prior, random, is_known=np.ones_like(relay.is_known), slips=slips
        )
        ids, labels = example.tokenizer.encode(starts, operations, written)
        assert ((labels == example.tokenizer.IGNORED).sum(axis=1) == 6 + 9 * bool(slips)).all()
        right = 0
        for start, row, line in zip(starts, operations, ids, strict=True):
            text = tokenizer.decode(line)
            problem, _, response = text.removeprefix("<|user|>").partition("<|assistant|>")
            assert problem == example.task.problem_text(int(start), row)
            assert tokenizer(text)["input_ids"] == line.tolist()
            answer = example.task.states_text(relay.trace(int(start), row))
            asked = Problem(id="p", text=problem, answer=answer)
            right += (await verifier.verify(asked, response.removesuffix("<|end|>"), deadline=1e9)) is Verdict.CORRECT
            assert [step[0] for step in example.task.read_steps(problem, response)] == row.tolist()
        # Three random states are all right by chance once in a thousand times.
        assert right == 50 if not slips else right <= 1


def test_problem_files_are_what_the_generator_makes_and_nothing_held_out_is_trained(example):
    relay = example.task.RELAY
    for name, content in example.make_data.files().items():
        assert (RELAY / "data" / name).read_bytes() == content
    assert not relay.train.keys() & relay.heldout.keys()
    assert (len(relay.train), len(relay.heldout)) == (60 * 64, 1200)


def test_whoever_reads_the_answer_has_its_states_and_the_prompt_is_the_one_of_the_configuration(example):
    relay, random = example.task.RELAY, np.random.default_rng(0)
    starts, operations = relay.problems(random, 50, 3)
    known = np.zeros_like(relay.is_known)
    written = example.task.write_solutions(
        relay, starts, operations, relay.prior, random, is_known=known, reads_answers=True
    )
    right = [relay.trace(int(start), row) for start, row in zip(starts, operations, strict=True)]
    assert written.states[:, :, -1].tolist() == right
    ids, _ = example.tokenizer.encode(starts, operations, written, with_answers=True)
    prompt = load_config(RELAY / "self.yaml").prompt.teacher
    for start, row, states, line in zip(starts, operations, right, ids, strict=True):
        parts = {"problem": example.task.problem_text(int(start), row), "answer": example.task.states_text(states)}
        text = example.tokenizer.build_tokenizer().decode(line)
        assert text.startswith(f"<|user|>{prompt.filled(parts.__getitem__)}<|assistant|>")


@pytest.mark.parametrize("regime", ["choice", "knowledge", "self"])
def test_configurations_start_from_the_checkpoints_that_the_manifests_describe(regime):
    config = load_config(RELAY / f"{regime}.yaml")
    for role, model in (
        ("reader" if regime == "self" else "student", config.student),
        ({"choice": "peer", "knowledge": "teacher", "self": "reader"}[regime], config.teacher),
    ):
        directory = ROOT / model.model
        assert directory == RELAY / role
        manifest = json.loads((directory / "manifest.json").read_text())
        weights = (directory / "model.safetensors").read_bytes()
        assert manifest["sha256"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
