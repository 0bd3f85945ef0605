"""Lists the contract: every check, in the order of running. If one fails, those that build on it are left out."""

from __future__ import annotations

from spot_async.tools.conformance import generation, scoring, service, weights
from spot_async.tools.conformance.checks import Check, Feature

GENERATION = Feature(lambda said: said.generation, "the endpoint only scores")
TOKENS = Feature(
    lambda said: said.generation and said.sampled_token_ids,
    "responses are text that is tokenised again: for KD and evaluation only",
)
SCORES = Feature(lambda said: said.max_top_k > 0, "the endpoint scores no given tokens")
POSITIONS = Feature(lambda said: said.max_position_top_k > 0, "no single positions in more detail")
CANDIDATES = Feature(lambda said: said.candidate_logprobs != "none", "no log-probabilities of chosen tokens")
UPDATES = Feature(
    lambda said: said.generation and said.sampled_token_ids and said.weight_update, "the endpoint takes no weights"
)

_SAMPLED = ("generation_parity",)
_SCORED = ("score_parity",)
_ALL_PARITY = ("generation_parity", "score_parity", "candidates")

CHECKS = (
    Check("capabilities", service.capabilities),
    Check("generation_parity", generation.parity, TOKENS),
    Check("generation_boundary", generation.boundary, TOKENS, _SAMPLED),
    Check("generation_temperature", generation.temperature, TOKENS, _SAMPLED),
    Check("sampling_distribution", generation.distribution, TOKENS),
    Check("low_temperature", generation.low_temperature, TOKENS),
    Check("top_p", generation.top_p, TOKENS, _SAMPLED),
    Check("vocab_limit", generation.vocab_limit, TOKENS, _SAMPLED),
    Check("stop_tokens", generation.stop_tokens, TOKENS),
    Check("immediate_stop", generation.immediate_stop, TOKENS, ("low_temperature",)),
    Check("samples_differ", generation.samples_differ, GENERATION),
    Check("seeds", generation.seed_repeats, GENERATION, ("samples_differ",)),
    Check("longest_response", generation.longest_response, TOKENS, _SAMPLED),
    Check("versions", service.versions, TOKENS),
    Check("score_parity", scoring.parity, SCORES),
    Check("score_boundary", scoring.boundary, SCORES, _SCORED),
    Check("score_top_k", scoring.top_k, SCORES, _SCORED),
    Check("score_entropy", scoring.entropies, SCORES, _SCORED),
    Check("position_scores", scoring.positions_again, POSITIONS, _SCORED),
    Check("score_temperature", scoring.temperature, SCORES, _SCORED),
    Check("empty_response", scoring.empty_response, SCORES),
    Check("longest_score", scoring.longest, SCORES, _SCORED),
    Check("candidates", scoring.candidates, CANDIDATES),
    Check("candidate_temperature", scoring.candidate_temperature, CANDIDATES, ("candidates",)),
    Check("candidate_version", scoring.candidate_version, CANDIDATES, ("candidates",)),
    Check("concurrency", service.concurrency, None, _ALL_PARITY),
    Check("refused_ids", service.refused_ids),
    Check("refused_shapes", service.refused_shapes),
    Check("deadline", service.deadline, GENERATION),
    Check("abort", service.abort, GENERATION, ("deadline",)),
    Check("refused_snapshot", weights.refused_snapshot, UPDATES, (*_ALL_PARITY, "versions")),
    Check("weight_update", weights.update, UPDATES, (*_ALL_PARITY, "versions")),
    Check("update_under_way", weights.update_under_way, UPDATES, ("weight_update",)),
)
