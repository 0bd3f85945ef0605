"""Decides how a sample looks, in the terminal and on its page alike: each token's colour, label and mark. Pure.

At the end are the pages of a sample and of all of them. Text that a model wrote passes through `visible` first.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

import msgspec
from markupsafe import Markup

from spot_async.base.text import counted, visible
from spot_async.models.chunks import UNKNOWN
from spot_async.run_directory.samples import Branch, Candidate, SampleRecord, SampleRows
from spot_async.tools.pages.page import Links, filled

Palette = Literal["score", "advantage", "surprise"]
ADVANTAGE_FULL_NATS = 3.0  # from this difference on, the colour is full
SURPRISE_FULL_NATS = 5.0
ENTROPY_FULL_NATS = 2.0
PART_LABELS = {  # the method's symbols for `score_parts`; policies may record others
    "score": "score s",
    "entropy": "entropy H (share of log V)",
    "mass": "teacher mass C",
    "coverage": "student mass A",
    "divergence": "JS",
    "gap": "gap G",
}
PARTS_LEGEND = (
    "s = H C G, of which policy.score_variant may leave out factors. H: the teacher's entropy as a share of log V. "
    "C and A: what teacher and student give to the teacher's top candidates together. JS: how differently they share "
    "it among these, 0 to 1. G: weighted mean of 1 - A and JS, the student's distance from the teacher."
)
VALUE_LEGEND = "Value: mean reward of the candidate's probes, 1 where all end correct."
SHUFFLED_LEGEND = "Targets are tilted by values that the candidates traded at random (policy.shuffle_outcomes)."
BASELINE_LEGEND = "What is taught is the target less a share of the prior (policy.baseline)."
PerToken = Literal["acquisition_score", "behavior_logprobs", "teacher_logprobs", "teacher_entropy_nats"]
PER_TOKEN: tuple[PerToken, ...] = get_args(PerToken)


@dataclass(frozen=True)
class PolicySettings:
    """The settings of a policy that decide what is said about its positions."""

    selection: str = "score"  # how it chose them
    guided: bool = True  # whether each was probed, and its target tilted by the outcomes
    gated: bool = True  # whether only those are kept where some probe is correct
    shuffled: bool = False  # whether candidates trade their values before the tilt
    probes: int = 1  # of each candidate
    baseline: float = 0.0  # share of the prior that is taken off the target

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> PolicySettings:
        settings = config.get("policy") or {}
        return cls(
            str(settings.get("selection", "score")),
            guided=bool(settings.get("verifier_guidance", True)),
            gated=bool(settings.get("gate", True)),
            shuffled=bool(settings.get("shuffle_outcomes", False)),
            probes=int(settings.get("probes") or 1),
            baseline=float(settings.get("baseline") or 0.0),
        )

    @property
    def chosen(self) -> str:
        """What happened to the selected positions, in a word."""
        return "probed" if self.guided else "selected"


GUIDED = PolicySettings()
ENVIRONMENT = "environment"  # who wrote what was only read


@dataclass(frozen=True)
class TokenView:
    """One token of a response."""

    position: int
    text: str
    level: float  # strength of the colour, -1 to 1; the sign matters in diverging palettes
    label: str  # the numbers behind it
    mark: int | None = None  # number of the branch that probes it, from 1
    is_framed: bool = False  # whether the method chose it
    is_read: bool = False  # whether an environment wrote it
    is_of_killed: bool = False  # whether it did so to a turn that it had to kill


@dataclass(frozen=True)
class Colouring:
    """A response that is coloured by one quantity."""

    palette: Palette
    title: str
    low: str  # what the lower end of the scale stands for
    high: str
    tokens: tuple[TokenView, ...]


def per_token(sample: SampleRecord, name: PerToken) -> list[float | None] | None:
    """Return one number per token of the response, (T,); None if there are none, or not as many as tokens."""
    numbers: list[float | None] | None = getattr(sample, name)
    return numbers if numbers is not None and len(numbers) == len(sample.response_ids) else None


def colourings(sample: SampleRecord, texts: Sequence[str], policy: PolicySettings = GUIDED) -> list[Colouring]:
    """Return every way in which this sample can be coloured. The one that its policy is about comes first."""
    length = len(sample.response_ids)
    marks = {branch.position: number for number, branch in enumerate(sample.branches, start=1)}
    gated = frozenset(sample.gated_positions)
    killed = {turn for turn, kind, _ in sample.failed_turns if kind == "killed"}
    answers = [range(max(start, 0), min(end, length)) for start, end, who in sample.writers if who == ENVIRONMENT]
    read = {t: turn in killed for turn, places in enumerate(answers, 1) for t in places}
    name = "entropy share" if policy.selection == "entropy" else "score"
    labels = [token_label(sample, position, texts[position], name) for position in range(length)]

    def tokens(levels: Sequence[float]) -> tuple[TokenView, ...]:
        return tuple(
            TokenView(
                *(t, visible(texts[t]), levels[t], labels[t], marks.get(t), t in marks or t in gated),
                is_read=t in read,
                is_of_killed=read.get(t, False),
            )
            for t in range(length)
        )

    def ramp(title: str, values: Sequence[float | None] | None, full: float) -> None:
        """Add a colouring from 0 to `full`, if there are values."""
        if values is not None:
            levels = [max(0.0, min(1.0, (value or 0.0) / full)) for value in values]
            found.append(Colouring("surprise", title, "0", f"{abs(full):g} or more", tokens(levels)))

    found: list[Colouring] = []
    scores, student, teacher, entropy = (per_token(sample, name) for name in PER_TOKEN)
    highest = max((score for score in scores or () if score is not None), default=0.0)
    if scores is not None and highest > 0:
        # Scores spread over orders of magnitude. The square root keeps the middle ones visible.
        levels = [max(0.0, (score or 0.0) / highest) ** 0.5 for score in scores]
        title = f"Score of {visible(policy.selection)}" if ":" in policy.selection else "Acquisition score"
        if policy.selection == "entropy":
            title = "Teacher entropy, as a share of the largest possible"
        found.append(Colouring("score", f"{title} (root scale)", "0", f"{highest:.3g}", tokens(levels)))
    if teacher is not None and student is not None:
        advantages = [difference(sample, position) or 0.0 for position in range(length)]
        levels = [max(-1.0, min(1.0, advantage / ADVANTAGE_FULL_NATS)) for advantage in advantages]
        title = "Advantage: teacher minus student log-probability, nats"
        ends = f"−{ADVANTAGE_FULL_NATS:g} or less", f"+{ADVANTAGE_FULL_NATS:g} or more"
        found.append(Colouring("advantage", title, *ends, tokens(levels)))
    else:
        for who, logprobs in (("student that sampled", student), ("teacher", teacher)):
            ramp(f"Surprise: negative log-probability under the {who}, nats", logprobs, -SURPRISE_FULL_NATS)
    ramp("Teacher entropy, nats", entropy if student is None else None, ENTROPY_FULL_NATS)
    return found or [Colouring("surprise", "Nothing recorded per token", "", "", tokens([0.0] * length))]


def remarks(sample: SampleRecord) -> list[str]:
    """Return remarks about the whole response."""
    tokens = len(sample.response_ids)
    found = [f"iteration {sample.iteration}" + (f", weights {visible(sample.version)}" if sample.version else "")]
    recorded = counted(tokens, "token") if tokens else "no tokens recorded (response_ids)"
    found.append(recorded + (f", ended by {visible(sample.finish_reason)}" if sample.finish_reason else ""))
    for name in PER_TOKEN:
        numbers = getattr(sample, name)
        if numbers is not None and len(numbers) != tokens:
            found.append(f"{name} not shown: {len(numbers)} values for {tokens} tokens")
    if sample.writers:
        found.append(f"written by {', '.join(f'{who} {places}' for who, places in _writers(sample).items())}")
    if sample.turns:
        found.append(f"{counted(len(sample.turns), 'turn')}, ended by {visible(sample.ended)}")
    if sample.teacher:
        found.append(f"taught by {visible(sample.teacher)}")
    if sample.advantage is not None:
        found.append(f"advantage {sample.advantage:+.3f}{group_words(sample)}")
    if sample.reward is not None and not (sample.advantage is not None and group_words(sample)):
        found.append(f"reward {sample.reward:g}")
    if sample.left_out is not None:
        found.append(f"not trained: {visible(sample.left_out)}")
    return found


def _writers(sample: SampleRecord) -> dict[str, str]:
    """Return which tokens each wrote."""
    found: dict[str, list[str]] = {}
    for start, end, version in sample.writers:
        found.setdefault(_writer(version), []).append(f"{start}–{end - 1}" if end > start + 1 else str(start))
    return {who: f"({' '.join(places)})" for who, places in found.items()}


def _writer(version: str | None) -> str:
    if version == ENVIRONMENT:
        return "the environment"
    return "others" if version is None else f"weights {visible(version)}"


def group_words(sample: SampleRecord) -> str:
    """Return the rewards that the advantage comes from: this response's and its group's; empty if none were written."""
    known = [reward for reward in sample.group_rewards or () if reward is not None]
    if sample.reward is None or not known:
        return ""
    spread = f", standard deviation {statistics.stdev(known):.3g}" if len(known) > 1 else ""
    rewards = " ".join("none" if reward is None else f"{reward:g}" for reward in sample.group_rewards or ())
    return f" from reward {sample.reward:g}: the group's are {rewards} (mean {statistics.fmean(known):.3g}{spread})"


def framed_words(sample: SampleRecord, framed: str, policy: PolicySettings = GUIDED) -> str:
    """Return what it means that tokens are `framed` (the terminal's or the page's word for it); empty if none is."""
    if sample.branches:
        return f"{framed} and numbered: the positions that were {policy.chosen}."
    if sample.gated_positions:
        return f"{framed}: the positions whose gate was open, the teacher's entropy being above policy.tau_nats."
    return ""


def branch_state(branch: Branch) -> tuple[str, str]:
    """Return what came of a probed position in words, and the verdict whose colour it has."""
    doubt = "" if branch.certain else " (chosen by midpoints, not certain)"
    if branch.retained:
        return f"kept for training{doubt}", "correct"
    if any(candidate.value is None for candidate in branch.candidates):
        return f"left out: a candidate has no evidence{doubt}", "timeout"
    return f"left out: nothing correct here{doubt}", "quiet"


def candidate_name(candidate: Candidate) -> str:
    """Return a candidate's text, or its id if it has none."""
    return f"“{visible(candidate.token)}”" if candidate.token else f"token {candidate.token_id}"


