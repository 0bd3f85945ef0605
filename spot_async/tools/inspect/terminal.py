"""Draws samples in the terminal: the table of a run's samples, and one rollout with its branches."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spot_async.base.text import visible
from spot_async.run_directory.samples import Branch, Candidate, SampleRecord, SampleSummary
from spot_async.telemetry.screen import number_table
from spot_async.tools.inspect.view import (
    GUIDED,
    Colouring,
    PolicySettings,
    branch_legend,
    branch_state,
    candidate_name,
    framed_words,
    is_sampled,
    probability,
    remarks,
    sampled_shares,
    score_parts,
    shortened,
    verdict_text,
)

BAR_WIDTH = 10
STATE_STYLES = {"correct": "green", "timeout": "yellow", "quiet": "dim"}
VERDICT_STYLES = {"correct": "green", "wrong": "red"}
# Ends of the palettes in RGB. White or black text is legible on them, and the colour-blind can tell them apart.
HOT, GOOD, BAD = (217, 95, 2), (33, 113, 181), (203, 75, 22)
WEAK = 0.08  # levels below this get no colour


def samples_table(rows: Sequence[tuple[int, SampleSummary]], title: str) -> Table:
    """Return a table with one line per sample.

    Retained positions are those of B+ (section 3.3). Policies without branches have no positions.
    """
    has_branches = any(row.branches for _, row in rows)
    headings = ("sample", "iteration", "problem", "verdict", "tokens", *(("positions", "retained") * has_branches))
    table = number_table(*headings, title=title)
    for number, row in rows:
        positions = (
            " ".join(str(branch.position) for branch in row.branches),
            " ".join(str(branch.position) for branch in row.branches if branch.retained),
        )
        table.add_row(
            str(number),
            str(row.iteration),
            Text(visible(row.problem_id)),
            _verdict(row.verdict),
            f"{len(row.response_ids) or '–'}{' cut' if row.finish_reason == 'length' else ''}",
            *(positions if has_branches else ()),
        )
    return table


def sample_view(
    number: int, sample: SampleRecord, colouring: Colouring, policy: PolicySettings = GUIDED
) -> RenderableType:
    """Return a whole sample: problem, coloured response, branches."""
    head = Text.assemble((f"sample {number}", "bold"), f" · {visible(sample.problem_id)}")
    if sample.tier:
        head.append(f" ({visible(sample.tier)})")
    head.append(" · ").append(_verdict(sample.verdict))
    about = Text(" · ".join(remarks(sample)), style="dim")
    problem = Text.assemble(("problem  ", "dim"), visible(sample.problem))
    answer = Text.assemble(("answer   ", "dim"), visible(sample.answer))
    read = [Text.assemble(("teacher read ", "dim"), visible(sample.teacher_prompt))] if sample.teacher_prompt else []
    feedback = [Text.assemble(("feedback ", "dim"), visible(sample.feedback))] if sample.feedback else []
    parts: list[RenderableType] = [head, about, problem, answer, *read, *feedback, Text()]
    if sample.response_ids:
        parts += [legend(colouring), response_text(colouring)]
        if framed := framed_words(sample, "Underlined", policy):
            parts.append(Text(framed, style="dim"))
    elif sample.response:
        parts.append(Text(visible(sample.response)))
    for mark, branch in enumerate(sample.branches, start=1):
        parts += [Text(), branch_view(mark, branch, sample, policy)]
    if legend_of_branches := branch_legend(sample, policy):
        parts += [Text(), Text(legend_of_branches, style="dim")]
    return Group(*parts)


def legend(colouring: Colouring) -> Text:
    text = Text(f"{colouring.title}  ", style="dim")
    levels = (-1.0, -0.5, 0.5, 1.0) if colouring.palette == "advantage" else (0.25, 0.5, 0.75, 1.0)
    text.append(f"{colouring.low} ")
    for level in levels:
        text.append("  ", style=_style(colouring, level))
    return text.append(f" {colouring.high}")


def response_text(colouring: Colouring) -> Text:
    """Return the response's tokens on their colours, with the chosen ones underlined and the probed ones numbered.

    Each turn, and what an environment answered to it, begins a line.
    """
    text, was_read = Text(), False
    for token in colouring.tokens:
        style = _style(colouring, token.level)
        if token.is_read:
            style = "red" if token.is_of_killed else "dim"
        if token.is_read != was_read:
            text.append("\n")
        was_read = token.is_read
        text.append(token.text, style=f"bold underline {style}".strip() if token.is_framed else style)
        if token.mark is not None:
            text.append(mark_symbol(token.mark), style="bold")
    return text


def mark_symbol(mark: int) -> str:
    return chr(0x2460 + mark - 1) if mark <= 20 else f"({mark})"


def branch_view(mark: int, branch: Branch, sample: SampleRecord, policy: PolicySettings) -> RenderableType:
    """Return one chosen position: each candidate's probabilities, target before and after the tilt, and probes."""
    shares = sampled_shares(sample, branch.position)
    state, tone = branch_state(branch)
    head = Text.assemble(
        (f"{mark_symbol(mark)} position {branch.position}", "bold"),
        f", sampled “{visible(branch.sampled)}”: ",
        (state, STATE_STYLES[tone]),
    )
    rows: list[RenderableType] = [head, Text(f"  {shares}", style="dim")] if shares else [head]
    if branch.score_parts:
        rows.append(Text("  " + ", ".join(score_parts(branch)), style="dim"))
    return Group(*rows, candidates_table(branch, sample, policy), *probe_lines(branch))


