"""The commit of a model on the hub."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from vllm_qualify.errors import CallerError, HostError, QualifyError
from vllm_qualify.lazy import Lazy

if TYPE_CHECKING:
    import huggingface_hub
    from huggingface_hub import errors as hub_errors
else:
    huggingface_hub, hub_errors = Lazy("huggingface_hub"), Lazy("huggingface_hub.errors")

TIMEOUT_S = 30.0


def resolve_commit(model: str, revision: str | None, place: str) -> str:
    """The commit of a branch, a tag or, for None, the default branch. HF_TOKEN and HF_ENDPOINT are used if they are set.

    Raises:
        CallerError: the name is not valid, or the hub has no such model or revision.
        HostError: the hub asks for a login, or does not answer as it should; `retry` if that may pass.
    """
    what = f"{model} at {revision or 'its default branch'}"
    try:
        commit = huggingface_hub.HfApi(endpoint=_endpoint()).model_info(model, revision=revision, timeout=TIMEOUT_S).sha
    except hub_errors.HFValidationError as error:
        raise CallerError(f"'{model}' is not a model of the hub", "write it like Qwen/Qwen3-0.6B", place) from error
    except hub_errors.HfHubHTTPError as error:
        raise _refusal(error, what, place) from error
    except hub_errors.OfflineModeIsEnabled as error:
        raise HostError(f"the hub was not asked for {what}", "unset HF_HUB_OFFLINE", place, kind="hub-offline") from error
    # HTTPError comes from its HTTP client, which depends on its version.
    except (hub_errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        raise _unreachable(what, str(error), place) from error
    except (ValueError, LookupError, TypeError) as error:
        raise _unknown(what, place) from error
    if not commit:
        raise _unknown(what, place)
    return commit


def _endpoint() -> str | None:
    """The current HF_ENDPOINT: the library itself reads it only once, when it is imported."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _refusal(error: "hub_errors.HfHubHTTPError", what: str, place: str) -> QualifyError:
    status = error.response.status_code
    if status in (401, 403):
        problem = f"the hub asks for a login, or has no {what}: it answered {status}"
        return HostError(problem, "set HF_TOKEN to a token that may read it, and check the name", place, kind="login-required")
    if status == 404:
        remedy = "check the name and the revision, and HF_TOKEN for a private model"
        return CallerError(f"the hub has no {what}", remedy, place, kind="model-missing")
    if status == 429:
        problem, remedy = f"the hub's rate limit stopped {what}", "wait, or set HF_TOKEN"
        wait_s = wait_asked_s(error.response.headers)
        return HostError(problem, remedy, place, kind="hub-rate-limit", retry=True, retry_after_s=wait_s)
    return _unreachable(what, f"it answered {status}", place, retry=status >= 500)


def wait_asked_s(headers: Mapping[str, str]) -> float:
    """How long an answer asks to wait (Retry-After), in seconds; 0 if it names none, or a time in the past."""
    asked = headers.get("Retry-After", "")
    if asked.isdecimal():
        return float(asked)
    try:
        # A date in HTTP is in UTC, whatever it says.
        return max(0.0, (parsedate_to_datetime(asked).replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds())
    except ValueError:
        return 0.0


def _unreachable(what: str, said: str, place: str, retry: bool = True) -> HostError:
    problem, remedy = f"the hub did not resolve {what}: {said}", "check the hub, the network, the proxy and HF_ENDPOINT"
    return HostError(problem, remedy, place, kind="hub-unreachable", retry=retry)


def _unknown(what: str, place: str) -> HostError:
    return HostError(f"the hub gave no commit for {what}", "check HF_ENDPOINT", place, kind="hub-unknown")
