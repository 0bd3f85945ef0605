"""Decides whether and when a failed request is sent again. Pure: no clock and no randomness of its own.

Beside it are the timeouts and attempts that several modules share, and that no setting changes.
"""

from __future__ import annotations

import msgspec

from spot_async.errors import DeadlineExceededError, FailureClass, RequestError, ThrottledError

DEFAULT_ATTEMPTS = 8  # these take 12 to 24 s, longer than a dropped connection or a server's reload lasts
POISONED_ATTEMPTS = 2  # a reply is damaged either once, by chance, or every time, because of the request
BASE_DELAY_S = 0.25
MAX_DELAY_S = 8.0
MAX_DOUBLINGS = 16  # enough to reach the largest delay; without a limit the power would overflow
VERIFY_ATTEMPTS = 2  # missing evidence is asked for once more
HEARTBEAT_TIMEOUT_S = 60.0  # another machine that says nothing for so long is lost, and its programs end by themselves
START_TIMEOUT_S = 600.0  # for a server to start, at least
WEIGHT_UPDATE_TIMEOUT_S = 600.0  # to send weights to all servers of a role, to one that returns, and at the start
CAPABILITIES_TIMEOUT_S = 60.0  # for a server to say what it offers
QUESTION_TIMEOUT_S = 120.0  # for one question of the start; endpoints ask for pauses of up to a minute
RETRY_AFTER_SPREAD = 0.1  # random share of the pause added to it, so that clients do not all return at once


def no_room(section: str, error: RequestError) -> str:
    """Return a line about an endpoint, of these settings, that throttled a question of the start until its deadline."""
    return (
        f"{section} has no room for what the start asks: {error}; start when it has, or set its requests_per_minute "
        "and tokens_per_minute to what it allows"
    )


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often a request is sent. Failures are counted, and limited, class by class:

    * permanent: the request is sent once.
    * throttled: any number of times, each after the pause that the endpoint asks for. At most `attempts` times where it
      asks for a pause that is too long to wait for (see `ThrottledError`).
    * transient: at most `attempts` times, after jittered delays that grow exponentially. Attempts that got no
      answer in time are of this class.
    * poisoned: twice, the second time to another server where there is one.

    In every class the request's deadline, which the caller knows, ends the attempts. With 0 `attempts` nothing is sent
    again, whatever its class.
    """

    attempts: int

    def delay_s(self, error: RequestError, failures: int, jitter: float, *, has_time: bool = False) -> float | None:
        """Return the seconds to wait after the `failures`-th failure (from 1) of this error's class; None to give up.

        `jitter` is uniform in [0, 1). `has_time`: a deadline that passed was the attempt's, and the request's is later.
        """
        if not self.attempts or (isinstance(error, DeadlineExceededError) and not has_time):
            return None
        doublings = min(failures - 1, MAX_DOUBLINGS)
        backoff_s = min(MAX_DELAY_S, BASE_DELAY_S * 2.0**doublings) * (0.5 + jitter / 2)
        match error.failure_class:
            case FailureClass.THROTTLED:
                if not isinstance(error, ThrottledError):
                    return backoff_s
                if error.asks_too_long and failures >= self.attempts:
                    return None
                return max(backoff_s, (error.retry_after_s or 0.0) * (1.0 + RETRY_AFTER_SPREAD * jitter))
            case FailureClass.TRANSIENT:
                return backoff_s if failures < self.attempts else None
            case FailureClass.POISONED:
                return backoff_s if failures < min(POISONED_ATTEMPTS, self.attempts) else None
            case _:
                return None
