"""What is known of one server of a run: what its backend said at its start, and what the checks asked it besides.

`server_diagnosis.py` fills it. The table of `check`, its `--json`, and the lines on what is unsafe read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import UNSET, UnsetType

from spot_async.checks.own_tokenizers import ResponsesRead
from spot_async.checks.questions import Explained, Noise
from spot_async.checks.score_rows import RowFindings
from spot_async.types import BehindUrl, Capabilities, LogprobTemperature

T = TypeVar("T")
Answer: TypeAlias = T | UnsetType | None  # UNSET: it was not asked for; None: asked for, and not found out

AS_SAID = (  # of `Capabilities`, by the same names in JSON
    *("server", "model", "vocab_size", "vocab_fingerprint", "exact_entropy", "candidate_logprobs", "token_id_prompts"),
    *("logprob_convention", "prefix_caching", "abort", "weight_update", "in_flight_updates", "weight_transport"),
)
PARTS = {  # of answers, by their names in JSON
    "behind": {"servers_behind_url": "servers"},
    "noise": {"noise_alone_nats": "alone", "noise_together_nats": "largest"},
    "rows": {"masked_share": "masked", "score_rows": "order"},
    "responses": {f"responses_{part}": part for part in ResponsesRead._fields},
    "own_prompts": {"first_token_logprob": "first", "other_tokens_logprob": "rest"},
    "students_prompts": {
        "first_token_logprob_students_prompt": "first",
        "other_tokens_logprob_students_prompt": "rest",
    },
    "disagreement": {"disagreement_nats": "nats", "disagreement_limit_nats": "limit_nats"},
}


@dataclass(frozen=True)
class Disagreement:
    """How far a server's own samples lie from their scores."""

    nats: float | None  # None: it sampled nothing
    limit_nats: float  # what rounding and noise make at most
    fault: str | None  # how they differ, if not by these


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What is known, each fact with its state: see `Answer`."""

    role: str
    backend: str  # its kind
    said: Capabilities
    scores: bool
    samples: bool
    # What the run needs, and how the server's model is beside the student's.
    context_tokens_needed: int
    score_top_k_needed: int
    vocab_rows_left_out: int  # of its softmax, which other models of the run lack
    vocab_as_students: bool
    end_tokens: str  # with their ids
    end_token_scores: Literal["replace", "sum"]  # how they stand for the student's
    end_tokens_as_students: bool
    chat_template_as_students: bool
    chat_template_used: bool  # it renders the training prompts
    # What was asked.
    behind: Answer[BehindUrl] = UNSET  # how many servers answer at its address
    noise: Answer[Noise] = UNSET  # between readings of a row: of scores, or of samples where it scores none
    rows: Answer[RowFindings] = UNSET  # whether its scores are of the rows that predict the tokens
    responses: Answer[ResponsesRead] = UNSET  # what a teacher with its own tokenizer knows of the student's
    own_prompts: Answer[Explained] = UNSET  # how likely the student's responses are behind the teacher's own prompts
    students_prompts: Answer[Explained] = UNSET  # and behind the student's
    score_temperature_probed: Answer[LogprobTemperature] = UNSET
    truncation_p_value: Answer[float] = UNSET  # of samples so near the top of their distributions, by chance
    generation_temperature_probed: Answer[LogprobTemperature] = UNSET
    seeds_probed: Answer[bool] = UNSET  # equal seeds give equal tokens
    disagreement: Answer[Disagreement] = UNSET
    round_trip_s: float | None = None
    servers_differ_nats: Answer[float] = UNSET  # the largest difference between the numbers of two servers of the role

    def as_tree(self) -> dict[str, Any]:
        """Return the facts for JSON: null is unknown, and what was not asked for is left out."""
        said = self.said
        tree = {name: getattr(said, name) for name in AS_SAID} | {
            "context_tokens": said.max_context_tokens,
            "score_top_k": said.max_top_k,
            "generation_top_k": said.max_generation_top_k,
            "position_top_k": said.max_position_top_k,
            "sampled_token_ids": said.sampled_token_ids if self.samples else None,
            "score_temperature": said.score_temperature if self.scores else None,
            "generation_temperature": said.generation_temperature if self.samples else None,
            "seeds": said.seeds if self.samples else None,
            "weights_checked": said.weights_checked if said.weight_update else None,
            "version": None if said.version is None else str(said.version),
        }
        for name, answer in vars(self).items():
            if answer is UNSET or name in ("said", "scores", "samples"):
                continue
            parts = PARTS.get(name)
            if parts is None:
                tree[name] = answer
            else:
                tree |= {key: None if answer is None else getattr(answer, of) for key, of in parts.items()}
        return tree


def known(answer: Answer[T]) -> T | None:
    """Return the answer, or None where there is none."""
    return None if answer is UNSET else answer
