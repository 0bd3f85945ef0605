"""The settings of the trainer ranks. The handle writes them once, as a JSON file, and every rank reads it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from spot_async.config import PositiveFloat, PositiveInt, Section, TrainingConfig
from spot_async.errors import StorageError


class ResumePoint(Section):
    """Where a run goes on: the checkpoint after `step` steps."""

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
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=2) + "\n")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from None
        return path

    @classmethod
    def load(cls, path: str) -> TrainerSettings:
        return cls.model_validate_json(Path(path).read_bytes())
