"""Why an image was not resolved or pulled: makes an error from Docker Engine's message. Pure."""

import re

from vllm_qualify.errors import CallerError, HostError, QualifyError, ReleaseError

_LOGIN = re.compile(
    r"unauthorized|no basic auth credentials|authentication required|access .* denied|access denied|denied: ", re.I
)
_MISSING = re.compile(r"manifest unknown|not found|name unknown|repository .* does not exist|invalid repository name", re.I)
_PLATFORM = re.compile(r"no matching manifest for|no match for platform|does not match the specified platform", re.I)
_UNTRUSTED = re.compile(r"x509|server gave HTTP response to HTTPS client|tls: ", re.I)
_PROXY = re.compile(r"Proxy Authentication Required", re.I)
# Numbers only after `HTTP status`: a tag, a digest or a port can contain any number.
_UNREACHABLE = re.compile(
    r"connection refused|no such host|i/o timeout|TLS handshake timeout|server misbehaving|network is unreachable"
    r"|deadline exceeded|Client\.Timeout exceeded|request canceled|connection reset|EOF$|no route to host"
    # a pull that broke off
    r"|unexpected EOF|broken pipe|connection broken|stream error: stream ID|GOAWAY|failure in name resolution"
    r"|HTTP status: 5(?:0[0234]|2\d)",
    re.I,
)
_RATE_LIMIT = re.compile(r"toomanyrequests|too many requests|HTTP status: 429", re.I)
_DISK_FULL = re.compile(r"no space left on device", re.I)
_MISMATCH = re.compile(
    r"(manifest|layer) verification failed|unexpected (?:commit )?digest|filesystem layer verification", re.I
)


def classify_answer(said: str, reference: str, option: str, stage: str) -> QualifyError:
    """The error for Docker Engine's message when it asked a registry for `reference`."""
    if _DISK_FULL.search(said):
        return HostError(f"no space left to pull {reference}", "free space where Docker keeps images", stage, kind="disk-full")
    if _RATE_LIMIT.search(said):
        problem = f"the registry's rate limit stopped {reference}: {said}"
        return HostError(problem, "wait, or log in with `docker login`", stage, kind="registry-rate-limit", retry=True)
    if _MISMATCH.search(said):
        problem = f"the registry gave something else than {reference}: {said}"
        return ReleaseError(problem, "do not use this registry's copy; ask its owner", stage, kind="digest-mismatch")
    if _PLATFORM.search(said):
        problem = f"{reference} is not made for this machine: {said}"
        return ReleaseError(problem, "name an image for this platform", stage, kind="wrong-platform")
    if _PROXY.search(said):
        problem = f"Docker Engine's proxy on the way to {reference} asks for a login: {said}"
        return HostError(problem, "set Docker Engine's proxy with its login", stage, kind="proxy-login-required")
    if _LOGIN.search(said):
        problem = f"the registry asks for a login, or has no {reference}: {said}"
        login = f"docker login {_registry(reference)}".strip()
        return HostError(problem, f"`{login}`, and check the name", stage, kind="login-required")
    if _UNTRUSTED.search(said):
        problem = f"Docker Engine does not trust the registry of {reference}: {said}"
        remedy = "give Docker Engine the registry's certificate, or list it as insecure"
        return HostError(problem, remedy, stage, kind="registry-untrusted")
    if _UNREACHABLE.search(said):
        problem = f"the registry of {reference} does not answer: {said}"
        remedy = "check the registry, the network and the proxy of Docker Engine"
        return HostError(problem, remedy, stage, kind="registry-unreachable", retry=True)
    if _MISSING.search(said):
        return CallerError(f"the registry has no {reference}", "check the name and the tag", option, kind="image-missing")
    problem = f"Docker Engine did not get {reference}: {said}"
    return HostError(problem, "see its message", stage, kind="registry-unknown")


def _registry(reference: str) -> str:
    """The host to log in to; empty for Docker Hub, as `docker login` expects."""
    host, slash, _ = reference.partition("/")
    return host if slash and ("." in host or ":" in host or host == "localhost") else ""
