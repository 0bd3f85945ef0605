"""What is checked before anything starts, or as soon as a backend answers."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from padded_models import padded_model
from problem_files import write
from typer.testing import CliRunner

from spot_async.checks.capabilities import check_capabilities
from spot_async.checks.plan import evaluation_warnings, plan_evaluation, plan_training, plan_warnings
from spot_async.checks.served import check_places, check_roles
from spot_async.cli import app
from spot_async.config import PromptConfig
from spot_async.config.loading import load_config, validate_as
from spot_async.data.prompts import PromptRenderer, TeacherPromptRenderer
from spot_async.errors import ConfigError, DataError
from spot_async.models.files import read_model
from spot_async.models.vocabulary import Vocabulary, load_tokenizer
from spot_async.policies.opd import OpdPolicy
from spot_async.testing.services import capabilities
from spot_async.types import PolicyNeeds, Problem

ROOT = Path(__file__).parents[2]
STUDENT = ROOT / "examples" / "running_sum" / "student"


FEW: list[str] = []  # problems, in place of the example's, which would all be rendered


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch, few_problems, trusted_templates):
    monkeypatch.chdir(ROOT)
    FEW[:] = [f"data.train={few_problems}"]


def quickstart(overrides=()):
    return load_config(Path("configs/quickstart.yaml"), [*FEW, *overrides])


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """The example's models with 64 rows of softmax in place of 48."""
    root = tmp_path_factory.mktemp("padded")
    return {role: padded_model(STUDENT.parent / role, root / role, rows=16) for role in ("student", "teacher")}


@pytest.fixture
def config():
    return quickstart()


SERVED = capabilities(48, max_context_tokens=512)
NEEDS = PolicyNeeds(teacher_top_k=16, teacher_top_k_key="score_top_k", exact_entropy=True, candidate_logprobs=True)


@pytest.mark.parametrize(
    ("role", "change", "expected"),
    [
        ("teacher", {"vocab_fingerprint": "g"}, "vocabularies"),
        (
            "teacher",
            {"max_top_k": 8},
            r"teacher.backend \(local\) serves top-8, policy spot needs top-16: lower policy.score_top_k to 8 or raise",
        ),
        ("teacher", {"exact_entropy": False}, "teacher.backend does not serve exact entropies"),
        (
            "student",
            {"candidate_logprobs": "none"},
            r"student.backend \(local\) serves no log-probabilities of chosen tokens, which policy spot needs",
        ),
        ("student", {"weight_update": False}, "student.backend takes no new weights$"),
        (
            "student",
            {"weight_update": False, "weights_need": "VLLM_SERVER_DEV_MODE=1 in its environment"},
            "student.backend takes no new weights: it needs VLLM_SERVER_DEV_MODE=1 in its environment$",
        ),
        ("student", {"logprob_convention": "truncated"}, "untruncated"),
        ("teacher", {"logprob_convention": "truncated"}, "untruncated"),
        ("student", {"max_context_tokens": 200}, "student.backend serves a context of 200 tokens"),
        ("teacher", {"max_context_tokens": 200}, "teacher.backend serves a context of 200 tokens"),
        ("teacher", {"max_top_k": 0}, "scores no given tokens, .*: give another teacher.backend, or use policy kd"),
        ("student", {"sampled_token_ids": False}, "student.backend does not say which token ids it sampled"),
        ("reference", {"token_id_prompts": False}, "reference.backend must score token ids at every position"),
        ("reference", {"every_position": False}, "reference.backend must score token ids at every position"),
        ("reference", {"max_top_k": 0}, "reference.backend must score token ids at every position"),
    ],
)
def test_a_backend_that_lacks_what_the_policy_needs_is_refused_with_the_key(config, role, change, expected):
    served = {"student": SERVED, "teacher": SERVED} | {role: msgspec.structs.replace(SERVED, **change)}
    check_capabilities(config, NEEDS, {"student": SERVED, "teacher": SERVED})
    with pytest.raises(ConfigError, match=expected):
        check_capabilities(config, NEEDS, served)


def test_end_tokens_are_summed_only_by_a_teacher_that_scores_chosen_tokens(config, other_ends):
    served = {"student": SERVED, "teacher": msgspec.structs.replace(SERVED, candidate_logprobs="none")}
    with pytest.raises(ConfigError, match=r"^stages\.score\.end_token=sum: .*: set it to replace"):
        check_capabilities(config, NEEDS, served, sums_ends=["teacher"])
    check_capabilities(config, PolicyNeeds(teacher_responses=True), served, sums_ends=["teacher"])  # scores nothing
    summing = ["stages.score.end_token=sum", 'teacher.backend={kind: openai, url: "http://127.0.0.1:1/v1"}']
    with pytest.raises(ConfigError, match=r"^stages\.score\.end_token=sum: .*: set it to replace"):
        plan_training(quickstart([*summing, f"teacher.model={other_ends}"]))
    plan_training(quickstart(summing))  # both end alike: there is nothing to sum


