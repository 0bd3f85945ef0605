"""What a sample looks like, apart from where it is shown: each token's colour, label and mark. Pure.

The terminal and the page draw the same views. Text that a model wrote passes through `visible` first.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spot_async.inspection.reading import Branch, SampleRecord

Palette = Literal["score", "advantage", "surprise"]
ADVANTAGE_FULL_NATS = 3.0  # differences beyond have full colour
SURPRISE_FULL_NATS = 5.0


@dataclass(frozen=True)
class TokenView:
    """One token of a response."""

    position: int
    text: str
    level: float  # -1 to 1: strength of the colour, its sign in diverging palettes
    label: str  # the numbers behind it
    mark: int | None = None  # number of the branch that probes it, from 1


@dataclass(frozen=True)
class Colouring:
    """A response coloured by one quantity."""

    palette: Palette
    title: str
    low: str  # what the ends of the scale stand for
    high: str
    tokens: tuple[TokenView, ...]


def colourings(sample: SampleRecord, texts: Sequence[str]) -> list[Colouring]:
    """Every way this sample can be coloured, the one its policy is about first."""
    length = len(sample.response_ids)
    marks = {branch.position: number for number, branch in enumerate(sample.branches, start=1)}
    labels = [token_label(sample, position, texts[position]) for position in range(length)]

    def tokens(levels: Sequence[float]) -> tuple[TokenView, ...]:
        return tuple(TokenView(t, visible(texts[t]), levels[t], labels[t], marks.get(t)) for t in range(length))

    found: list[Colouring] = []
    scores = sample.acquisition_score
    if scores is not None and any(scores):
        highest = max(score for score in scores if score is not None)
        # Scores spread over orders of magnitude; the root keeps the middle ones visible.
        levels = [((score or 0.0) / highest) ** 0.5 for score in scores]
        found.append(Colouring("score", "Acquisition score (root scale)", "0", f"{highest:.3g}", tokens(levels)))
    if sample.teacher_logprobs is not None and sample.behavior_logprobs is not None:
        advantages = [t - b for t, b in zip(sample.teacher_logprobs, sample.behavior_logprobs, strict=True)]
        levels = [max(-1.0, min(1.0, advantage / ADVANTAGE_FULL_NATS)) for advantage in advantages]
        title = "Advantage: teacher minus student log-probability, nats"
        ends = f"−{ADVANTAGE_FULL_NATS:g} or less", f"+{ADVANTAGE_FULL_NATS:g} or more"
        found.append(Colouring("advantage", title, *ends, tokens(levels)))
    elif sample.behavior_logprobs is not None:
        levels = [min(1.0, -logprob / SURPRISE_FULL_NATS) for logprob in sample.behavior_logprobs]
        title = "Surprise: negative log-probability under the student that sampled, nats"
        found.append(Colouring("surprise", title, "0", f"{SURPRISE_FULL_NATS:g} or more", tokens(levels)))
    return found or [Colouring("surprise", "Nothing recorded per token", "", "", tokens([0.0] * length))]


def remarks(sample: SampleRecord) -> list[str]:
    """What concerns the whole response."""
    found = [f"iteration {sample.iteration}, weights {visible(sample.version)}"]
    found.append(f"{len(sample.response_ids)} tokens, ended by {visible(sample.finish_reason)}")
    if sample.advantage is not None:
        found.append(f"advantage {sample.advantage:+.3f}")
    if sample.left_out is not None:
        found.append(f"not trained: {visible(sample.left_out)}")
    return found


def branch_state(branch: Branch) -> tuple[str, str]:
    """What became of a probed position, in words, and the verdict whose colour it has."""
    if branch.retained:
        return "kept for training", "correct"
    if any(candidate.value is None for candidate in branch.candidates):
        return "left out: a candidate has no evidence", "timeout"
    return "left out: nothing correct here", "quiet"


def token_label(sample: SampleRecord, position: int, text: str) -> str:
    """All numbers of one token, in words."""
    parts = [f"position {position}", f"“{visible(text)}”"]
    scores, student, teacher = sample.acquisition_score, sample.behavior_logprobs, sample.teacher_logprobs
    if scores is not None:
        score = scores[position]
        parts.append("masked" if score is None else f"score {score:.4g}")
    if student is not None:
        parts.append(f"log student {student[position]:.3f}")
    if teacher is not None:
        parts.append(f"log teacher {teacher[position]:.3f}")
    if student is not None and teacher is not None:
        parts.append(f"advantage {teacher[position] - student[position]:+.3f}")
    if position in sample.gated_positions:
        parts.append("gate open")
    if sample.teacher_entropy_nats is not None:
        parts.append(f"teacher entropy {sample.teacher_entropy_nats[position]:.3f} nats")
    return " · ".join(parts)


def visible(text: str) -> str:
    """Text whose every character shows: control and direction characters become symbols.

    A terminal obeys escape sequences and a browser obeys direction overrides, whoever wrote them.
    """
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    category = unicodedata.category(character)
    if category == "Cc":
        return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "�"
    if category in ("Cf", "Cs", "Zl", "Zp") and character != "\u200d":  # the joiner makes emoji, and harms nobody
        return "�"
    return character


def shortened(text: str, head: int = 160, tail: int = 240) -> str:
    """Beginning and end of a long text: the answer stands at the end."""
    if len(text) <= head + tail:
        return text
    return f"{text[:head]} … ({len(text) - head - tail} characters) … {text[-tail:]}"


def sampled_shares(sample: SampleRecord, position: int) -> str:
    """What teacher and student gave the sampled token of a position, in words; empty when it was not recorded."""
    if sample.behavior_logprobs is None or sample.teacher_logprobs is None:
        return ""
    teacher, student = (math.exp(each[position]) for each in (sample.teacher_logprobs, sample.behavior_logprobs))
    return f"sampled token: teacher {probability(teacher)}, student {probability(student)}"


def probability(value: float | None) -> str:
    """Percent with about two digits."""
    if value is None:
        return "–"
    if value < 1e-4:
        return "<0.01 %"
    return f"{100 * value:.2g} %" if value < 0.095 else f"{100 * value:.0f} %"


VERDICT_SYMBOLS = {"correct": "✓", "wrong": "✗", "no_answer": "∅", "timeout": "⧖", "error": "!"}


def verdict_tone(verdict: str) -> str:
    """The style of a verdict: its own name, if it is one."""
    return verdict if verdict in VERDICT_SYMBOLS else "quiet"


def verdict_text(verdict: str) -> str:
    """A symbol and a word: colour is never the only sign."""
    return f"{VERDICT_SYMBOLS.get(verdict, '?')} {verdict.replace('_', ' ')}"
