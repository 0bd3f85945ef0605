"""Whether and when a failed request is sent again. Pure: no clock, no randomness of its own."""

from __future__ import annotations

import msgspec

from spot_async.errors import DeadlineExceededError, RequestError, ThrottledError, TransientError

BASE_DELAY_S = 0.25
MAX_DELAY_S = 8.0


class RetryPolicy(msgspec.Struct, frozen=True):
    """At most `attempts` sendings; transient failures back off exponentially with full jitter."""

    attempts: int

    def delay_s(self, error: RequestError, attempt: int, jitter: float) -> float | None:
        """Seconds to wait before attempt `attempt + 1` (attempts count from 1), None to give up.

        `jitter` is uniform in [0, 1). A throttled endpoint is left alone for as long as it asks.
        """
        if attempt >= self.attempts or isinstance(error, DeadlineExceededError):
            return None
        backoff_s = min(MAX_DELAY_S, BASE_DELAY_S * 2.0 ** (attempt - 1)) * (0.5 + jitter / 2)
        if isinstance(error, ThrottledError):
            return max(backoff_s, error.retry_after_s or 0.0)
        if isinstance(error, TransientError):
            return backoff_s
        return None  # permanent and poisoned: the same request would fail again
