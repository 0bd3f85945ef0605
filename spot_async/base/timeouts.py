"""Fixed timeouts and retry counts shared by several modules. No setting changes them."""

from __future__ import annotations

WEIGHT_UPDATE_TIMEOUT_S = 600.0  # to send weights to all servers of a role, to one that returns, and at the start
CAPABILITIES_TIMEOUT_S = 60.0  # for a server to say what it offers
VERIFY_ATTEMPTS = 2  # missing evidence is asked for once more
