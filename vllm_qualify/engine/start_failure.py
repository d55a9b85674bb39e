"""Why Docker Engine did not start a container: makes an error from its message. Pure."""

import re

from vllm_qualify.errors import HostError, QualifyError, ReleaseError

NO_VLLM = "not-vllm-openai"
_PORT = re.compile(r"port is already allocated|address already in use|failed to bind host port", re.I)
_DRIVER = re.compile(r"unsatisfied condition: (?:cuda|driver)\S*|requirement error", re.I)
_NO_GPU = re.compile(
    r"could not select device driver|unknown or invalid runtime name: nvidia"
    r"|nvidia-container-cli: (?:initialization|device) error|exec: \"nvidia-container"
    r"|unresolvable CDI devices|unknown device|libnvidia-ml",
    re.I,
)
_PLATFORM = re.compile(r"exec format error|does not match the (?:specified|detected) (?:host )?platform", re.I)
_PROGRAM = re.compile(r'exec: "(?P<program>[^"]*)": (?:stat|executable file not found)', re.I)
_MISSING = re.compile(r"No such image", re.I)
_MOUNT = re.compile(r"bind source path does not exist|invalid mount config|not a directory: unknown", re.I)


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
    if _PLATFORM.search(said):
        problem = f"{image} is made for another platform: {said}"
        return ReleaseError(problem, "name an image for this platform", place, kind="wrong-platform")
    if program := _PROGRAM.search(said):
        problem = f"{image} has no program {program['program']}"
        return ReleaseError(problem, "use an image with the interface of vllm/vllm-openai", place, kind=NO_VLLM)
    if _MISSING.search(said):
        problem = f"the image {image} is gone from this machine"
        return HostError(problem, "run the qualification again, which pulls it", place, kind="image-missing")
    if _MOUNT.search(said):
        problem = f"Docker Engine does not see this machine's files: {said}"
        remedy = "run vllm-qualify on the machine of that Docker Engine, not in a container"
        return HostError(problem, remedy, place, kind="mount-refused")
    return HostError(f"Docker Engine did not start the container: {said}", "see its message", place, kind="docker-refused")
