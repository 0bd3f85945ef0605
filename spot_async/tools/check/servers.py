"""Starts or attaches a run's servers, asks them what the run depends on, and shows what they said as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spot_async.checks.diagnosis import Diagnosis
from spot_async.checks.plan import TrainPlan
from spot_async.checks.score_rows import RIGHT
from spot_async.checks.server_diagnosis import UNLIKELY, Fact
from spot_async.config import Config
from spot_async.running.assembly import make_spending, make_verifier
from spot_async.running.measuring import open_verifiers
from spot_async.running.services import Companions, open_services
from spot_async.telemetry.console import percent
from spot_async.tools.check.view import show_warnings

Facts = Mapping[str, Fact]


async def examine(config: Config, plan: TrainPlan, directory: Path) -> Diagnosis:
    """Open everything but the trainer, ask, and close it again. Logs go under `directory`."""
    spending = make_spending(config, plan)
    beside = Companions(spending=spending, entered=[make_verifier(config, spending)])
    opening = open_services(plan.served, directory, run=(config, plan), is_used=False, beside=beside)
    async with AsyncExitStack() as stack, opening as services:
        await open_verifiers(plan.evaluation, stack)
        assert services.diagnosis is not None  # of the run
        return services.diagnosis


def show_servers(screen: Console, diagnosis: Diagnosis) -> None:
    """Print the table, then what follows from it."""
    by_role: dict[str, dict[str, Facts]] = {}
    for name, facts in diagnosis.roles.items():
        by_role.setdefault(str(facts["role"]), {})[name] = facts
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


def _known(name: str, form: Callable[[Any], str] = str, absent: str = "unknown") -> Callable[[Facts], str]:
    """Return what says a fact in words: `absent` where nobody asked for it, `unknown` where nobody could tell."""

    def words(facts: Facts) -> str:
        if name not in facts:
            return absent
        return "unknown" if facts[name] is None else form(facts[name])

    return words


def _yes(value: Fact) -> str:
    return "yes" if value else "no"


def _nats(value: Any) -> str:
    return f"{value:.1e} nats"


def _fingerprint(facts: Facts) -> str:
    same = "" if facts["vocab_as_students"] else ", NOT the student's"
    left_out = facts["vocab_rows_left_out"]
    rows = f", {left_out} rows beyond the common ones left out" if left_out else ""
    return f"{facts['vocab_size']} tokens, {str(facts['vocab_fingerprint'])[:8]}{same}{rows}"


def _entropy(facts: Facts) -> str:
    if not facts["score_top_k"]:
        return "none"
    return "exact" if facts["exact_entropy"] else "bounds"


def _temperature(name: str, feature: str) -> Callable[[Facts], str]:
    def words(facts: Facts) -> str:
        if facts[name] is None:
            return feature
        said = {"request": "the request's", "one": "1 always"}
        seen = facts.get(f"{name}_probed")
        found = "not probed" if seen is None else "probed" if seen == facts[name] else f"PROBED: {said[str(seen)]}"
        return f"{said[str(facts[name])]} ({found})"

    return words


def _behind_own_prompt(name: str) -> Callable[[Facts], str]:
    def words(facts: Facts) -> str:
        own, students = facts.get(name), facts.get(f"{name}_students_prompt")
        return "" if own is None or students is None else f"{own:.3g}, {students:.3g} behind the student's"

    return words


def _repeatability(facts: Facts) -> str:
    if facts.get("noise_alone_nats") is None:
        return "unknown"
    return f"{_nats(facts['noise_alone_nats'])} alone, {_nats(facts['noise_together_nats'])} together"


def _disagreement(facts: Facts) -> str:
    if facts.get("disagreement_nats") is None:
        return "unknown"
    return f"{_nats(facts['disagreement_nats'])}, {facts['disagreement_limit_nats']:.2g} at most"


def _seeds(facts: Facts) -> str:
    if facts["seeds"] is None:
        return "samples nothing"
    return _known("seeds_probed", lambda seen: f"{_yes(seen)} (probed)")(facts)


def _end_tokens(facts: Facts) -> str:
    if facts["end_tokens_as_students"]:
        return str(facts["end_tokens"])
    scored = {"replace": "the first is", "sum": "their sum is"}[str(facts["end_token_scores"])]
    return f"{facts['end_tokens']}; {scored} scored in place of the student's"


def _template(facts: Facts) -> str:
    same = "the student's" if facts["chat_template_as_students"] else "its own"
    return f"{same}, renders training prompts" if facts["chat_template_used"] else same


def _weights(facts: Facts) -> str:
    if not facts["weight_update"]:
        return "takes none"
    holds = (
        "holds unknown weights until the first are sent" if facts["version"] is None else f"holds {facts['version']}"
    )
    checked = {True: "checked when loaded", False: "not checked when loaded"}.get(facts["weights_checked"] is True)
    if facts["weights_checked"] is None:
        checked = "the first tell whether they can be checked"
    return f"{_known('weight_transport')(facts)}; {holds}; {checked}"


def _behind(facts: Facts) -> str:
    if "servers_behind_url" not in facts:
        return ""
    servers = facts["servers_behind_url"]
    if servers is None or servers == 1:
        return "unknown" if servers is None else "one"
    if facts["session_header"] is None:
        return f"at least {servers}"
    keeps = "keeps requests on one" if facts["session_keeps_server"] else "does not keep requests on one"
    return f"at least {servers}; {facts['session_header']} {keeps}"


ROWS: tuple[tuple[str, Callable[[Facts], str]], ...] = (
    ("backend", _known("backend")),
    ("server", _known("server")),
    ("servers behind the url", _behind),
    ("model", _known("model")),
    ("vocabulary", _fingerprint),
    ("end token", _end_tokens),
    ("chat template", _template),
    ("context", lambda facts: f"{facts['context_tokens']}, {facts['context_tokens_needed']} needed"),
    ("top-K of scores", lambda facts: f"{facts['score_top_k']}, {facts['score_top_k_needed']} needed"),
    ("top-K of samples", _known("generation_top_k")),
    ("top-K of single positions", _known("position_top_k")),
    ("entropy", _entropy),
    ("candidates", _known("candidate_logprobs")),
    ("token-id prompts", _known("token_id_prompts", _yes)),
    ("log-probabilities", lambda facts: f"of the {facts['logprob_convention']} distribution"),
    ("temperature of scores", _temperature("score_temperature", "scores nothing")),
    ("temperature of samples", _temperature("generation_temperature", "samples nothing")),
    ("masked positions", _known("masked_share", percent, "scores nothing")),
    (
        "scores of the right rows",
        _known("score_rows", lambda order: "yes (probed)" if order == RIGHT else "NO", "scores nothing"),
    ),
    ("first token, own prompt", _behind_own_prompt("first_token_logprob")),
    ("other tokens, own prompt", _behind_own_prompt("other_tokens_logprob")),
    ("repeatability", _repeatability),
    ("servers apart", _known("servers_differ_nats", _nats, "")),
    ("samples of the whole", _known("truncation_p_value", lambda p: _yes(p >= UNLIKELY))),
    ("samples against scores", _disagreement),
    ("seeds honoured", _seeds),
    ("prefix caching", _known("prefix_caching", _yes)),
    ("frees abandoned requests", _known("abort", _yes)),
    ("new weights", _weights),
    ("updates in flight", _known("in_flight_updates", _yes)),
    ("round trip", _known("round_trip_s", lambda seconds: f"{seconds * 1000:.1f} ms")),
)