def token_label(sample: SampleRecord, position: int, text: str, score_name: str = "score") -> str:
    """Return all numbers of one token, in words."""
    parts = [f"position {position}", f"“{visible(text)}”"]
    parts += [f"written by {_writer(version)}" for start, end, version in sample.writers if start <= position < end]
    arrays = (per_token(sample, name) for name in PER_TOKEN)
    score, student, teacher, entropy = (None if array is None else array[position] for array in arrays)
    if per_token(sample, "acquisition_score") is not None:
        parts.append("masked" if score is None else f"{score_name} {score:.4g}")
    if student is not None:
        parts.append(f"log student {student:.3f}")
    if teacher is not None:
        parts.append(f"log teacher {teacher:.3f}")
    if (advantage := difference(sample, position)) is not None:
        first, last = chunk_at(sample, position)
        parts.append(f"advantage {advantage:+.3f}" + (f" of tokens {first} to {last} together" if last > first else ""))
    if position in sample.gated_positions:
        parts.append("gate open")
    if entropy is not None:
        parts.append(f"teacher entropy {entropy:.3f} nats")
    return " · ".join(parts)


def chunk_at(sample: SampleRecord, position: int) -> tuple[int, int]:
    """Return the first and the last token of a position's chunk, of which the teacher knows only the sum."""
    chunks = sample.teacher_chunks or ()
    if len(chunks) != len(sample.response_ids) or chunks[position] == UNKNOWN:
        return position, position
    first = chunks.index(chunks[position])
    return first, first + chunks.count(chunks[position]) - 1


