"""Reads the models and problems of a configuration, and checks that they are whole and fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spot_async.checks.own_tokenizers import TextsRead, check_texts, read_own_tokens, read_texts
from spot_async.config import Config, ModelConfig, PromptConfig, TemplateConfig, teacher_name, teacher_role
from spot_async.data.problem_set import ProblemSet, load_training_sets
from spot_async.data.prompts import PromptRenderer, PromptSchedule, TeacherPromptRenderer, render_all
from spot_async.data.routing import routed
from spot_async.environments.planning import PlannedEnvironment, opened, plan_environments
from spot_async.errors import ConfigError, DataError
from spot_async.models.adapter_files import check_lora
from spot_async.models.common_vocabulary import CommonVocabulary
from spot_async.models.files import ModelFiles, check_attention, read_model, softmax_width
from spot_async.models.hub import is_elsewhere, local_path
from spot_async.models.own_tokens import OwnTokens
from spot_async.models.vocabulary import stop_token_ids
from spot_async.models.weight_files import has_weights, weight_files
from spot_async.models.whole import check_whole
from spot_async.types import PolicyNeeds, Problem


@dataclass(frozen=True)
class PlannedModels:
    """The models of a training run, whose files have been read."""

    student: ModelFiles
    teachers: Mapping[str, ModelFiles]  # by role
    frozen: Mapping[str, ModelFiles]  # by role: the teachers, and the reference where the configuration names one
    own_tokens: Mapping[str, OwnTokens]  # by role, how a teacher with a tokenizer of its own reads the student's tokens

    @property
    def by_role(self) -> Mapping[str, ModelFiles]:
        return {"student": self.student, **self.frozen}

    @property
    def alike(self) -> Mapping[str, ModelFiles]:
        """Those with the student's tokens, by role."""
        return {role: model for role, model in self.by_role.items() if role not in self.own_tokens}

    @cached_property
    def common(self) -> CommonVocabulary:
        """The token ids that those with the student's tokens know."""
        return CommonVocabulary({role: model.vocab_size for role, model in self.alike.items()})

    @property
    def of_policy(self) -> ModelFiles:
        """What the policy is told of: of teachers with the student's tokens the widest softmax, or the student."""
        alike = [model for role, model in self.teachers.items() if role not in self.own_tokens]
        return max(alike, key=lambda each: each.vocab_size, default=self.student)


def plan_models(config: Config) -> PlannedModels:
    """Return the models of a training run. Raises ConfigError or DataError for those that would fail later."""
    student = read_model("student", config.student.model)
    check_attention("student", student.directory)
    teachers = {role: read_model(role, teacher.model) for role, teacher in config.teachers_by_role.items()}
    frozen = dict(teachers)
    if config.reference is not None:
        frozen["reference"] = read_model("reference", config.reference.model)
    alike = [model.vocabulary for role, model in teachers.items() if role not in config.own_tokenizers]
    ends = stop_token_ids(student.vocabulary, *alike)
    own_tokens = {role: read_own_tokens(config, role, student, teachers[role], ends) for role in config.own_tokenizers}
    for role in frozen.keys() - own_tokens.keys():
        _check_same_vocabulary(student, role, frozen[role])
    models = PlannedModels(student, teachers, frozen, own_tokens)
    check_ends(models.common, models.alike)
    check_weights("student", config.student, student.directory, longest=config.sampling.longest_sequence)
    if config.training.lora is not None:
        check_lora(student.directory, config.training.lora)
    return models


def check_weights(role: str, model: ModelConfig, directory: Path, *, longest: int = 0) -> None:
    """Raise DataError unless the files of a model that is trained or served here are a whole model.

    It is trained on sequences of up to `longest` tokens; 0 if it is not trained.

    A directory without weights is left alone, and so is an architecture that only the model's server may have.
    """
    if (is_elsewhere(model) and not longest) or not has_weights(directory):
        return
    try:
        if any(map(Path.is_file, weight_files(directory))):
            check_whole(directory, must_load=longest > 0, longest=longest)
    except DataError as error:
        raise DataError(f"{role}.model: {error}") from None