def test_a_teacher_that_plays_ends_turns_as_the_student_does_and_says_what_it_sampled(other_ends, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    keys = ["environment.object=text_worlds:Again", f"teacher.model={other_ends}"]
    plan_training(quickstart(keys))  # it scores responses as a whole, and ends them otherwise
    with pytest.raises(ConfigError, match=r"end a turn with different tokens \(the student with '<\|end\|>'\)"):
        plan_training(quickstart([*keys, "policy={kind: kd}"]))
    config, writes = quickstart(keys), PolicyNeeds(teacher_responses=1)
    served = {"student": SERVED, "teacher": msgspec.structs.replace(SERVED, sampled_token_ids=False)}
    check_capabilities(config, PolicyNeeds(teacher_top_k=1), served)
    with pytest.raises(ConfigError, match=r"^environment: teacher\.backend does not say which token ids it sampled"):
        check_capabilities(config, writes, served)


@pytest.fixture
def other_ends(tmp_path):
    """The teacher, which ends its responses with another token than the student, and with further ones."""
    teacher = tmp_path / "teacher"
    shutil.copytree(ROOT / "examples" / "running_sum" / "teacher", teacher)
    generation = json.loads((teacher / "generation_config.json").read_text())
    (teacher / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [7, 1]}))
    tokenizer = (teacher / "tokenizer_config.json").read_text()
    (teacher / "tokenizer_config.json").write_text(
        tokenizer.replace('"eos_token": "<|end|>"', '"eos_token": "<|unk|>"')
    )
    return teacher


@pytest.mark.parametrize(
    ("role", "change"), [("teacher", {"score_temperature": "one"}), ("student", {"generation_temperature": "one"})]
)
def test_a_server_whose_log_probabilities_are_at_temperature_one_needs_rollouts_at_one(config, role, change):
    served = {"student": SERVED, "teacher": SERVED} | {role: msgspec.structs.replace(SERVED, server="v 1", **change)}
    check_capabilities(config, NEEDS, served)
    config = quickstart(["sampling.temperature=0.7"])
    with pytest.raises(ConfigError, match=rf"sampling\.temperature=0\.7: {role}\.backend \(v 1\) .* set it to 1"):
        check_capabilities(config, NEEDS, served)
    no_scores = msgspec.structs.replace(NEEDS, teacher_top_k=0)
    if role == "teacher":
        check_capabilities(config, no_scores, served)


def test_a_policy_is_told_what_the_run_trains_with_and_its_prompts_where_they_are(tmp_path, monkeypatch):
    (tmp_path / "curious.py").write_text(
        "from spot_async.policies.opd import OpdPolicy\n"
        "class Curious(OpdPolicy):\n"
        "    def __init__(self, settings, context):\n"
        "        super().__init__(settings, context)\n"
        "        self.context = context\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = plan_training(
        quickstart(["policy={kind: 'curious:Curious'}", "max_staleness=2", "training.mini_batch_size=4"])
    )
    context = plan.policy.context
    assert (context.training.mini_batch_size, context.max_staleness) == (4, 2)
    later = next(islice(plan.schedule, context.training.batch_size, None))
    assert (later.iteration, later.progress) == (1, 1 / plan.schedule.iterations)


def test_a_rule_that_needs_what_the_students_server_cannot_give_is_refused_with_both_names():
    nothing = msgspec.structs.replace(SERVED, candidate_logprobs="none", max_generation_top_k=0, server="v 1")
    of_samples = msgspec.structs.replace(nothing, max_generation_top_k=20)
    for rule, student in (("score", nothing), ("math:sqrt", nothing), ("math:sqrt", of_samples)):
        config = quickstart([f"policy.selection={rule}"])
        said = rf"^student\.backend \(v 1\) serves no .*, which policy\.selection={rule} needs"
        with pytest.raises(ConfigError, match=said):
            check_capabilities(config, plan_training(config).policy.needs, {"student": student, "teacher": SERVED})
    truncated = msgspec.structs.replace(nothing, exact_entropy=False, max_top_k=20)  # bounds will do
    others = ["selection=entropy", "selection=random", "selection=earliest", "score_variant=HC"]
    for key, student in {**dict.fromkeys(others, nothing), "selection=score": of_samples}.items():
        config = quickstart([f"policy.{key}"])
        check_capabilities(config, plan_training(config).policy.needs, {"student": student, "teacher": truncated})


