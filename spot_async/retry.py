"""Whether and when a failed request is sent again. Pure: no clock, no randomness of its own."""

from __future__ import annotations

import msgspec

from spot_async.errors import DeadlineExceededError, RequestError, ThrottledError, TransientError

DEFAULT_ATTEMPTS = 8  # 12 to 24 s of them: longer than a connection that drops or a server that reloads
BASE_DELAY_S = 0.25
MAX_DELAY_S = 8.0
MAX_DOUBLINGS = 16  # past the largest delay; more would overflow at last


class RetryPolicy(msgspec.Struct, frozen=True):
    """Delays grow exponentially, with jitter: at most `attempts` transient failures, throttling without limit.

    The request's deadline, which the caller knows, ends both.
    """

    attempts: int

    def delay_s(self, error: RequestError, failures: int, jitter: float) -> float | None:
        """Seconds to wait after the `failures`-th failure (from 1) of this error's kind, None to give up.

        `jitter` is uniform in [0, 1). A throttled endpoint is left alone for as long as it asks.
        """
        if isinstance(error, DeadlineExceededError):
            return None
        doublings = min(failures - 1, MAX_DOUBLINGS)
        backoff_s = min(MAX_DELAY_S, BASE_DELAY_S * 2.0**doublings) * (0.5 + jitter / 2)
        if isinstance(error, ThrottledError):
            return max(backoff_s, error.retry_after_s or 0.0)
        if isinstance(error, TransientError) and failures < self.attempts:
            return backoff_s
        return None  # permanent and poisoned too: the same request would fail again
