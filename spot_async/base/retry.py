"""Whether and when a failed request is sent again. Pure: no clock, no randomness of its own."""

from __future__ import annotations

import msgspec

from spot_async.errors import DeadlineExceededError, FailureClass, RequestError, ThrottledError

DEFAULT_ATTEMPTS = 8  # they take 12 to 24 s: longer than a dropped connection or a server's reload
POISONED_ATTEMPTS = 2  # a reply is damaged once by chance, or every time because of the request
BASE_DELAY_S = 0.25
MAX_DELAY_S = 8.0
MAX_DOUBLINGS = 16  # enough to reach the largest delay; without a limit the power would overflow
RETRY_AFTER_SPREAD = 0.1  # share of the pause asked for, so that an endpoint's clients do not all come back at once


class RetryPolicy(msgspec.Struct, frozen=True):
    """Each class of failure has a budget of its own, and failures are counted by class:

    * permanent: sent once.
    * throttled: without limit, after as long as the endpoint asks for (at most `LONGEST_PAUSE_S`: `ThrottledError`).
    * transient: at most `attempts` times, with delays that grow exponentially, with jitter.
    * poisoned: once more, elsewhere where there is another server.

    The request's deadline, which the caller knows, ends them all.
    """

    attempts: int

    def delay_s(self, error: RequestError, failures: int, jitter: float) -> float | None:
        """Seconds to wait after the `failures`-th failure (from 1) of this error's class, None to give up.

        `jitter` is uniform in [0, 1).
        """
        if isinstance(error, DeadlineExceededError):
            return None
        doublings = min(failures - 1, MAX_DOUBLINGS)
        backoff_s = min(MAX_DELAY_S, BASE_DELAY_S * 2.0**doublings) * (0.5 + jitter / 2)
        match error.failure_class:
            case FailureClass.THROTTLED:
                retry_after_s = error.retry_after_s if isinstance(error, ThrottledError) else None
                return max(backoff_s, (retry_after_s or 0.0) * (1.0 + RETRY_AFTER_SPREAD * jitter))
            case FailureClass.TRANSIENT:
                return backoff_s if failures < self.attempts else None
            case FailureClass.POISONED:
                return backoff_s if failures < min(POISONED_ATTEMPTS, self.attempts) else None
            case _:
                return None