def test_a_policy_that_chooses_tokens_needs_a_teacher_that_answers_for_them(config):
    needs = PolicyNeeds(teacher_candidates=True)
    assert needs.teacher
    check_capabilities(config, needs, {"student": SERVED, "teacher": SERVED})
    none = msgspec.structs.replace(SERVED, candidate_logprobs="none", server="v 1")
    with pytest.raises(ConfigError, match=r"^teacher\.backend \(v 1\) serves no log-probabilities of chosen tokens, "):
        check_capabilities(config, needs, {"student": SERVED, "teacher": none})
    check_roles(config, needs)
    with pytest.raises(ConfigError, match=r"teacher\.backend\.kind=openai: .* that can `candidate_logprobs`; choose"):
        check_roles(quickstart(["teacher.backend={kind: openai, url: 'http://localhost:1'}"]), needs)


def test_a_context_too_small_for_the_evaluation_is_refused_before_it_runs(config):
    small = msgspec.structs.replace(SERVED, max_context_tokens=230)
    config = quickstart(["evaluation.max_response_tokens=400"])
    with pytest.raises(ConfigError, match=r"evaluation\.max_response_tokens=400"):
        check_capabilities(config, NEEDS, {"student": small, "teacher": SERVED})


ATTACHED = "{kind: vllm, url: 'http://localhost:8123/'}"
STARTED = f"{{kind: sglang, launch: {{python: {sys.executable}, port: 8123}}}}"


@pytest.mark.parametrize(
    ("backend", "setting"),
    [
        ("{port: 8123}", r"port=8123"),
        (ATTACHED, r"url=http://localhost:8123/"),
        (STARTED, r"launch\.port=8123"),
    ],
)
def test_a_reference_cannot_share_the_students_place(backend, setting):
    config = load_config(Path("configs/running_sum/grpo.yaml"), [f"student.backend={backend}"])
    with pytest.raises(ConfigError, match=rf"reference: required when student\.backend\.{setting} is fixed"):
        plan_training(config)


@pytest.mark.parametrize("student", ["{port: 8123}", ATTACHED, STARTED])
@pytest.mark.parametrize("teacher", ["{port: 8123}", ATTACHED, STARTED])
def test_nobody_shares_a_server_with_a_student_that_is_trained(student, teacher):
    overrides = [f"student.backend={student}", f"teacher.backend={teacher}"]
    config = quickstart(overrides)
    with pytest.raises(
        ConfigError, match=r"teacher\.backend\..*8123.*: the student is served there, whose weights chang"
    ):
        plan_training(config)


def test_teacher_and_reference_may_be_one_server_that_runs_but_not_two_on_one_port():

    def check(backend):
        overrides = [f"{role}.backend={backend}" for role in ("teacher", "reference")]
        model = "reference.model=examples/running_sum/teacher"
        config = quickstart([model, *overrides])
        check_places(config, PolicyNeeds(teacher_top_k=1, reference=True))

    check(ATTACHED)
    with pytest.raises(ConfigError, match=r"reference\.backend\.launch\.port=8123: the teacher is served there"):
        check(STARTED)


def test_what_a_backend_needs_of_this_machine_is_looked_for_before_anything_starts(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)

    def refused(*overrides):
        config = quickstart(overrides)
        with pytest.raises(ConfigError) as raised:
            plan_training(config)
        return str(raised.value)

    launch = "student.backend={kind: vllm, launch: {python: /no/such/python}}"
    said = "student.backend.launch.python: no interpreter '/no/such/python'"
    assert said in refused(launch)
    plan_training(quickstart([launch]), starts=False)
    for words, code in (([], 2), (["--dry-run"], 0)):  # what starts nothing says it, and goes on
        done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["eval", "configs/quickstart.yaml", launch, *words])
        assert (done.exit_code, said in done.output) == (code, True)
    key = "teacher.backend={kind: vllm, url: 'http://h:1', api_key_env: NO_SUCH_KEY}"
    assert refused(key) == "teacher.backend: the environment variable NO_SUCH_KEY is not set"


