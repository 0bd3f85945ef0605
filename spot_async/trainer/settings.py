"""What the trainer ranks need to know: written once by the handle as a JSON file, read by every rank."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from spot_async.config import PositiveFloat, PositiveInt, Section, TrainingConfig


class TrainerSettings(Section):
    """One run of the trainer."""

    training: TrainingConfig
    model_directory: str = Field(description="Hugging Face directory of the initial student, with its tokenizer")
    run_directory: str = Field(description="weights go to weights/, the log to logs/trainer.log")
    temperature: PositiveFloat = Field(description="of the rollouts: log-probabilities are those of the sampled policy")
    seed: int = Field(ge=0, description="the run's seed: mini-batch orders derive from it")
    iterations: PositiveInt = Field(description="of the whole run: the learning rate reaches 0 after the last")

    @property
    def weights_directory(self) -> Path:
        return Path(self.run_directory) / "weights"

    def save(self) -> Path:
        """Write them to `trainer.json` in the run directory; returns the file."""
        directory = Path(self.run_directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "trainer.json"
        path.write_text(self.model_dump_json(indent=2) + "\n")
        return path

    @classmethod
    def load(cls, path: str) -> TrainerSettings:
        return cls.model_validate_json(Path(path).read_bytes())
