"""Why an approval cannot be given or trusted. Each reason not to trust it has its own exit code."""

from vllm_qualify.errors import CallerError, QualifyError, StoreError


class NotApprovedError(QualifyError):
    """The approval must not be relied on."""

    who_acts = "the release manager"


class TamperedError(NotApprovedError):
    """A part of it is missing, or is not what was approved."""

    exit_code = 10


class OtherKeyError(NotApprovedError):
    """None of the given keys signed it."""

    exit_code = 11


class ExpiredError(NotApprovedError):
    """It has expired."""

    exit_code = 12


class SupersededError(NotApprovedError):
    """A newer report of the same cell was approved."""

    exit_code = 13


class RevokedError(NotApprovedError):
    """It was revoked."""

    exit_code = 14


class NotInForceError(NotApprovedError):
    """It was signed, but the cell's pointer does not name it."""

    exit_code = 15


class FutureError(NotApprovedError):
    """It is dated in the future, so one of two clocks is wrong."""

    exit_code = 16


class DecidedError(CallerError):
    """There is already another decision about it."""


class OvertakenError(StoreError):
    """Another writer moved the pointer, or it is already at a newer report."""

    who_acts = "the release manager"