def test_a_model_that_is_not_there_is_refused_with_where_it_was_looked_for_and_how_the_hubs_are_fetched(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()

    def refused(name):
        with pytest.raises(ConfigError) as raised:
            read_model("student", name)
        return str(raised.value)

    here = (
        f"student.model: no directory 'Qwen/Qwen3-0.6B' ({tmp_path}/Qwen/Qwen3-0.6B); give the path of a Hugging Face"
    )
    assert refused("Qwen/Qwen3-0.6B").startswith(here)
    assert refused("Qwen/Qwen3-0.6B").endswith("hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B")
    for path in ("models/studnt", "no/such/model", str(tmp_path / "none"), "../x"):
        assert "hf download" not in refused(path)
    (tmp_path / "models").rmdir()
    assert refused("models/Qwen3-0.6B").endswith("hf download OWNER/Qwen3-0.6B --local-dir models/Qwen3-0.6B")


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_server_that_is_not_installed_is_found_before_anything_starts(role):
    launch = f"{{python: {sys.executable}}}"
    for given, key in ((launch, "launch"), (f"[{launch}]", "launch.0")):
        config = quickstart([f"{role}.backend={{kind: sglang, launch: {given}}}", "evaluation=null"])
        with pytest.raises(ConfigError) as raised:
            plan_training(config)
        assert str(raised.value) == (
            f"{role}.backend.{key}.python: no sglang in {sys.executable}: install it there, or name another interpreter"
        )


@pytest.mark.parametrize(
    ("build", "is_refused"),
    [("cuda: Optional[str] = None\nhip: Optional[str] = None", True), ("cuda: Optional[str] = '12.8'", False),
     ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'", False)],
)  # fmt: skip
def test_a_gpu_is_not_promised_to_a_torch_that_was_built_without(monkeypatch, tmp_path, build, is_refused):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{build}\n")
    config = quickstart(["student.backend.device=cuda:0"])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if is_refused:
        with pytest.raises(ConfigError, match=r"student.backend.device=cuda:0: the torch installed .* without CUDA"):
            config.student.backend.check_machine("student.backend")
    else:
        config.student.backend.check_machine("student.backend")


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_servers_sleep_while_the_trainer_trains_in_a_strict_run_only(role):
    config = quickstart([f"{role}.backend={{kind: vllm, url: 'http://h:1', sleep_while_training: true}}"])
    plan_training(config)
    with pytest.raises(
        ConfigError,
        match=rf"^{role}\.backend\.sleep_while_training: with max_staleness=1 it is asked while the trainer",
    ):
        plan_training(config.model_copy(update={"max_staleness": 1}))


def test_what_sleeps_while_others_answer_has_others_and_is_started_by_the_run():
    model = "examples/running_sum/teacher"

    def teachers(*launches):
        backend = "{{kind: vllm, sleep_while_others_answer: true, {}}}"
        own = [f"t{i}: {{model: {model}, backend: {backend.format(each)}}}" for i, each in enumerate(launches)]
        return quickstart(["teacher=null", f"teachers={{{', '.join(own)}}}", "policy=opd"])

    launch = "launch: {{python: {}, devices: '1', memory_fraction: {}}}".format
    of_card = launch(sys.executable, 0.8)
    check_places(teachers(of_card, of_card), NEEDS)
    for launches in ([of_card], [of_card, "url: 'http://h:1'"]):
        with pytest.raises(
            ConfigError, match=r"^teachers\.t\d\.backend\.sleep_while_others_answer: is for two or more servers"
        ):
            check_places(teachers(*launches), NEEDS)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("config.json", "[]", "config.json: cannot be read as a JSON object"),
        ("config.json", "{", "config.json: cannot be read as a JSON object"),
        ("config.json", '{"a": "\udcff"}', "config.json: cannot be read as a JSON object"),  # no UTF-8
        ("config.json", "{}", "names no vocab_size, and transformers has no default"),
        ("generation_config.json", "{", "generation_config.json: cannot be read as a JSON object"),
        ("tokenizer.json", "{", "has no tokenizer that can be loaded"),
    ],
)
def test_a_broken_model_directory_is_one_line(tmp_path, name, text, expected):
    broken = tmp_path / "model"
    shutil.copytree(STUDENT, broken)
    (broken / name).write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=expected) as raised:
        read_model("student", str(broken))
    assert "\n" not in str(raised.value)


def test_a_tokenizer_is_read_once_while_its_files_stay_as_they_are(tmp_path):
    """A large one takes a second, and servers that are made again in mid-run ask for it on the event loop."""
    model = tmp_path / "model"
    shutil.copytree(STUDENT, model)
    first = read_model("student", str(model))
    assert read_model("teacher", str(model)).vocabulary is first.vocabulary
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4, 5]}')
    assert {3, 4, 5} <= {*read_model("student", str(model)).vocabulary.end_token_ids}


def test_responses_end_where_either_model_ends_them(other_ends):
    """Also in evaluation, and in the student that is published."""
    config = quickstart([f"teacher.model={other_ends}"])
    plan = plan_training(config)
    own = plan.student.vocabulary.end_token_ids
    assert plan.stop_token_ids[: len(own)] == own
    assert set(plan.stop_token_ids) == {*own, *plan.teachers["teacher"].vocabulary.end_token_ids} != set(own)


def test_responses_end_where_a_models_config_json_says_unless_there_is_no_such_token(tmp_path):
    for role, ends in {"student": 5, "teacher": [6, 1]}.items():
        shutil.copytree(STUDENT.parent / role, tmp_path / role)
        (tmp_path / role / "generation_config.json").unlink()
        change_config(tmp_path / role, eos_token_id=ends)
    config = quickstart([f"{role}.model={tmp_path / role}" for role in ("student", "teacher")])
    assert plan_training(config).stop_token_ids == (1, 5, 6)
    change_config(tmp_path / "student", eos_token_id=50256)
    said = r"^student\.model: its end token \(50256\) is none of the 48 tokens that all models have"
    with pytest.raises(ConfigError, match=said):
        plan_training(config)
    with pytest.raises(ConfigError, match=said):
        plan_evaluation(config, read_model("student", config.student.model))


