"""The settings of the trainer ranks, and what follows from them before there is a rank. It imports no torch.

The handle writes the settings once, as a JSON file, and every rank reads it. From them follow the learning rate of an
iteration, so that a resumed run needs no state for it, and the way in which ranks will attend.
"""

from __future__ import annotations

import math
from pathlib import Path

from pydantic import Field

from spot_async.base.files import read_bounded, writing
from spot_async.config import FollowsConfig, PositiveFloat, PositiveInt, Section, TrainingConfig

# Attention functions, by their names in transformers.
PER_DOCUMENT = "spot_per_document"
ONE_CALL = "spot_one_call"
WORDS = {
    PER_DOCUMENT: "sdpa, one call for each document",
    ONE_CALL: "torch's varlen_attn (flash kernels), one call for a row of documents",
}


class ResumePoint(Section):
    """Where a run continues: the checkpoint after `step` steps."""

    directory: str = Field(description="the checkpoint's tensors")
    step: PositiveInt = Field(description="the first iteration that is trained, counted from 0")


class TrainerSettings(Section):
    """The settings of one run of the trainer."""

    training: TrainingConfig
    model_directory: str = Field(description="Hugging Face directory of the initial student, with its tokenizer")
    run_directory: str = Field(description="the log goes to logs/trainer.log")
    publishes_to: str | None = Field(None, description="where weights go; default: weights/ of the run directory")
    temperature: PositiveFloat = Field(
        description="that of the rollouts, so that log-probabilities are the sampled policy's"
    )
    longest_sequence: int | None = Field(None, description="tokens of the longest; None: the student's whole context")
    seed: int = Field(ge=0, description="the run's seed: mini-batch orders derive from it")
    iterations: PositiveInt = Field(description="iterations of the whole run; the learning rate is 0 after the last")

    publishes_beside: bool = Field(
        False,
        description="weights are written while the next step computes its gradients. Needs ranks with a whole student",
    )
    shares_devices: bool = Field(
        False, description="the student's server is on the same devices, and needs their memory"
    )
    needs_gpu: str | None = Field(None, description="what asks for a GPU, for messages; None: the CPU will do")
    resume: ResumePoint | None = Field(None, description="None: begin with the initial student")
    merged_every: int = Field(
        1,
        ge=0,
        description="with LoRA: iterations between two that publish the whole student, merged with its adapters; the "
        "others publish the adapter alone. 0: only what a checkpoint is of, and the last, is whole",
    )
    follows: dict[str, FollowsConfig] = Field({}, description="how teachers follow the student, by role")
    teachers_take_adapters: bool = Field(False, description="they get an adapter alone, as the student's servers do")
    lineage: int = Field(0, ge=0, description="of the versions that are published")
    end_token_ids: tuple[int, ...] = Field((), description="what ends a response; published as the eos tokens")

    @property
    def weights_directory(self) -> Path:
        return Path(self.publishes_to or f"{self.run_directory}/weights")

    def publishes_whole(self, step: int) -> bool:
        """Whether the weights of a step are published whole, and not as an adapter alone."""
        return step == self.iterations or (self.merged_every > 0 and step % self.merged_every == 0)

    def save(self) -> Path:
        """Write the settings to `trainer.json` in the run directory; return its path."""
        directory = Path(self.run_directory)
        path = directory / "trainer.json"
        with writing(path):
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def load(cls, path: str) -> TrainerSettings:
        return cls.model_validate_json(read_bounded(Path(path)))


def attention_words(implementation: str) -> str:
    """Return in words how a model with this attention function attends."""
    return WORDS.get(implementation, f"{implementation}, rows padded to one length")


def expected_attention(training: TrainingConfig, *, on_gpus: bool, has_varlen: bool) -> str:
    """Return in words how ranks will attend. What only they can try is said too."""
    if training.packing is False:
        return attention_words("sdpa")
    each = attention_words(PER_DOCUMENT)
    if on_gpus and has_varlen and training.dtype == "bfloat16":
        return f"{attention_words(ONE_CALL)}; {each}, if a trial of it fails"
    return each


def learning_rate(training: TrainingConfig, iteration: int, iterations: int) -> float:
    """Return the rate of all updates of `iteration` (0-based) in a run of `iterations`.

    Linear warm-up reaches the full rate at iteration `warmup_iterations`. The cosine then starts from it, and is 0
    after the last iteration, or after `schedule_iterations`.
    """
    warmup = training.warmup_iterations
    if iteration < warmup:
        return training.learning_rate * (iteration + 1) / (warmup + 1)
    if training.schedule == "constant":
        return training.learning_rate
    progress = (iteration - warmup) / ((training.schedule_iterations or iterations) - warmup)
    return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def schedule_words(training: TrainingConfig, iterations: int) -> str:
    """Return the course of the learning rate in a run of `iterations`, for people."""
    warmup = f"after a warm-up of {training.warmup_iterations}, " if training.warmup_iterations else ""
    if training.schedule == "constant":
        return f"{warmup}{training.learning_rate:.2g} throughout"
    ends = training.schedule_iterations or iterations
    last = learning_rate(training, iterations - 1, iterations)
    cut = f", of which {iterations} are trained" if ends > iterations else ""
    return f"{warmup}{training.learning_rate:.2g} falling to 0 over {ends} iterations{cut}; {last:.2g} in the last"


def progress_words(iterations_before: int, iterations: int, step: int) -> str:
    """Return what another number of iterations does to the progress that a policy may go by; empty if nothing."""
    if iterations == iterations_before:
        return ""
    return f"progress after iteration {step}: {step / iterations:.2g} in place of {step / iterations_before:.2g}"


def seam_words(before: TrainingConfig, iterations_before: int, now: TrainingConfig, iterations: int, step: int) -> str:
    """Return what another number of iterations after `step` does to the learning rate; empty if nothing.

    The cosine of a run that continues for more iterations is stretched, so its rate rises where it continues.
    """
    last = learning_rate(before, step - 1, iterations_before)
    following = learning_rate(before, step, iterations_before)
    rate = learning_rate(now, step, iterations)
    if step >= iterations or math.isclose(rate, following, rel_tol=1e-6, abs_tol=1e-6 * now.learning_rate):
        return ""
    ended, ends = before.schedule_iterations or iterations_before, now.schedule_iterations or iterations
    return (
        f"learning rate: {last:.2g} in iteration {step} and {rate:.2g} in iteration {step + 1}, since its cosine ended "
        f"after iteration {ended} and now ends after {ends} (training.schedule_iterations)"
    )