def difference(sample: SampleRecord, position: int) -> float | None:
    """Return teacher minus student at a token, or over its chunk; None if one of them is unknown."""
    teacher, student = per_token(sample, "teacher_logprobs"), per_token(sample, "behavior_logprobs")
    if teacher is None or student is None:
        return None
    first, last = chunk_at(sample, position)
    pairs = [*zip(teacher[first : last + 1], student[first : last + 1], strict=True)]
    known = [t - s for t, s in pairs if t is not None and s is not None]
    return sum(known) if len(known) == len(pairs) else None


def shortened(text: str, head: int = 160, tail: int = 240) -> str:
    """Return the beginning and the end of a long text, since the answer stands at the end."""
    if len(text) <= head + tail:
        return text
    return f"{text[:head]} … ({len(text) - head - tail} characters) … {text[-tail:]}"


def sampled_shares(sample: SampleRecord, position: int) -> str:
    """Return the sampled token's probabilities by teacher and student in words; empty if they were not recorded."""
    teacher, student = per_token(sample, "teacher_logprobs"), per_token(sample, "behavior_logprobs")
    if teacher is None or student is None or not 0 <= position < len(teacher):
        return ""
    shares = (None if each is None else math.exp(each) for each in (teacher[position], student[position]))
    return "sampled token: teacher {}, student {}".format(*map(probability, shares))