def _check_same_vocabulary(student: ModelFiles, role: str, other: ModelFiles) -> None:
    if student.vocabulary.fingerprint == other.vocabulary.fingerprint:
        return
    ours, theirs = (model.vocabulary.tokenizer.get_vocab() for model in (student, other))
    different = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (ours.get(token, theirs.get(token)), token),
    )
    raise ConfigError(
        f"{role}.model: {other.directory} and student {student.directory} have different vocabularies "
        f"({len(different)} tokens, the first is {different[0]!r}); both must mean the same by the same token ids"
        + (f"; set {role}.tokenizer=own if it is to read them in its own" if teacher_name(role) is not None else "")
    )


def common_of_files(config: Config, student: ModelFiles) -> CommonVocabulary:
    """Return the ids that an evaluation samples from: the same as training's, if the other models' files are here."""
    others = config.models.keys() - {"student", *config.own_tokenizers}
    names = {role: Path(local_path(config.models[role].model)) for role in sorted(others)}
    widths = {role: softmax_width(role, path) for role, path in names.items() if path.is_dir()}
    return CommonVocabulary({"student": student.vocab_size, **widths})


def check_ends(common: CommonVocabulary, models: Mapping[str, ModelFiles]) -> None:
    """Raise ConfigError unless all models have a row for every model's end tokens."""
    known = min(common.widths.values())
    for role, model in models.items():
        for token_id in model.vocabulary.end_token_ids:
            if token_id >= known:
                text = model.vocabulary.tokenizer.convert_ids_to_tokens(token_id)  # None: it has no such token either
                shown = f"({token_id})" if text is None else f"{text!r} ({token_id})"
                raise ConfigError(
                    f"{role}.model: its end token {shown} is none of the {known} tokens that all models have: "
                    "eos_token_id in its files is wrong, or their vocabularies differ"
                )


@dataclass(frozen=True)
class PlannedData:
    """The problems of a training run, and its prompts."""

    sets: Mapping[str, ProblemSet]  # those of data.train by key, with what became of their rows
    problems: Sequence[Problem]
    renderer: PromptRenderer
    teacher_renderers: Mapping[str, PromptRenderer]  # of what teachers read, by role: the student's for most
    schedule: PromptSchedule
    own_tokens: Mapping[str, OwnTokens]  # by role, those of the models with rows where the policy needs them
    texts_read: Mapping[str, TextsRead]  # by role, what a teacher with its own tokenizer makes of the problems
    environments: Mapping[str, PlannedEnvironment]  # by the set's key; of equal settings it is one


def plan_data(config: Config, needs: PolicyNeeds, models: PlannedModels) -> PlannedData:
    """Return the problems and prompts of a training run.

    Raises ConfigError or DataError for rows that cannot be read, and for prompts that some model cannot read.
    """
    sets = load_training_sets(config, needs)
    problems = [problem for each in sets.values() for problem in each.problems]
    if config.route is not None:
        problems = routed(problems, config.route, config.teachers)
    problems, about = opened(problems, config.environments)
    student, known = models.student, min(models.common.widths.values())
    renderer = _student_renderer(config.prompt, models)
    environments = plan_environments(about, student, renderer.arguments, models.teachers, needs.teacher_responses)
    sources = render_all(problems, renderer, config.sampling.max_prompt_tokens)
    read = ((source.problem, source.token_ids) for source in sources)
    renderer.check_rows("data.train", read, known, "the models")
    if needs.written_responses and len(student.vocabulary.tokenizer) > known:
        written = ((each, student.vocabulary.encode(each.response or "")) for each in problems)
        renderer.check_rows("data.train", written, known, "the models")
    teacher_renderers = _teacher_renderers(config, student, models.teachers)
    for own in dict.fromkeys(teacher_renderers.values()):
        sources = own.beside(sources)
    for role, own in teacher_renderers.items():
        name = teacher_name(role) or ""
        read = ((source.problem, source.read_by(name)) for source in sources if source.problem.asks(name))
        own.check_rows(own.key, read, models.by_role[role].vocab_size, f"the {role}")
    own_tokens, texts_read = dict(models.own_tokens), {}
    for role, reader in own_tokens.items():
        found = texts_read[role] = read_texts(reader, student, problems, needs)
        check_texts(role, config.policy.kind, found)
        if needs.teacher_rows:
            own_tokens[role] = reader.with_rows(found.longer_share)
    left = {source.problem.set_key for source in sources}
    if key := next((key for key in sets if key not in left), None):
        also = "" if not teacher_renderers else ", or the teacher's are than prompt.teacher.max_tokens"
        raise ConfigError(
            f"sampling.max_prompt_tokens={config.sampling.max_prompt_tokens}: all {len(sets[key].problems)} prompts "
            f"of {key} are longer, the instruction included{also}; raise it"
        )
    schedule = PromptSchedule(
        sources,
        batch_size=config.training.batch_size,
        run_seed=config.run.seed,
        shuffle=config.data.shuffle,
        epochs=config.training.epochs,
        iterations=config.training.iterations,
        shares=config.data.shares,
    )
    readers = {role: teacher_renderers.get(role, renderer) for role in models.teachers}
    return PlannedData(sets, problems, renderer, readers, schedule, own_tokens, texts_read, environments)


