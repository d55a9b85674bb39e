"""Why an approval cannot be given or trusted. Each reason not to trust it has its own exit code."""

from vllm_qualify.errors import CallerError, QualifyError, StoreError


class NotApprovedError(QualifyError):
    """The approval must not be relied on."""

    who_acts = "the release manager"


class TamperedError(NotApprovedError):
    exit_code = 10  # a part of it is missing, or is not what was approved


class OtherKeyError(NotApprovedError):
    exit_code = 11  # none of the given keys signed it


class ExpiredError(NotApprovedError):
    exit_code = 12


class SupersededError(NotApprovedError):
    exit_code = 13  # a newer report of the same cell was approved


class RevokedError(NotApprovedError):
    exit_code = 14


class NotInForceError(NotApprovedError):
    exit_code = 15  # it was signed, but the cell's pointer does not name it


class FutureError(NotApprovedError):
    exit_code = 16  # it is dated in the future, so one of two clocks is wrong


class DecidedError(CallerError):
    """There is already another decision about it."""


class OvertakenError(StoreError):
    """Another writer moved the pointer, or it is already at a newer report."""

    who_acts = "the release manager"