def score_parts(branch: Branch) -> list[str]:
    """Return the parts of a position's score, each with its name."""
    return [
        f"{PART_LABELS.get(name) or visible(name)} {'–' if value is None else format(value, '.3g')}"
        for name, value in branch.score_parts.items()
    ]


def branch_legend(sample: SampleRecord, policy: PolicySettings = GUIDED) -> str:
    """Return what the numbers of this sample's branches mean; empty if it has none."""
    scored = any(branch.score_parts.keys() & PART_LABELS for branch in sample.branches)
    valued = policy.guided and bool(sample.branches)
    parts = [PARTS_LEGEND] * scored + [VALUE_LEGEND] * valued + [SHUFFLED_LEGEND] * (valued and policy.shuffled)
    return " ".join(parts + [BASELINE_LEGEND] * (valued and policy.baseline > 0))


def is_sampled(sample: SampleRecord, branch: Branch, candidate: Candidate) -> bool:
    """Whether the candidate is the token that the student sampled.

    Ids are compared, since two tokens that are parts of a character may have the same text.
    """
    position, ids = branch.position, sample.response_ids
    return 0 <= position < len(ids) and ids[position] == candidate.token_id


def probability(value: float | None) -> str:
    """Return a probability in percent, with about two digits."""
    if value is None:
        return "–"
    if value < 1e-4:
        return "<0.01 %"
    return f"{100 * value:.2g} %" if value < 0.095 else f"{100 * value:.0f} %"


VERDICT_SYMBOLS = {"correct": "✓", "wrong": "✗", "no_answer": "∅", "timeout": "⧖", "error": "!", "unjudged": "·"}


def verdict_tone(verdict: str) -> str:
    """Return the style of a verdict, which has the verdict's name."""
    return verdict if verdict in VERDICT_SYMBOLS else "quiet"


def verdict_text(verdict: str) -> str:
    """Return a verdict as a symbol and a word, so that colour is never the only sign."""
    return f"{VERDICT_SYMBOLS.get(verdict, '?')} {verdict.replace('_', ' ')}"


LONG_TEXT = 600  # a probe with more characters is folded


def sample_page(
    number: int,
    sample: SampleRecord,
    found: Sequence[Colouring],
    policy: PolicySettings = GUIDED,
    links: Links = (),
) -> str:
    """Return the page of one rollout: problem, response in every colouring, branches.

    `links` lead to other pages: words and address.
    """
    return filled(
        "sample.html",
        view=sys.modules[__name__],
        number=number,
        sample=sample,
        colourings=found,
        policy=policy,
        links=links,
        long_text=LONG_TEXT,
    )


HEADINGS = ("sample", "iteration", "problem", "verdict", "tokens", "highest score", "positions", "retained")


def samples_page(
    name: str, samples: SampleRows, linked: Sequence[int], what: str, folder: str = "", links: Links = ()
) -> str:
    """Return the page of all samples of the run `name`, with `links` to others.

    Those that are `linked` have pages, behind the address `folder`; `what` says which they are.
    The rows are data in the page, of which its script shows those that match. Its policy allows that script alone.
    """
    rows = (  # each is encoded by itself, since all of them as objects would be the largest part of a report's memory
        (number, each.iteration, visible(each.problem_id), *msgspec.structs.astuple(each)[3:])  # from the verdict on
        for number, each in enumerate(samples)
    )
    encoded = msgspec.Raw(b"[%b]" % b",".join(map(msgspec.json.encode, rows)))
    data = msgspec.json.encode({"rows": encoded, "pages": list(linked), "folder": folder}).decode()
    script = files("spot_async.tools.pages").joinpath("html/samples.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return filled(
        "samples.html",
        name=visible(name),
        count=len(samples),
        headings=HEADINGS,
        linked=what,
        links=links,
        data=Markup(data.replace("<", "\\u003c")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )
