"""Configuration: what a user types wrong comes back as one clear line, and what is right comes back the same."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest

from spot_async.backends.shared.weight_transport import WeightSettings
from spot_async.base import registry
from spot_async.config import Config, LoraConfig
from spot_async.config.loading import doubled_backslashes, dump_yaml, load_config, read_tree
from spot_async.config.suggestions import other_names, paths
from spot_async.errors import ConfigError

MINIMAL = """
student: {model: s}
teacher: {model: t}
data: {train: train.jsonl}
policy: spot
training: {iterations: 3, batch_size: 8, mini_batch_size: 4}
"""


@pytest.fixture
def config_path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return str(raised.value)


def test_a_plug_in_may_be_a_class_derived_from_one_of_ours(config_path, tmp_path, monkeypatch):
    (tmp_path / "derived_policy.py").write_text(
        "from spot_async.policies.spot import SpotPolicy\nclass Derived(SpotPolicy): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(config_path, ["policy={kind: derived_policy:Derived, gamma: 2.0}"])
    assert (config.policy.kind, config.policy.gamma) == ("derived_policy:Derived", 2.0)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.batchsize=8", "training.batchsize: unknown key; did you mean `batch_size`?"),
        ("policy.gama=2", "policy.gama: unknown key; did you mean `gamma`?"),
        (
            "student.backend={deterministic: true, threads: 2}",
            "student.backend: deterministic: true needs device: cpu and threads: 1, not device: cpu and threads: 2: ",
        ),
        ("learning_rate=1", "learning_rate: unknown key; did you mean `training.learning_rate`?"),
        ("temperature=1", "unknown key; did you mean `teacher.temperature` or `sampling.temperature`"),
        ("training.beta=1", "training.beta: unknown key; here it is `training.reference_kl`"),
        ("policy.num_generations=8", "unknown key; here it is `policy.samples` (of kind grpo)"),
        ("sampling.max_completion_length=8", "unknown key; here it is `sampling.max_response_tokens`"),
        (
            "training.lora={rank: 8, use_dora: true}",
            "training.lora: use_dora: DoRA is not there: vLLM and SGLang refuse it",
        ),
        ("training.lora={modules_to_save: [lm_head]}", "training.lora: modules_to_save: whole layers are not trained"),
        ("training.lora.targets=[q_proj, lm_head]", "lm_head: no adapter for the embedding or the output layer"),
        ("training.lora.targets=embed_tokens", "embed_tokens: no adapter for the embedding or the output layer"),
        ("training.packing=maybe", "training.packing: input should be 'auto' or a valid boolean, but got 'maybe'"),
        ("sampling.temperature=1e-320", "sampling.temperature: 9.99989e-321 is as good as 0: at least 1e-30"),
        ("sampling.top_p=1e-320", "sampling.top_p: 9.99989e-321 is as good as 0: at least 1e-30"),
        (
            "training.recompute_layers=-1",
            "training.recompute_layers: input should be a valid boolean or greater than 0, but got -1",
        ),
        ("training.lora.lora_alpha=8", "training.lora: lora_alpha: here it is `alpha`"),
        ("training.lora.rank_stabilised=true", "training.lora: rank_stabilised: what an adapter adds is multiplied by"),
        ("lora_rank=8", "lora_rank: unknown key; LoRA is `training.lora: {rank, alpha, targets}`"),
        (
            "run.resume=runs/x",
            "run.resume: unknown key; runs are resumed by a command: `spot-async train",
        ),
        (
            "stages.score.hedge_after_s=8",
            "stages.score.hedge_after_s: unknown key; hedged requests were removed: take it out",
        ),
        (
            "student.backend.start_timeout_s=8",
            "student.backend.start_timeout_s: unknown key; here it is `student.serving.recovery_timeout_s` (likewise",
        ),
        (
            "teacher.backend={kind: vllm, launch: [{python: p, start_timeout_s: 8}]}",
            "teacher.backend.launch.0.start_timeout_s: unknown key; here it is `student.serving.recovery_timeout_s`",
        ),
        ("evaluation.verifier={kind: math_verify, cache_entries: 8}", "65,536 outcomes are remembered: take it out"),
        (
            "telemetry.wandb={project: p, mode: offline}",
            "telemetry.wandb.mode: unknown key; W&B's own variables say it: WANDB_ENTITY, WANDB_NAME, WANDB_MODE",
        ),
        ("teacher.backend.score_tokens=8", "unknown key; the engine of `local` decides that itself: take it out"),
        ('prompt.separator=" / "', "here it is `prompt.instruction` (begin it with the white space)"),
        ("evaluation.best_by=pass", "unknown key; the best student is the one of the best Avg@n: take it out"),
        ("cluster.heartbeat_timeout_s=8", "a machine that says nothing for a minute is lost: take it out"),
        (
            "teacher.backend={kind: vllm, launch: [{python: p, heartbeat_timeout_s: 8}]}",
            "launch.0.heartbeat_timeout_s: unknown key; a machine that says nothing for a minute is lost: take it out",
        ),
        ("cluster.start_timeout_s=8", "cluster.start_timeout_s: unknown key; here it is `cluster.join_timeout_s`"),
        ("cluster.run_id=x", "unknown key; the scheduler tells runs apart, or else their cluster.port does: take it"),
        (
            "student.backend={kind: vllm, url: 'http://a', weights: {backend: gloo}}",
            "weights.backend: unknown key; here it is `student.backend.weights.device` (cpu means gloo, others NCCL)",
        ),
        (
            "verifier={kind: http, url: 'http://127.0.0.1:1', max_reply_bytes: 8}",
            "verifier.max_reply_bytes: unknown key; a judgement with its feedback has at most 64 KiB: take it out",
        ),
        (
            "data.train={path: a/b, revision: main}",
            "data.train.revision: unknown key; here it is `data.train.path` (as org/name@revision)",
        ),
        ("stages.verify.timeout_s=8", "unknown key; here it is `stages.timeout_s` (for all stages)"),
        ("stages.score.attempt_timeout_s=8", "unknown key; here it is `stages.attempt_timeout_s` (for all stages)"),
        ("stages.probe.attempts=8", "unknown key; here it is `stages.attempts` (for all stages)"),
        ("training.nnodes=2", "unknown key; here it is `cluster.nodes`"),
        ("training=null", "training: input should be a section, but got null"),
        ("telemetry.wandb=true", "telemetry.wandb: input should be a section, but got true"),
        ("evaluation.pass_k=3", "evaluation.pass_k: input should be a list, but got 3"),
        ("data.train={path: x, fields: [a, b]}", "data.train.fields: input should be a mapping, but got [a, b]"),
        ("run.stall_timeout_s=.nan", "run.stall_timeout_s: input should be a finite number, but got .nan"),
        (f"run.seed={'[' * 220}{']' * 220}", "sections or lists stand too deep within each other"),
        ('run.directory="\\ud800"', "holds a value that is no plain YAML value"),
        ("studnt.model=x", "studnt: unknown key; did you mean `student`?"),
        ("stages.probe.concurency=2", "stages.probe.concurency: unknown key; did you mean `concurrency`?"),
        ("student.backend.slot=4", "student.backend.slot: unknown key; did you mean `slots`?"),
        ("training.learning_rate=fast", "training.learning_rate: input should be a valid number, but got 'fast'"),
        ("training.batch_size='8'", "training.batch_size: input should be a valid integer, but got '8'"),
        ("training.batch_size=8.5", "training.batch_size: input should be a valid integer"),
        (
            "student={model: m, backend: {threads: 2}, serving: {own_cores: 1}}",
            "student: serving.own_cores=1: fewer than backend.threads=2, which would wait for each other: set",
        ),
        ("sampling.top_p=1.5", "sampling.top_p: input should be less than or equal to 1, but got 1.5"),
        ("training.learning_rate=.inf", "training.learning_rate: input should be a"),
        ("policy.baseline=-0.1", "policy.baseline: input should be greater than or equal to 0, but got -0.1"),
        ("policy.baseline=1.1", "policy.baseline: input should be less than or equal to 1, but got 1.1"),
        ("policy.baseline=half", "policy.baseline: input should be a valid number, but got 'half'"),
        ("policy.baseline=.nan", "policy.baseline: input should be a finite number, but got .nan"),
        (
            "policy={kind: spot, baseline: 0.5, verifier_guidance: false}",
            "policy: baseline=0.5 needs verifier_guidance=true: without outcomes there is only the prior",
        ),
        ("policy=spt", "policy: no policy called 'spt'; did you mean 'spot'?"),
        ("policy=GRPO", "policy: no policy called 'GRPO'; did you mean 'grpo'?"),
        ("policy=gkd", "policy: no policy called 'gkd'; divergences and their mixtures are keys of 'distill'"),
        ("policy=orpo", "of methods that learn from rewards alone there is 'grpo'"),
        ("policy=abc", "policy: no policy called 'abc'; known: distill, eopd, grpo, kd, opd, spot"),
        ("teacher.backend=ollama", "teacher.backend: no backend called 'ollama'; 'openai' speaks to servers with"),
        ("teacher.backend=tgi", "teacher.backend: no backend called 'tgi'; 'openai' speaks to servers with"),
        ("teacher.backend=trtllm", "teacher.backend: no backend called 'trtllm'; 'openai' speaks to servers with"),
        ("student.backend=hf", "student.backend: no backend called 'hf'; 'local' computes a Hugging Face directory"),
        ("student.backend=deepspeed", "called 'deepspeed'; known: local, openai, sglang, vllm"),
        ("verifier=llm_judge", "no verifier called 'llm_judge'; 'http' asks a server that judges"),
        ("training.optimizer=adam", "training.optimizer: unknown key; the optimiser is AdamW"),
        ("training.num_iterations=2", "unknown key; here it is `training.mini_batch_size` (by which an iteration"),
        ("training.flash_attention=true", "training.flash_attention: unknown key; known keys: epochs,"),
        ("inference.x=1", "inference: unknown key; servers are `student.backend` and `teacher.backend`"),
        ("actor.x=1", "actor: unknown key; known keys: version,"),
        ("trainer.x=1", "trainer: unknown key; did you mean `training`?"),
        ("student.backend=locl", "student.backend: no backend called 'locl'; did you mean 'local'?"),
        ("policy={}", "policy: needs a `kind`, one of: distill, eopd, grpo, kd, opd, spot"),
        ("policy=no.such.module:Policy", "policy: cannot load 'no.such.module:Policy'"),
        (
            "teacher.backend=spot_async.policies.opd:OpdPolicy",
            "teacher.backend: kind=spot_async.policies.opd:OpdPolicy: its Settings are no spot_async.BackendSettings: "
            "derive them from that",
        ),
        (
            "training.mini_batch_size=3",
            "training: mini_batch_size=3 must divide batch_size=8: the nearest that does is 2",
        ),
        ("training.refill=4", "training.refill: input should be a valid boolean, but got 4"),
        ("training.refill_at_most=0", "training.refill_at_most: input should be greater than 0, but got 0"),
        ("training.refill_at_most=1.5", "training.refill_at_most: input should be a valid integer, but got 1.5"),
        ("training.refil=true", "training.refil: unknown key; did you mean `refill`?"),
        ("policy.probe_top_k=17", "policy: probe_top_k=17 (k_p) must not exceed score_top_k=16 (k_s)"),
        (
            "policy.lambda_mass=0.7",
            "policy: lambda_mass=0.7 and lambda_shape=0.5 must sum to 1: set lambda_shape to 0.3",
        ),
        ("queue.capacity_prompts=7", "the queue holds the max_staleness + 1 batches that may be under way"),
        ("queue.order=admission", "queue.order: unknown key; batches are made in admission order: take it out"),
        (
            "training.epochs=2",
            "training: give exactly one of epochs and iterations, not both epochs=2 and iterations=3: take one away by "
            "training.iterations=null or",
        ),
        ("training.iterations=null", "training: give exactly one of epochs and iterations; both are missing"),
        (
            "training.importance_cap=2",
            "training: importance_cap=2 needs behavior=recomputed: with the served pi_old there is nothing to weigh it",
        ),
        ("training", "override 'training': expected section.key=value"),
        (
            "training.batch_size.x=1",
            "override 'training.batch_size.x': training.batch_size is a value, not a section",
        ),
        ("data.train=null", "data.train: input should be a valid string, a list of them or a section, but got null"),
        (
            "prompt.template=chatml",
            "prompt.template: give teacher, teachers.NAME, student, plain or the path of a Jinja file that ends in",
        ),
        (
            "prompt.template_arguments.date_string=null",
            "prompt.template_arguments.date_string: input should be a valid boolean or",
        ),
        ("data.train={path: x, fields: {answr: y}}", "data.train.fields.answr: unknown key; did you mean `answer`?"),
        ("version=9", "configuration: version 9 is newer than this spot-async can read (2): install a newer one"),
        (
            "stages.attempt_timeout_s=700",
            "stages: attempt_timeout_s=700 is longer than timeout_s=600, which is the time of all attempts "
            "together: lower it, raise timeout_s, or leave it out",
        ),
        ("evaluation.attempt_timeout_s=700", "evaluation: attempt_timeout_s=700 is longer than timeout_s=600"),
        ("policy.beta=[1", "override 'policy.beta': line 1 not valid YAML"),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_remedy(config_path, override, expected):
    line = complaint(config_path, override)
    assert expected in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r'prompt: {instruction: "in \boxed{}."}', r"prompt.instruction: holds '␈oxed{}.'"),
        (r'prompt: {teacher: {text: "{problem} \frac12"}}', r"prompt.teacher.text: holds '␌rac12'"),
        (r'prompt: {template_arguments: {hint: "\text{ m}"}}', r"prompt.template_arguments.hint: holds '␉ext{ m}'"),
        (r'evaluation: {problems: e, system: "not \neq 3"}', r"evaluation.system: holds '␊eq 3'"),
        (r'evaluation: {problems: e, system: "\Phi"}', r"evaluation.system: holds '�hi'"),
        (
            r'data: {train: [{path: a}, {path: b, instruction: "\alpha"}]}',
            r"data.train.1.instruction: holds '␇lpha'",
        ),
        (r'teacher: {model: t, launch: {environment: {"\vec": x}}}', r"teacher.launch.environment: holds '␋ec'"),
    ],
)
def test_escapes_that_yaml_reads_within_double_quotes_are_refused_where_a_backslash_was_meant(config_path, text, shown):
    key, _, value = text.partition(": ")
    line = complaint(config_path, f"{key}={value}")
    assert (line.startswith(shown), "write the text in single quotes" in line, "\n" in line) == (True, True, False), (
        line
    )
    over = config_path.with_name("over.yaml")
    over.write_text(f"base: {config_path.name}\n{text}\n")
    assert complaint(over) == line


@pytest.mark.parametrize("key", ["prompt.instruction", "prompt.teacher.text", "evaluation.system"])
def test_a_text_for_models_with_two_backslashes_before_a_command_is_named_and_a_pattern_is_not(config_path, key):
    held = "evaluation={problems: held.jsonl}"
    config = load_config(config_path, [held, rf"{key}='{{problem}} in \\boxed{{}}.'"])
    line = rf"{key}: holds '\\boxed{{}}.', two backslashes before a command: write one, unless models are to read two"
    assert doubled_backslashes(config) == [line]
    asks_for_json = load_config(config_path, [held, rf"""{key}='{{problem}}, as {{"a": "x\\ny"}}. Use \frac.'"""])
    assert doubled_backslashes(asks_for_json) == []
    judge = r"{kind: http, url: 'http://127.0.0.1:1/judge', headers: {pattern: '\\boxed'}}"
    config = load_config(config_path, [f"verifier={judge}"])
    assert (config.verifier.headers, doubled_backslashes(config)) == ({"pattern": r"\\boxed"}, [])


def test_line_ends_and_tabs_that_are_meant_stay(config_path):
    config = load_config(config_path, [r'prompt.teacher.text="\r\n\t"', r"prompt.instruction='In \boxed{}, not \neq.'"])
    assert (config.prompt.teacher.text, config.prompt.instruction) == ("\r\n\t", r"In \boxed{}, not \neq.")


def test_names_of_others_and_of_before_lead_to_keys_that_exist():
    launch = (
        registry.load("backends", "vllm").Settings.model_validate({"kind": "vllm", "launch": {"python": "p"}}).launch
    )
    known = {*paths(Config), *(f"policy.{name}" for name in registry.load("policies", "grpo").Settings.model_fields)}
    known |= {f"student.backend.launch.{name}" for name in type(launch).model_fields}
    known |= {f"student.backend.weights.{name}" for name in WeightSettings.model_fields}
    known |= {f"teacher.backend.{path}" for path in paths(registry.load("backends", "openai").Settings)}
    assert {each.here for of in ("keys", "keys_before") for each in other_names()[of] if each.here} <= known
    assert {each.here for each in other_names()["training.lora"] if each.here} <= {*LoraConfig.model_fields}


def test_of_a_newer_file_nothing_but_its_version_is_complained_about(config_path):
    assert complaint(config_path, "version=3", "training.fancy_new_key=1").count("\n") == 0


def test_every_mistake_is_reported_in_its_own_line(config_path):
    lines = complaint(config_path, "training.batchsize=8", "policy.gama=1", "sampling.top_p=0").splitlines()
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1", "not valid YAML"),
        ("- 1\n- 2", "expected sections such as `student:` at the top, found a list"),
        ("", "expected sections such as `student:` at the top, found nothing"),
        ("base: [1, null]", "`base` must name a configuration file, or several in a list, but is [1, null]"),
        ("student: {model: s}", "data: required, but not given"),
        ("student: !!python/object/apply:os.system ['true']", "not valid YAML"),  # which would run code
        ("a: " + "[" * 5000 + "]" * 5000, "run.yaml: sections or lists stand too deep within each other: take some"),
        ("a: &a [*a]", "run.yaml: sections or lists stand too deep within each other: take some away"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert expected in complaint(path)


def test_a_missing_file_is_named(tmp_path):
    assert "nowhere.yaml: cannot read the configuration: No such file" in complaint(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "training:\n  batch_size: 8\n  epochs: 1\n  batch_size: 16\n",
            "line 4: `batch_size` stands here and in line 2, in the same section: keep one",
        ),
        ("run: {seed: 1}\ntraining: {}\n'run': {seed: 2}\n", "line 3: `run` stands here and in line 1"),
        ("run: {seed: 1, seed: 2}\n", "line 1: `seed` stands twice"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_lines(config_path, tmp_path, text, expected):
    """The last one would win silently, and what the first says would go back to its default."""
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    assert f"{path}: {expected}" in complaint(path)
    assert "line 1: `kind` stands twice" in complaint(config_path, "policy={kind: opd, kind: spot}")


def test_a_key_of_a_merged_section_may_be_given_anew(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3}\n")
    assert read_tree(path) == {"a": {"x": 1}, "b": {"x": 2}, "c": {"x": 3}}


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        # settings of a plug-in that is given in short form, and of one named by module and class
        (
            ["policy.gamma=2.5", "verifier.kind=math_verify", "verifier.workers=1"],
            {"policy.kind": "spot", "policy.gamma": 2.5, "verifier.workers": 1},
        ),
        (
            ["verifier=spot_async.verification.math_verify:MathVerify", "verifier.workers=1"],
            {"verifier.workers": 1},
        ),
        # numbers as people write them, and nothing behind the equals sign, which is an empty text
        (["training.learning_rate=3e-6"], {"training.learning_rate": 3e-6}),
        (["training.learning_rate=3.0e-6"], {"training.learning_rate": 3e-6}),
        (["training.learning_rate=0.000003"], {"training.learning_rate": 3e-6}),
        (["prompt.instruction="], {"prompt.instruction": ""}),
        # a part of a section that is off, and of sections that the file leaves out
        (["telemetry.wandb=null", "telemetry.wandb.project=mine"], {"telemetry.wandb.project": "mine"}),
        (
            ["teacher.backend.slots=3", "evaluation.problems=x", "evaluation.verifier.workers=5"],
            {
                "teacher.backend.kind": "local",
                "teacher.backend.slots": 3,
                "evaluation.verifier.kind": "math",
                "evaluation.verifier.workers": 5,
            },
        ),
        # the queue holds the batches that staleness lets be under way
        (["max_staleness=2", "training.importance_cap=2"], {"queue_capacity_prompts": 3 * 8}),
    ],
)
def test_an_override_sets_what_it_names(config_path, overrides, values):
    config = load_config(config_path, overrides)
    assert {key: attrgetter(key)(config) for key in values} == values


def test_a_plugin_in_the_working_directory_is_refused_with_how_it_is_found(config_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = complaint(config_path, "policy=my_policy:Mine")
    assert "No module named 'my_policy'; install it, or put PYTHONPATH=FOLDER before the command" in line
    (tmp_path / "my_policy.py").write_text("import no_such_package")
    line = complaint(config_path, "policy=my_policy:Mine")
    assert line.endswith("; it lies in the working directory: put PYTHONPATH=. before the command")
    monkeypatch.syspath_prepend(tmp_path)
    assert complaint(config_path, "policy=my_policy:Mine").endswith("No module named 'no_such_package'")


@pytest.mark.parametrize("order", [1, -1])
def test_an_override_to_another_kind_drops_the_keys_of_the_one_before(config_path, order):
    config_path.write_text(MINIMAL.replace("policy: spot", "policy: {kind: spot, gamma: 2.0}"))
    config = load_config(config_path, ["policy.kind=eopd", "policy.alpha=0.5"][::order])
    assert (config.policy.kind, config.policy.alpha) == ("eopd", 0.5)


@pytest.mark.parametrize("kind", ["spot", "'spot'", "spot # the same"])
def test_an_override_to_the_same_kind_keeps_its_keys(config_path, kind):
    config_path.write_text(MINIMAL.replace("policy: spot", "policy: {kind: spot, gamma: 2.0}"))
    assert load_config(config_path, [f"policy.kind={kind}"]).policy.gamma == 2.0


@pytest.mark.parametrize(
    "overrides", [["student.backend.kind=vllm", "student.backend.url=http://h:1"], ["student.backend.slots=3"]]
)
def test_an_override_of_one_section_leaves_others_that_a_yaml_alias_shares_with_it(config_path, overrides):
    student = MINIMAL.replace("{model: s}", "{model: s, backend: &servers {kind: local, slots: 2}}")
    config_path.write_text(student + "reference: {model: s, backend: *servers}\n")
    backend = load_config(config_path, overrides).reference.backend
    assert (backend.kind, backend.slots) == ("local", 2)


def test_keys_of_another_kind_are_one_line_that_names_it(config_path):
    config_path.write_text(MINIMAL.replace("policy: spot", "policy: {kind: opd, gamma: 2.0, positions: 2}"))
    assert complaint(config_path) == (
        "policy: gamma, positions belong to kind spot, but policy.kind is opd: "
        "take them out, or set policy.kind to spot"
    )
    config_path.write_text(MINIMAL.replace("{model: s}", "{model: s, backend: {kind: vllm, slots: 2}}"))
    assert "slots belongs to kind local, but student.backend.kind is vllm: take it out" in complaint(config_path)


def test_beside_keys_of_another_kind_a_misspelt_one_has_its_own_line(config_path):
    lines = complaint(config_path, "policy={kind: opd, positions: 2, gama: 1}").splitlines()
    assert len(lines) == 2
    assert "positions belongs to kind spot" in lines[0]
    assert lines[1].startswith("policy.gama: unknown key")


def test_the_written_configuration_reads_back_to_the_same_one(config_path, tmp_path):
    config = load_config(config_path, ["policy.gamma=0.3", "student.backend.slots=7"])
    written = tmp_path / "written.yaml"
    written.write_text(dump_yaml(config))
    again = load_config(written)
    assert again == config
    assert written.read_text().startswith("version: 2\n")
    assert again.student.backend.slots == 7


def test_a_file_lies_over_the_one_that_its_base_names(config_path, tmp_path):
    (tmp_path / "below").mkdir()
    over = tmp_path / "below" / "over.yaml"
    over.write_text("base: ../run.yaml\npolicy: {kind: opd}\ntraining: {batch_size: 16}\nteacher: null\n")
    config_path.write_text(MINIMAL.replace("policy: spot", "policy: {kind: spot, gamma: 2.0}"))
    config = load_config(over, ["training.mini_batch_size=2"])
    assert config.policy.kind == "opd"  # as a whole: gamma is no key of it
    assert (config.training.iterations, config.training.batch_size, config.training.mini_batch_size) == (3, 16, 2)
    assert config.student.model == "s"
    assert config.teacher is None


@pytest.mark.parametrize(
    ("base", "expected"),
    [("nowhere.yaml", "nowhere.yaml: cannot read"), ("over.yaml", "is its own `base`"), ("[1]", "`base` must name")],
)
def test_a_base_that_cannot_be_read_is_one_line(tmp_path, base, expected):
    over = tmp_path / "over.yaml"
    over.write_text(f"base: {base}")
    line = complaint(over)
    assert expected in line
    assert "\n" not in line
