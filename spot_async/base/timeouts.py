"""Time-outs and repetitions that no setting decides and more than one part reckons with."""

from __future__ import annotations

WEIGHT_UPDATE_TIMEOUT_S = 600.0  # for all servers of a role at once, for one that returns, and for the first weights
CAPABILITIES_TIMEOUT_S = 60.0  # for a server to say what it offers
VERIFY_ATTEMPTS = 2  # missing evidence is retried once (method.md section 2)
