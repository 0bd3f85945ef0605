"""Warns about a run's prompts, answers and tokenizers, from files alone.

What only a server can show is `diagnosis.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from spot_async.base.text import counted
from spot_async.checks.plan import TrainPlan
from spot_async.data.prompts import DATE_WARNING
from spot_async.evaluation.benchmarks import Benchmark
from spot_async.models.vocabulary import Vocabulary
from spot_async.types import IntArray

PROMPTS_READ = 64
UNKNOWN_SHARE = 0.5


def plan_warnings(plan: TrainPlan) -> list[str]:
    """Return the warnings about prompts and tokenizers of a run, which need no server."""
    prompts = [prompt.token_ids for prompt in islice(plan.schedule, PROMPTS_READ)]
    return [
        *([DATE_WARNING] if plan.reads_clock else []),
        *plan.doubts,
        *_unknown_tokens("data.train", (plan.teacher or plan.student).vocabulary, prompts),
        *_of_benchmarks(plan.evaluation, plan.student.vocabulary),
        *_seen_in_training(plan),
    ]


def evaluation_warnings(benchmarks: Sequence[Benchmark], vocabulary: Vocabulary) -> list[str]:
    """Return the warnings about prompts and tokenizers of a stand-alone evaluation, which need no server."""
    dated = [DATE_WARNING] if any(benchmark.reads_clock for benchmark in benchmarks) else []
    return dated + _of_benchmarks(benchmarks, vocabulary)


def _of_benchmarks(benchmarks: Sequence[Benchmark], vocabulary: Vocabulary) -> list[str]:
    warnings = []
    for benchmark in benchmarks:
        prompts = [source.token_ids for source in benchmark.sources[:PROMPTS_READ]]
        warnings += _unknown_tokens(benchmark.key, vocabulary, prompts)
        warnings += benchmark.doubts
        warnings += [benchmark.warning] if benchmark.warning is not None else []
    return warnings


def _seen_in_training(plan: TrainPlan) -> list[str]:
    """Return a line for each set of held-out problems of which some are trained on."""
    return [
        f"{benchmark.key}: {seen} of {counted(len(benchmark.problems), 'problem')} are in data.train too, word for "
        "word: figures on them say nothing about new problems; take them out of one of the two"
        for benchmark in plan.evaluation
        if (seen := plan.seen.get(benchmark.key, 0))
    ]


def _unknown_tokens(key: str, vocabulary: Vocabulary, prompts: Sequence[IntArray]) -> list[str]:
    """Return a line about the prompts of `key` if much of their text is unknown to the tokenizer."""
    share = unknown_share(vocabulary, prompts)
    if share <= UNKNOWN_SHARE:
        return []
    return [
        f"{key}: {share:.0%} of the prompts' tokens are the tokenizer's token for what it does not know "
        f"({vocabulary.tokenizer.unk_token}): no model can read them; the problems, or the models, are the wrong ones"
    ]


def unknown_share(vocabulary: Vocabulary, prompts: Sequence[IntArray]) -> float:
    """Return the share of the prompts' tokens that stand for text unknown to the tokenizer, without special tokens."""
    unknown = vocabulary.tokenizer.unk_token_id
    if unknown is None:
        return 0.0
    tokens = np.concatenate(prompts)
    special = {*vocabulary.tokenizer.all_special_ids, *vocabulary.tokenizer.added_tokens_decoder} - {unknown}
    ordinary = tokens[~np.isin(tokens, list(special))]
    return float((ordinary == unknown).mean()) if len(ordinary) else 0.0