def change_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def test_a_template_of_ones_own_is_for_training_while_evaluation_keeps_the_students(tmp_path):
    problems = write(tmp_path, [{"problem": f"a1+{i}b", "answer": i + 1} for i in range(9)])
    template = tmp_path / "mine.jinja"
    template.write_text("{% for message in messages %}<|assistant|>{{ message.content }}{% endfor %}")
    changes = [f"data.train={problems}", f"evaluation.problems={problems}", f"prompt.template={template}"]
    plan = plan_training(quickstart([*changes, "training.batch_size=8", "training.mini_batch_size=8"]))
    decode = plan.student.vocabulary.tokenizer.decode
    prompt = next(iter(plan.schedule))
    assert decode(prompt.token_ids.tolist()) == f"<|assistant|>{prompt.problem.text}"
    assert decode(plan.evaluation[0].sources[0].token_ids.tolist()) == "<|user|>a1+0b<|assistant|>"
    assert (len(plan.problems), plan.filtered, plan.rows) == (9, 0, {"read": 9, "problems": 9})


def test_a_port_that_is_taken_is_refused_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = f"teacher.backend.port={listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^{port}: in use by another process: choose another$"):
            plan_training(quickstart([port]))
    plan_training(quickstart([port]))


def test_an_evaluation_without_a_chat_template_of_the_students_says_that_no_other_will_do(tmp_path):
    student, template = tmp_path / "student", tmp_path / "mine.jinja"
    shutil.copytree(STUDENT, student, ignore=shutil.ignore_patterns("chat_template.jinja"))
    template.write_text("{{ messages[0].content }}")
    changes = [f"student.model={student}", f"prompt.template={template}"]
    refused = r"^evaluation: .*student: the tokenizer has no chat template.*: add chat_template\.jinja"
    with pytest.raises(DataError, match=refused):
        plan_training(quickstart(changes))
    assert plan_training(quickstart([*changes, "evaluation=null"])).filtered == 0


def test_a_prompt_of_the_teachers_own_counts_where_the_teacher_reads_and_nowhere_else(tmp_path):
    rows = [
        {"problem": f"a1+{i}b", "answer": i + 1, "solution": f"one {i}" * (1 + i), "type": "t", "level": "Level 1"}
        for i in range(9)
    ]
    train = f"data.train={write(tmp_path, rows)}"
    changes = [train, "evaluation=null", "training.batch_size=4", "training.mini_batch_size=4"]
    plain = plan_training(quickstart(changes))
    own = [*changes, "prompt.teacher.text='{problem}so {solution}'"]
    with pytest.raises(
        ConfigError, match=r"^prompt\.teacher\.max_tokens=2048 \+ sampling\.max_response_tokens=160 exc"
    ):
        plan_training(quickstart(own))
    plan = plan_training(quickstart([*own, "prompt.teacher.max_tokens=22"]))
    assert (len(plan.problems), plain.filtered, plan.filtered) == (9, 0, 2)
    for prompt in islice(plan.schedule, 12):
        text = plan.teachers["teacher"].vocabulary.tokenizer.decode(prompt.teacher_ids.tolist()).replace(" ", "")
        solution = prompt.problem.solution.replace(" ", "")
        assert text == f"<|user|>{prompt.problem.text}so{solution}<|assistant|>"
        assert len(prompt.teacher_ids) <= 22
    assert {p.token_ids.tobytes() for p in islice(plan.schedule, 12)} < {
        p.token_ids.tobytes() for p in islice(plain.schedule, 18)
    }
    with pytest.raises(ConfigError, match=r"^prompt\.teacher: the run has no teacher section"):
        plan_training(quickstart([*own, "teacher=null", "policy={kind: grpo}", "prompt.template=student"]))


TOLD = "Put the answer in a box."


