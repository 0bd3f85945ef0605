"""Makes one update with TRL's SFTTrainer, for `training.py`, in an environment that has `trl`.

    python benchmarks/training_trl.py JOB.json

The loss is cross-entropy of the response tokens. Rows are padded: what packs rows without mixing them up needs
attention of a kind that CPUs do not have. The CPU time is that of `train()`, without loading.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of nothing but padding: the rows are token ids already."""
    words = Tokenizer(WordLevel({"<pad>": 0}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


def update(job: dict[str, Any], directory: str) -> dict[str, float]:
    """Make one update of a job's rows; return its seconds of CPU time, its peak and its loss."""
    ranks, rows_per_pass = int(os.environ["WORLD_SIZE"]), job["rows_per_pass"]
    passes = -(-len(job["rows"]) // (ranks * rows_per_pass))
    config = SFTConfig(
        output_dir=directory,
        max_steps=1,
        per_device_train_batch_size=len(job["rows"]) // (ranks * passes),
        gradient_accumulation_steps=passes,
        gradient_checkpointing=job["recompute_layers"],
        max_length=None,
        learning_rate=1e-5,
        weight_decay=0.01,
        completion_only_loss=True,
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, trust_remote_code=False),
        args=config,
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer(),
    )
    started = time.process_time()
    loss = trainer.train().training_loss
    seconds = time.process_time() - started
    return {"cpu_s": seconds, "loss": loss, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        found = update(json.loads(Path(sys.argv[1]).read_text()), directory)
    sys.stdout.write("\n" + json.dumps(found) + "\n")
