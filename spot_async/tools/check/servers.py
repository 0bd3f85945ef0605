"""Starts or attaches a run's servers, asks them what the run depends on, and shows what they said as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from msgspec import UNSET
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.checks.diagnosis import Diagnosis
from spot_async.checks.plan import TrainPlan
from spot_async.checks.score_rows import RIGHT
from spot_async.checks.server_diagnosis import UNLIKELY
from spot_async.checks.server_facts import Answer, ServerFacts, known
from spot_async.config import Config
from spot_async.running.assembly import make_environments, make_spending, make_verifier
from spot_async.running.measuring import open_verifiers
from spot_async.running.services import Companions, StartListener, open_services
from spot_async.telemetry.bottleneck import percent
from spot_async.tools.check.episodes import PlayedEpisodes, play_episodes
from spot_async.tools.check.slope import Slope, measure_slope
from spot_async.tools.check.view import show_warnings
from spot_async.types import LogprobTemperature

T = TypeVar("T")


async def examine(
    config: Config,
    plan: TrainPlan,
    directory: Path,
    diagnosed: Callable[[Diagnosis], None],
    played: Callable[[PlayedEpisodes], None] = lambda found: None,
    problems: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Slope | None:
    """Open everything but the trainer, ask, and close it again. Logs go under `directory`.

    `diagnosed` gets what was found, and `played` what episodes showed. With `problems` return what so many say of the
    teacher, for which servers are opened as for training: unsafe ones are refused (ConfigError). `tell` gets how far
    that is.
    """
    spending = make_spending(config, plan)
    verifier, environments = make_verifier(config, spending), make_environments(plan)
    listener = StartListener(diagnosed=diagnosed)
    entered: list[AbstractAsyncContextManager[Any]] = [verifier, *dict.fromkeys(environments.values())]
    beside = Companions(spending=spending, entered=entered, listener=listener)
    opening = open_services(plan.served, directory, run=(config, plan), is_used=problems is not None, beside=beside)
    async with AsyncExitStack() as stack, opening as services:
        await open_verifiers({each.name: each.verifier for each in plan.evaluation}, stack)
        for found in await play_episodes(config, plan, services, verifier, environments):
            played(found)
        if problems is None:
            return None
        return await measure_slope(config, plan, services, verifier, problems, tell)


def show_servers(screen: Console, diagnosis: Diagnosis) -> None:
    """Print the table, then what follows from it."""
    by_role: dict[str, dict[str, ServerFacts]] = {}
    for name, facts in diagnosis.roles.items():
        by_role.setdefault(facts.role, {})[name] = facts
    table = Table("", *by_role, box=box.SIMPLE_HEAD, pad_edge=False)
    for label, words in ROWS:
        cells = [_cell({name: words(facts) for name, facts in servers.items()}) for servers in by_role.values()]
        if any(cells):
            table.add_row(label, *(Text(cell, overflow="fold") for cell in cells))
    screen.print(table)
    show_warnings(screen, diagnosis.warnings)
    for refusal in diagnosis.refusals:
        screen.print(Text(f"unsafe: {refusal}", style="red"), soft_wrap=True)
    if not diagnosis.refusals:
        screen.print("safe to train with")


def _cell(said: Mapping[str, str]) -> str:
    """Return what all of a role's servers say alike, or else a line for each different answer."""
    names: dict[str, list[str]] = {}
    for name, words in said.items():
        names.setdefault(words, []).append(name)
    if len(names) == 1:
        return next(iter(names))
    return "\n".join(f"{', '.join(those)}: {words}" for words, those in names.items())


def _words(answer: Answer[T], form: Callable[[T], str] = str, absent: str = "unknown") -> str:
    """Say a fact in words: `absent` if it was not asked for, `unknown` if the answer did not tell."""
    if answer is UNSET:
        return absent
    return "unknown" if answer is None else form(answer)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _nats(value: float) -> str:
    return f"{value:.1e} nats"


def _fingerprint(facts: ServerFacts) -> str:
    same = "" if facts.vocab_as_students else ", NOT the student's"
    left_out = facts.vocab_rows_left_out
    rows = f", {left_out} rows beyond the common ones left out" if left_out else ""
    return f"{facts.said.vocab_size} tokens, {facts.said.vocab_fingerprint[:8]}{same}{rows}"


def _entropy(facts: ServerFacts) -> str:
    if not facts.said.max_top_k:
        return "none"
    return "exact" if facts.said.exact_entropy else "bounds"


def _temperature(said: LogprobTemperature, probed: Answer[LogprobTemperature]) -> str:
    words, seen = {"request": "the request's", "one": "1 always"}, known(probed)
    found = "not probed" if seen is None else "probed" if seen == said else f"PROBED: {words[seen]}"
    return f"{words[said]} ({found})"


def _score_temperature(facts: ServerFacts) -> str:
    said, probed = facts.said.score_temperature, facts.score_temperature_probed
    return _temperature(said, probed) if facts.scores else "scores nothing"


