"""The exceptions users can catch, one class per way of responding to it.

Every message is one line that names the thing at fault and what to do. An infrastructure failure is
never turned into a reward: it is raised as one of these and handled by its class. Anything that is
not a `SpotError` is a bug and stops the run with its trace.
"""


class SpotError(Exception):
    """Root of everything spot-async raises on purpose."""


class ConfigError(SpotError):
    """A configuration that cannot run: wrong key, value or combination. Found before anything starts."""


class DataError(SpotError):
    """A problem file, model directory or weight file that cannot be used as it stands."""


class StorageError(SpotError):
    """The run directory cannot be written: full disk, quota, or gone."""


class RequestError(SpotError):
    """A request to a backend failed. Subclasses say whether sending it again can help."""


class PermanentError(RequestError):
    """The same request would fail again (bad input, unknown model, vocabulary mismatch): never retried."""


class VersionMismatchError(PermanentError):
    """The server no longer holds the weight version that the request asked for."""


class ThrottledError(RequestError):
    """The endpoint asks to be left alone for a while (429, 503)."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TransientError(RequestError):
    """A reset, a 5xx or a time-out: a later attempt may succeed."""


class DeadlineExceededError(TransientError):
    """The request's absolute deadline passed before it was answered."""


class ServerRestartedError(TransientError):
    """The server is not the one that was entered, or holds weights that this run did not give it.

    It was restarted, or updated by somebody else. Another server may answer the request; this one must be left,
    entered again and given weights first.
    """


class PoisonedReplyError(RequestError):
    """A reply whose numbers cannot be true (NaN, rows missing, tokens out of the vocabulary)."""


class ProcessDiedError(SpotError):
    """A supervised child process ended although the run still needs it."""


class TrainerError(SpotError):
    """The trainer stopped: non-finite loss or gradient, full disk, or a bug in a rank."""


class ReplayMissError(SpotError):
    """A run without its teacher needs what the cache does not hold."""


class BudgetSpentError(SpotError):
    """What the run may spend on requests is spent. Everything finished until then is saved."""
