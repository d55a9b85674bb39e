"""Why Docker Engine did not start a container, or did not get an image: makes an error from its message. Pure."""

import re

from vllm_qualify.errors import CallerError, HostError, QualifyError, ReleaseError

NO_VLLM = "not-vllm-openai"
_PORT = re.compile(r"port is already allocated|address already in use|failed to bind host port", re.I)
_DRIVER = re.compile(r"unsatisfied condition: (?:cuda|driver)\S*|requirement error", re.I)
_NO_GPU = re.compile(
    r"could not select device driver|unknown or invalid runtime name: nvidia"
    r"|nvidia-container-cli: (?:initialization|device) error|exec: \"nvidia-container"
    r"|unresolvable CDI devices|unknown device|libnvidia-ml",
    re.I,
)
_MADE_FOR_ANOTHER = re.compile(r"exec format error|does not match the (?:specified|detected) (?:host )?platform", re.I)
_PROGRAM = re.compile(r'exec: "(?P<program>[^"]*)": (?:stat|executable file not found)', re.I)
_IMAGE_GONE = re.compile(r"No such image", re.I)
_MOUNT = re.compile(r"bind source path does not exist|invalid mount config|not a directory: unknown", re.I)

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


def classify_start(said: str, image: str, port: int | None, place: str) -> QualifyError:
    """The error for Docker Engine's message when it did not start a container of `image`."""
    if _PORT.search(said):
        return HostError(f"port {port} is in use: {said}", "free it, or leave --port out", place, kind="port-in-use")
    if _DRIVER.search(said):
        problem = f"the NVIDIA driver is too old for {image}: {said}"
        return HostError(problem, "update this host's driver, or use an image for an older CUDA", place, kind="driver-too-old")
    if _NO_GPU.search(said):
        problem = f"Docker Engine has no access to GPUs: {said}"
        remedy = "install the NVIDIA container toolkit, and `nvidia-ctk runtime configure --runtime=docker`"
        return HostError(problem, remedy, place, kind="no-gpu-in-docker")
    if _MADE_FOR_ANOTHER.search(said):
        problem = f"{image} is made for another platform: {said}"
        return ReleaseError(problem, "name an image for this platform", place, kind="wrong-platform")
    if program := _PROGRAM.search(said):
        problem = f"{image} has no program {program['program']}"
        return ReleaseError(problem, "use an image with the interface of vllm/vllm-openai", place, kind=NO_VLLM)
    if _IMAGE_GONE.search(said):
        problem = f"the image {image} is gone from this machine"
        return HostError(problem, "run the qualification again, which pulls it", place, kind="image-missing")
    if _MOUNT.search(said):
        problem = f"Docker Engine does not see this machine's files: {said}"
        remedy = "run vllm-qualify on the machine of that Docker Engine, not in a container"
        return HostError(problem, remedy, place, kind="mount-refused")
    return HostError(f"Docker Engine did not start the container: {said}", "see its message", place, kind="docker-refused")


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
        host, slash, _ = reference.partition("/")
        # Docker Hub is the one without a name.
        is_named = slash and ("." in host or ":" in host or host == "localhost")
        login = f"docker login {host}" if is_named else "docker login"
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