def _generation_temperature(facts: ServerFacts) -> str:
    said, probed = facts.said.generation_temperature, facts.generation_temperature_probed
    return _temperature(said, probed) if facts.samples else "samples nothing"


def _behind_own_prompt(part: str) -> Callable[[ServerFacts], str]:
    def words(facts: ServerFacts) -> str:
        own, students = (getattr(known(each), part, None) for each in (facts.own_prompts, facts.students_prompts))
        return "" if own is None or students is None else f"{own:.3g}, {students:.3g} behind the student's"

    return words


def _repeatability(facts: ServerFacts) -> str:
    return _words(facts.noise, lambda noise: f"{_nats(noise.alone)} alone, {_nats(noise.largest)} together")


def _disagreement(facts: ServerFacts) -> str:
    found = known(facts.disagreement)
    if found is None or found.nats is None:
        return "unknown"
    return f"{_nats(found.nats)}, {found.limit_nats:.2g} at most"


def _seeds(facts: ServerFacts) -> str:
    if not facts.samples:
        return "samples nothing"
    return _words(facts.seeds_probed, lambda seen: f"{_yes(seen)} (probed)")


def _end_tokens(facts: ServerFacts) -> str:
    if facts.end_tokens_as_students:
        return facts.end_tokens
    scored = {"replace": "the first is", "sum": "their sum is"}[facts.end_token_scores]
    return f"{facts.end_tokens}; {scored} scored in place of the student's"


def _template(facts: ServerFacts) -> str:
    same = "the student's" if facts.chat_template_as_students else "its own"
    return f"{same}, renders training prompts" if facts.chat_template_used else same


def _weights(facts: ServerFacts) -> str:
    said = facts.said
    if not said.weight_update:
        return "takes none"
    holds = "holds unknown weights until the first are sent" if said.version is None else f"holds {said.version}"
    checked = {
        True: "checked when loaded",
        False: "not checked when loaded",
        None: "the first tell whether they can be checked",
    }[said.weights_checked]
    return f"{_words(said.weight_transport)}; {holds}; {checked}"


def _behind(facts: ServerFacts) -> str:
    behind = known(facts.behind)
    if behind is None:
        return ""
    if behind.servers is None:
        return "unknown"
    return "one" if behind.servers == 1 else f"at least {behind.servers}"


def _masked(facts: ServerFacts) -> str:
    return _words(facts.rows, lambda rows: _words(rows.masked, lambda share: percent(share, 1)), "scores nothing")


def _rows(facts: ServerFacts) -> str:
    words = {RIGHT: "yes (probed)", None: "unknown"}
    return _words(facts.rows, lambda rows: words.get(rows.order, "NO"), "scores nothing")


ROWS: tuple[tuple[str, Callable[[ServerFacts], str]], ...] = (
    ("backend", lambda facts: facts.backend),
    ("server", lambda facts: facts.said.server),
    ("servers behind the url", _behind),
    ("model", lambda facts: facts.said.model),
    ("vocabulary", _fingerprint),
    ("end token", _end_tokens),
    ("chat template", _template),
    ("context", lambda facts: f"{facts.said.max_context_tokens}, {facts.context_tokens_needed} needed"),
    ("top-K of scores", lambda facts: f"{facts.said.max_top_k}, {facts.score_top_k_needed} needed"),
    ("top-K of samples", lambda facts: str(facts.said.max_generation_top_k)),
    ("top-K of single positions", lambda facts: str(facts.said.max_position_top_k)),
    ("entropy", _entropy),
    ("candidates", lambda facts: facts.said.candidate_logprobs),
    ("token-id prompts", lambda facts: _yes(facts.said.token_id_prompts)),
    ("log-probabilities", lambda facts: f"of the {facts.said.logprob_convention} distribution"),
    ("temperature of scores", _score_temperature),
    ("temperature of samples", _generation_temperature),
    ("masked positions", _masked),
    ("student's responses", lambda facts: _words(facts.responses, absent="")),
    ("scores of the right rows", _rows),
    ("first token, own prompt", _behind_own_prompt("first")),
    ("other tokens, own prompt", _behind_own_prompt("rest")),
    ("repeatability", _repeatability),
    ("servers apart", lambda facts: _words(facts.servers_differ_nats, _nats, "")),
    ("samples of the whole", lambda facts: _words(facts.truncation_p_value, lambda p: _yes(p >= UNLIKELY))),
    ("samples against scores", _disagreement),
    ("seeds honoured", _seeds),
    ("prefix caching", lambda facts: _words(facts.said.prefix_caching, _yes)),
    ("frees abandoned requests", lambda facts: _yes(facts.said.abort)),
    ("new weights", _weights),
    ("updates in flight", lambda facts: _yes(facts.said.in_flight_updates)),
    ("round trip", lambda facts: _words(facts.round_trip_s, lambda seconds: f"{seconds * 1000:.1f} ms")),
)
