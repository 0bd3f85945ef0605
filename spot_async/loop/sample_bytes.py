"""Counts the memory of supervision: what to reserve as a prompt starts, and what it holds at its end. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import NoneType

import msgspec
import numpy as np

from spot_async.types import PolicyNeeds, Sample

# Per response token: an int32 id, float32 log-probabilities of behaviour and teacher, the teacher's weight if some are
# masked and its chunk if it has its own tokenizer, a float32 log-probability of the reference or an advantage, and a
# mask. Further pulls count as terms.
BYTES_PER_RESPONSE_TOKEN = 6 * 4 + 1
# Per response token of a record: float32 entropy, score and gap, and the teacher's log-probability once more if a mask
# hides some. The record shares its other arrays with the supervision.
BYTES_PER_RECORD_TOKEN = 4 * 4
BYTES_PER_TEACHER_TOKEN = 6 * 4  # likewise of each teacher but the first: its pull with all its parts, and its record
BYTES_PER_TEXT_TOKEN = 8  # of plain text; a text with characters outside of Latin-1 may take several times that
PLAIN = frozenset({str, float, int, bool, NoneType})
BYTES_PER_SAMPLE = 8192  # the problem's text, names, versions, array headers, metrics, the record's plain values


def worst_case_bytes(
    prompt_tokens: int, max_response_tokens: int, needs: PolicyNeeds, *, teacher_prompt_tokens: int = 0
) -> int:
    """Return the bytes to reserve for one prompt: its trajectories' supervision and records, at their longest.

    A prompt of the teacher's own is in the record, as text. Only texts can be larger, since nothing bounds the
    characters of a token or of a verifier's feedback. `held_bytes` counts what they really take.
    """
    read = max(teacher_prompt_tokens, needs.teacher_prompt_tokens)
    texts = BYTES_PER_TEXT_TOKEN * ((1 + needs.probes_per_prompt) * max_response_tokens + read)
    record = BYTES_PER_RECORD_TOKEN * max_response_tokens + needs.record_bytes + texts + BYTES_PER_SAMPLE
    return int(payload_bytes(prompt_tokens, max_response_tokens, needs)) + needs.samples_per_prompt * record


def payload_bytes(prompt_tokens: float, response_tokens: float, needs: PolicyNeeds) -> float:
    """Return the most bytes of one prompt's supervision, which the trainer is sent."""
    per_token = BYTES_PER_RESPONSE_TOKEN + needs.term_bytes_per_token
    per_token += BYTES_PER_TEACHER_TOKEN * max(0, len(needs.teachers) - 1)
    trajectory = 4 * prompt_tokens + per_token * response_tokens + needs.term_bytes
    return needs.samples_per_prompt * trajectory


def held_bytes(samples: Sequence[Sample]) -> int:
    """Return the bytes that samples take. What they share is counted once.

    A view counts as all of the memory that it keeps alive. Keys of dictionaries are not counted, since all samples
    share them.
    """
    held: dict[int, object] = {}
    left: list[object] = [samples]
    while left:
        value = left.pop()
        if id(value) in held:
            continue
        held[id(value)] = value
        if type(value) in PLAIN:  # most values
            continue
        match value:
            case dict():
                left += value.values()
            case list() | tuple():
                left += value
            case np.ndarray(base=of) | memoryview(obj=of):
                left.append(of)
            case msgspec.Struct():
                left += [getattr(value, name) for name in value.__struct_fields__]
    return sum(map(sys.getsizeof, held.values()))