def candidates_table(branch: Branch, sample: SampleRecord, policy: PolicySettings) -> Table:
    """Return a table of each candidate's probabilities by teacher and student, mean reward, and target.

    The target is shown before and after the tilt. Without probes there is neither a reward nor a tilt.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    probed = ("value", "target before", "after") if policy.guided else ("target",)
    for heading in ("", "candidate", "teacher", "student", *probed):
        table.add_column(heading, justify="right" if heading in ("teacher", "student", "value") else "left")
    for candidate in branch.candidates:
        value = "–" if candidate.value is None else f"{candidate.value:g}"
        prior = "–" if candidate.prior is None else Text(bar(candidate.prior, "░"), style="dim")
        table.add_row(
            "▸" if is_sampled(sample, branch, candidate) else "",
            _name(candidate),
            probability(candidate.teacher),
            probability(candidate.student),
            *((value, prior) if policy.guided else ()),
            "–" if candidate.target is None else Text(bar(candidate.target, "█")),
        )
    return table


def probe_lines(branch: Branch) -> list[Text]:
    """Return what the student wrote after each candidate, and the verdict on it."""
    return [
        Text.assemble("   ", _name(candidate), " ", _verdict(verdict), "  ", shortened(visible(text)))
        for candidate in branch.candidates
        for verdict, text in zip(candidate.verdicts, candidate.continuations, strict=False)
    ]


def _name(candidate: Candidate) -> Text:
    return Text(candidate_name(candidate), style="bold")


def bar(share: float, symbol: str) -> str:
    """Return a share in numbers and as a bar, which has at least a sliver for any share above 0."""
    cells = round(share * BAR_WIDTH)
    return f"{probability(share):>8} {symbol * cells if cells else '▏'}"


def _verdict(verdict: str) -> Text:
    return Text(visible(verdict_text(verdict)), style=VERDICT_STYLES.get(verdict, "yellow"))


def _style(colouring: Colouring, level: float) -> str:
    """Return a tint between white and the palette's end, so that black letters stay legible on any terminal."""
    if abs(level) < WEAK:
        return ""
    end = HOT if colouring.palette != "advantage" else (GOOD if level > 0 else BAD)
    red, green, blue = (round(255 + (channel - 255) * abs(level)) for channel in end)
    return f"{'white' if abs(level) > 0.75 else 'black'} on #{red:02x}{green:02x}{blue:02x}"
