"""What keeps an approval from being given or trusted. Each way in which one cannot be trusted has its own exit code."""

from vllm_qualify.errors import CallerError, QualifyError, StoreError


class NotApprovedError(QualifyError):
    """The approval must not be relied upon."""

    who_acts = "the release manager"


class TamperedError(NotApprovedError):
    """Something of it is missing, or is not what was approved."""

    exit_code = 10


class OtherKeyError(NotApprovedError):
    """None of the given keys signed it."""

    exit_code = 11


class ExpiredError(NotApprovedError):
    """Its days are over."""

    exit_code = 12


class SupersededError(NotApprovedError):
    """A newer report of the same cell was approved."""

    exit_code = 13


class RevokedError(NotApprovedError):
    """Somebody took it back."""

    exit_code = 14


class NotInForceError(NotApprovedError):
    """It was signed, and the cell's pointer never came to name it."""

    exit_code = 15


class DecidedError(CallerError):
    """It was decided already, and otherwise."""


class OvertakenError(StoreError):
    """The pointer was moved by somebody else, or is at a newer report already."""

    who_acts = "the release manager"
