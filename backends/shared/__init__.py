"""What the adapters share: requests, replies, failures, launched servers, weights. Nothing is for one server alone."""