SHOWN = "prompt.teacher.text='{problem} {solution}'"
SEVERAL = """teachers={a: {model: examples/running_sum/teacher, prompt: {text: '{problem} {answer}', max_tokens: 300}},
    b: {model: examples/running_sum/teacher, prompt: {text: '{problem} {instruction}', max_tokens: 300}}}"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([SHOWN], ["prompt.teacher.text"]),
        (["prompt.teacher.text='{problem} {solution} {instruction}'"], []),
        ([f"prompt.teacher.text='{{problem}} {{solution}} {TOLD}'"], []),  # it says so itself
        ([SHOWN, "prompt.instruction=''"], []),  # the student is told nothing
        ([SHOWN, "prompt.instruction=''", f"data.train.instruction={TOLD}"], ["prompt.teacher.text"]),
        (["teacher=null", SEVERAL, "policy={kind: opd}"], ["teachers.a.prompt.text"]),
    ],
)
def test_a_teacher_that_is_not_told_what_the_student_is_told_is_named(tmp_path, given, said):
    rows = [{"problem": f"a1+{i}b", "answer": 3, "solution": "b3"} for i in range(1, 9)]
    small = ["evaluation=null", "sampling={max_prompt_tokens: 200, max_response_tokens: 40}"]
    small += [f"training.{name}=4" for name in ("batch_size", "mini_batch_size")]
    longest = [] if SEVERAL in given else ["prompt.teacher.max_tokens=300"]
    own = [f"data.train={{path: {write(tmp_path, rows)}}}", f"prompt.instruction={TOLD}"]
    config = quickstart([*small, *own, *longest, *given])
    lines = [line for line in plan_warnings(config, plan_training(config)) if "not told" in line]
    assert [line.partition(f": the teacher is not told {TOLD!r}")[0] for line in lines] == said


def test_a_policys_contexts_must_fit_the_teachers_context(config):
    needs = msgspec.structs.replace(NEEDS, teacher_prompt_tokens=400)
    served = {"student": SERVED, "teacher": SERVED}
    with pytest.raises(
        ConfigError,
        match=r"^teacher\.backend serves a context of 512 tokens, fewer than PolicyNeeds\.teacher_prompt_tokens=400 \+",
    ):
        check_capabilities(config, needs, served)
    wide = msgspec.structs.replace(SERVED, max_context_tokens=560)
    check_capabilities(config, needs, {"student": SERVED, "teacher": wide})  # the student never reads them


@pytest.mark.parametrize(("gamma", "baseline", "lines"), [(0, 0.5, 1), (0, 0, 0), (4, 0.5, 0)])
def test_a_baseline_without_a_tilt_is_said_to_be_a_weaker_prior(gamma, baseline, lines):
    config = quickstart(["evaluation=null", f"policy.gamma={gamma}", f"policy.baseline={baseline}"])
    found = [line for line in plan_warnings(config, plan_training(config)) if "baseline" in line]
    assert [line[:40] for line in found] == ["policy.baseline=0.5 beside gamma=0: with"] * lines


ITSELF = "teacher.model=examples/running_sum/student"
CONTEXT = "prompt.teacher={text: '{problem}so {solution}', max_tokens: 200}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], []),
        ([ITSELF], ["teaches nothing", "skip_answer"]),
        ([ITSELF, CONTEXT], ["skip_answer"]),
        ([ITSELF, CONTEXT, "policy.skip_answer=true"], []),
        ([ITSELF, CONTEXT, "policy.selection=entropy"], []),
        ([ITSELF, CONTEXT, "policy={kind: opd}"], []),
        ([ITSELF, "policy={kind: eopd}"], ["teaches nothing"]),
        ([ITSELF, "policy={kind: spot, positions: 0}"], ["teaches nothing"]),
        ([ITSELF, "policy={kind: kd, forward_kl_weight: 0}"], []),  # it only writes
    ],
)
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_teacher_that_is_the_student_is_told_what_it_cannot_teach(given, said, is_copy, tmp_path):
    copy = tmp_path / "copy"
    if is_copy:
        shutil.copytree(STUDENT, copy)
    config = quickstart([f"teacher.model={copy}" if each == ITSELF and is_copy else each for each in given])
    lines = [line for line in plan_warnings(config, plan_training(config)) if "own weights" in line]
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line
        assert ("policy.kind=opd" in line) == (words == "skip_answer")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["policy={kind: opd}"], None),
        (["policy={kind: eopd, top_k: 48}"], None),
        (["policy={kind: eopd, top_k: 49}"], "policy.top_k=49"),
        (["policy={kind: kd, top_k: 49}"], "policy.top_k=49"),
        (["policy.score_top_k=49"], "policy.score_top_k=49"),
        (["policy={kind: distill, divergence: jsd, top_k: 49, support: student}"], "policy.top_k=49"),
        (["policy={kind: distill, divergence: jsd, support: whole}"], None),
        (["policy={kind: rethinking_opd:RethinkingOpd, top_k: 49}"], "policy.top_k=49"),
        (["policy={kind: sdpo:Sdpo, top_k: 49}"], "policy.kind=sdpo:Sdpo: its top-k=49"),
    ],
)
@pytest.mark.parametrize("wide", ["student", "teacher", None])
def test_a_top_k_that_is_wider_than_the_common_vocabulary_is_refused_by_its_key(given, said, wide, padded, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "recipes"))
    overrides = [*given, *([f"{wide}.model={padded[wide]}"] if wide else [])]
    if said is None:
        plan_training(quickstart(overrides))
        return
    with pytest.raises(ConfigError) as refused:
        plan_training(quickstart(overrides))
    assert str(refused.value) == f"{said}: lower it to 48, which is how many tokens the models have in common"


WHOLE = "policy={kind: distill, divergence: jsd, support: whole, tail: conditional, temperature: 2.0}"


@pytest.mark.parametrize(
    ("models", "policy", "is_refused"),
    [
        ({"student": "student"}, WHOLE, True),
        ({"student": "student"}, "policy={kind: distill, preset: gkd@trl, temperature: 1.111}", True),
        ({"student": "student", "teacher": "student"}, WHOLE, False),  # its own teacher: equally wide
        ({"student": "student", "teacher": "teacher"}, WHOLE, False),
        ({"teacher": "teacher"}, WHOLE, False),
        ({"student": "student"}, WHOLE.replace("2.0", "1.0"), False),
        ({"student": "student", "teacher": "teacher", "reference": "narrow"}, WHOLE, True),
        ({"student": "student"}, "policy={kind: distill, temperature: 2.0, support: whole, tail: conditional}", False),
    ],
)
def test_a_temperature_of_the_loss_needs_all_rows_of_the_student(models, policy, is_refused, padded):
    directories = {**padded, "narrow": STUDENT}
    given = [f"{role}.model={directories[name]}" for role, name in models.items()]
    if not is_refused:
        plan_training(quickstart([*given, policy]))
        return
    with pytest.raises(
        ConfigError,
        match=r"^policy\.temperature=[\d.]+: needs all rows of the student's softmax, and 16 of its 64 are left out, "
        r"which another model lacks: set it to 1; sampling\.temperature may differ$",
    ):
        plan_training(quickstart([*given, policy]))


def test_the_narrowest_of_several_teachers_decides_what_the_loss_can_compare(padded):
    teachers = "teachers={{a: {{model: {}}}, b: {{model: {}}}}}".format
    narrow = ROOT / "examples" / "running_sum" / "teacher"
    wide = [f"student.model={padded['student']}", "teacher=null", WHOLE]
    plan_training(quickstart([*wide, teachers(padded["teacher"], padded["teacher"])]))
    with pytest.raises(
        ConfigError, match=r"^policy\.temperature=2\.0: needs all rows of the student's softmax, and 16 of its 64"
    ):
        plan_training(quickstart([*wide, teachers(padded["teacher"], narrow)]))


def test_a_teacher_of_the_same_shape_with_other_weights_is_another(tmp_path):
    shutil.copytree(STUDENT, other := tmp_path / "other")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    config = quickstart([f"teacher.model={other}"])
    assert not any("own weights" in line for line in plan_warnings(config, plan_training(config)))


@pytest.fixture
def wider(tmp_path):
    """The example's models, whose tokenizers know two tokens that no embedding has a row for, and whose own template.

    One of the tokens is special.
    """
    for role in ("student", "teacher"):
        shutil.copytree(STUDENT.parent / role, tmp_path / role)
        tokenizer = load_tokenizer(tmp_path / role)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
        tokenizer.add_tokens(["<plain>", "</think>"])
        tokenizer.save_pretrained(tmp_path / role)
    (tmp_path / "mine.jinja").write_text("<|user|>{{ messages[-1].content }}<new><|assistant|>")
    rows = {"spelled": {"problem": "1+1<new>"}, "plain": {"problem": "1+1<plain>"}, "response": {"response": "2<new>"}}
    for name, parts in rows.items():
        write(tmp_path, [{"id": "p", "problem": "1+1", "answer": 2, **parts}], f"{name}.jsonl")
    return tmp_path


ONE = ["training.batch_size=1", "training.mini_batch_size=1"]
KD = "policy={kind: distill, divergence: forward_kl, student_share: 0, written_by: data}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], None),  # that a tokenizer knows more harms nobody
        ([*ONE, "data.train={wider}/spelled.jsonl"], None),  # a problem writes letters
        ([*ONE, "data.train={wider}/plain.jsonl"], r"data\.train: what the models read .* '<plain>' \(49\)"),
        (["prompt.template={wider}/mine.jinja"], r"prompt\.template: what the models read .* '<new>' \(48\), and only"),
        (
            ["prompt.teacher={template: {wider}/mine.jinja, max_tokens: 99}"],
            r"prompt\.teacher\.template: what the teac",
        ),
        (["evaluation.template={wider}/mine.jinja"], r"evaluation\.template: what the student read"),
        (
            ["evaluation.thinking=true", "evaluation.thinking_tokens=9"],
            r"evaluation\.thinking_tokens: what the student",
        ),
        (["evaluation.problems={wider}/plain.jsonl"], r"evaluation\.problems: what the student read of problem 'p'"),
        (
            [*ONE, KD, "data.train={path: {wider}/response.jsonl, fields: {response: response}}"],
            r"data\.train: what the models read of problem 'p' .*'<new>'",
        ),
    ],
)
def test_a_token_that_a_tokenizer_knows_and_an_embedding_does_not_is_refused_where_it_is_read(wider, given, said):
    models = [f"{role}.model={wider / role}" for role in ("student", "teacher")]
    config = quickstart([*models, *(each.replace("{wider}", str(wider)) for each in given)])
    if said is None:
        assert plan_training(config).filtered == 0
        return
    with pytest.raises(ConfigError, match=f"^{said}"):
        plan_training(config)
    if "evaluation" in said:
        with pytest.raises(ConfigError, match=f"^{said}"):
            plan_evaluation(config, read_model("student", config.student.model))


# How models' templates end a prompt that may think, in short, and what each writes in front.
THINKING = {
    "qwen3": "{% if enable_thinking is false %}<think></think>{% endif %}",
    "qwen3_thinking": "<think>",  # always
    "deepseek": "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{{ '<think>' if thinking else '</think>' }}",
    "kimi": "{{ '<think></think>' if thinking is false else '<think>' }}",
    "gpt_oss": "{{ reasoning_effort | default('medium') }}",
    "mistral": "{% if reasoning_effort not in ['none', 'high', undefined] %}{{ raise_exception('!') }}{% endif %}"
    "[THINK]",
    "seed": "{% if thinking_budget == 0 %}0{% endif %}",
    "none": "",
}


@pytest.mark.parametrize(
    ("template", "settings", "instead"),
    [
        ("qwen3", {}, None),
        ("qwen3", {"thinking": True}, None),
        ("qwen3_thinking", {}, "give another template, or set"),
        ("qwen3_thinking", {"thinking": True}, None),
        ("qwen3_thinking", {"thinking": None}, None),
        ("deepseek", {}, None),
        ("deepseek", {"thinking": True}, "set prompt.template_arguments.thinking=true, and"),
        ("deepseek", {"thinking": None, "template_arguments": {"thinking": True}}, None),
        ("kimi", {}, "set prompt.template_arguments.thinking=false, and"),
        ("kimi", {"thinking": True}, None),
        ("gpt_oss", {}, 'set prompt.template_arguments.reasoning_effort="low", and'),
        ("gpt_oss", {"thinking": True}, 'set prompt.template_arguments.reasoning_effort="high", and'),
        ("gpt_oss", {"template_arguments": {"reasoning_effort": "low"}}, None),
        ("mistral", {}, "give another template, or set"),
        ("seed", {}, "set prompt.template_arguments.thinking_budget=0, and"),
        ("none", {}, None),
        ("none", {"thinking": True}, "give another template, or set"),
    ],
)
def test_a_template_that_does_not_think_as_it_is_told_is_named_before_the_start(tmp_path, template, settings, instead):
    (path := tmp_path / "mine.jinja").write_text("<|user|>{{ messages[-1].content }}<|assistant|>" + THINKING[template])
    vocabulary = Vocabulary.load(STUDENT)
    told = {"template": str(path), **settings}
    renderer = PromptRenderer(vocabulary, validate_as(PromptConfig, told))
    own = validate_as(PromptConfig, {"teacher": {"text": "{problem} {solution}", **told}})
    problem = Problem(id="p", text="1+1", answer="2")
    said = [] if instead is None else [f"{instead} prompt.thinking=null"]
    assert [line.rpartition(": ")[2] for line in renderer.thinking_doubts(problem)] == said
    of_teacher = TeacherPromptRenderer(vocabulary, own, "a").thinking_doubts(problem)  # it has no solution
    assert [line.rpartition(": ")[2].replace("teachers.a.prompt", "prompt") for line in of_teacher] == said


def test_what_thinks_otherwise_than_it_is_told_is_said_of_training_teachers_and_evaluations(tmp_path):
    (path := tmp_path / "mine.jinja").write_text("<|user|>{{ messages[-1].content }}<|assistant|><unk>[THINK]")
    template = f"template: {path}"
    keys = [f"prompt.template={path}", f"prompt.teacher={{{template}, max_tokens: 99}}", f"evaluation.template={path}"]
    config = quickstart(keys)
    lines = [line for line in plan_warnings(config, plan_training(config)) if "does not heed it" in line]
    where = ["prompt.thinking=false", "prompt.teacher.thinking=false", "evaluation.thinking=false"]
    assert [line.partition(": ")[0] for line in lines] == where
    student = read_model("student", config.student.model)
    (line,) = evaluation_warnings(plan_evaluation(config, student), student.vocabulary)
    assert line.startswith("evaluation.thinking=false: the chat template does not heed it")


def test_a_policy_checks_all_problems_where_nobody_knows_how_many_prompts_batches_take(monkeypatch):
    seen = []
    monkeypatch.setattr(OpdPolicy, "check", lambda policy, prompts: seen.append(len(list(prompts))), raising=False)
    small = ["policy=opd", "training={iterations: 1, batch_size: 8, mini_batch_size: 8, warmup_iterations: 0}"]
    for refill in ("false", "true"):
        plan_training(quickstart([*small, f"training.refill={refill}"]), starts=False)
    assert seen == [8, 200]
