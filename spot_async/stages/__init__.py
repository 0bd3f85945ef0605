"""The stages a policy asks: rollout, score, candidates, probe, verify. They know no policy and no server."""