def _student_renderer(config: PromptConfig, models: PlannedModels) -> PromptRenderer:
    """Return what renders the student's prompts."""
    alike = {role: each for role, each in models.teachers.items() if role in models.alike}
    own_alone = config.template == "teacher" and models.teachers and not alike  # the student could not read it
    owner = models.student if own_alone else _template_owner(config, "prompt", models.student, alike)
    return PromptRenderer(owner.vocabulary, config)


def _template_owner(
    config: TemplateConfig, key: str, student: ModelFiles, teachers: Mapping[str, ModelFiles]
) -> ModelFiles:
    """Return the model whose tokenizer renders prompts. A Jinja file is rendered with the student's."""
    if teacher_name(config.template) is None:
        return student
    if (named := teachers.get(config.template)) is not None:
        return named
    words = " and ".join(teachers) or "no teacher"
    if config.template != "teacher" or not teachers:
        raise ConfigError(f"{key}.template={config.template}: the run has {words}; set {key}.template=student")
    first, *others = teachers.values()
    if any(chat_template(each) != chat_template(first) for each in others):
        raise ConfigError(
            f"{key}.template=teacher: {words} have different chat templates: set it to one of them, or to student"
        )
    return first


def _teacher_renderers(
    config: Config, student: ModelFiles, teachers: Mapping[str, ModelFiles]
) -> dict[str, TeacherPromptRenderer]:
    """Return what renders teachers' own prompts, by role; those that read the student's prompt are left out."""
    shared = config.prompt.teacher
    if shared is not None and not teachers:
        raise ConfigError("prompt.teacher: the run has no teacher section: give one, or remove prompt.teacher")
    found = {}
    alike = {role: each for role, each in teachers.items() if role not in config.own_tokenizers}
    if shared is not None and alike:
        owner = _template_owner(shared, "prompt.teacher", student, alike)
        found = dict.fromkeys(alike, TeacherPromptRenderer(owner.vocabulary, config.prompt))
    for role in config.own_tokenizers:
        section = config.teacher_prompt(role)
        if section is not None and section.template in ("student", *alike):
            raise ConfigError(
                f"prompt.teacher.template={section.template}: {role} reads in tokens of its own (tokenizer=own): set "
                "it to teacher, or to a Jinja file"
            )
        prompt = config.prompt.model_copy(update={"teacher": section})
        found[role] = TeacherPromptRenderer(teachers[role].vocabulary, prompt, teacher_name(role) or "")
    for name, teacher in config.teachers.items():
        role = teacher_role(name)
        if (own := teacher.prompt) is not None and role in alike:
            itself = {**teachers, "teacher": teachers[role]}
            owner = _template_owner(own, f"{role}.prompt", student, itself)
            prompt = config.prompt.model_copy(update={"teacher": own})
            found[role] = TeacherPromptRenderer(owner.vocabulary, prompt, name)
    return found


def chat_template(files: ModelFiles) -> object:
    """Return the chat template that a model's tokenizer has."""
    return files.vocabulary.tokenizer.chat_template
