"""What this machine has and lacks for a qualification, one line each with the remedy."""

import ctypes
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException
from importlib import metadata

import psutil

from vllm_qualify.engine.confinement import GIVE_NAMESPACES, USE_LANDLOCK, isolation_problem
from vllm_qualify.engine.containers.host import docker_host, platform_of
from vllm_qualify.engine.environment import find_engine
from vllm_qualify.engine.gpu import check_driver, detect
from vllm_qualify.engine.landlock import can_confine, landlock_version
from vllm_qualify.engine.launchers.registry import LAUNCHERS
from vllm_qualify.errors import HostError, QualifyError
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.report.words import changed_files
from vllm_qualify.runs.home import home

LEAST_FREE_MIB = 2_000
# AWS's, which others have taken over; the same by IPv6; Google's; that of AWS's containers; Alibaba's.
METADATA = ("169.254.169.254", "[fd00:ec2::254]", "metadata.google.internal", "169.254.170.2", "100.100.100.200")
METADATA_LIMIT_S = 1.0
CLOSE_METADATA = "close it by the firewall to all but those that need it: docs/operations.md, Cloud metadata"
TOOLS = ("prefect", "lm-eval", "great-expectations", "docker", "boto3")


class Diagnosis(Frozen):
    """One line of the doctor's report. A missing optional part is shown, but is not a problem."""

    what: str
    ok: bool
    detail: str
    remedy: str = ""
    optional: bool = False
    otherwise: str = "absent"

    @property
    def state(self) -> str:
        return "ok" if self.ok else self.otherwise if self.optional else "MISSING"


def examine() -> list[Diagnosis]:
    return [check() for check in CHECKS]


def _diagnose(what: str, find: Callable[[], str], is_optional: bool | Callable[[], bool] = False) -> Diagnosis:
    """What `find` says, or the error that it raises. Whether a missing part is optional is asked only then."""
    try:
        return Diagnosis(what=what, ok=True, detail=find())
    except QualifyError as error:
        optional = is_optional if isinstance(is_optional, bool) else is_optional()
        return Diagnosis(what=what, ok=False, detail=error.problem, remedy=error.remedy, optional=optional)


def _find_orchestrator() -> str:
    versions, missing = {}, []
    for name in TOOLS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise HostError(f"no {', '.join(missing)}", "run `make setup`")
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _find_vllm() -> str:
    engine = find_engine()
    identity = engine.identity()
    return f"vLLM {identity.version} at {engine.python.parent.parent}{changed_files(identity)}"


def find_libnuma() -> str:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        raise HostError("vLLM's CPU workers die without it", "apt-get install libnuma1") from error
    return "installed"


def _has_gpus() -> bool:
    try:
        return detect().gpu_type != "cpu"
    except QualifyError:
        return True


def _find_gpus() -> str:
    machine = detect()
    check_driver(machine)
    return f"{machine.gpu_type}: {machine.name}, {machine.count}, {machine.memory_mib:,} MiB"


def _find_memory() -> str:
    # With the page cache, which the kernel gives back: a host that serves models has it full.
    available_mib = psutil.virtual_memory().available // 2**20
    if available_mib < LEAST_FREE_MIB:
        raise HostError(f"{available_mib:,} MiB available", f"free at least {LEAST_FREE_MIB:,} MiB")
    return f"{available_mib:,} MiB available"


def _find_disk() -> str:
    folder = next(path for path in (home(), *home().parents) if path.exists())
    free_mib, writable = shutil.disk_usage(folder).free // 2**20, os.access(folder, os.W_OK)
    detail = f"{free_mib:,} MiB free for {home()}{'' if writable else ', not writable'}"
    if free_mib < LEAST_FREE_MIB or not writable:
        raise HostError(detail, f"free at least {LEAST_FREE_MIB:,} MiB there, or set VLLM_QUALIFY_HOME")
    return detail


def _find_docker() -> str:
    try:
        with docker_host("check") as host:
            return f"Docker Engine {host.version()['Version']}, {platform_of(host)}"
    except QualifyError as error:
        raise HostError(error.problem, f"only for --launcher docker: {error.remedy}") from error


def _find_confinement() -> str:
    if not can_confine():
        raise HostError("code of a model, as a process, could read this user's keys", USE_LANDLOCK)
    return f"Landlock, version {landlock_version()}"


def _find_isolation() -> str:
    if problem := isolation_problem():
        raise HostError(f"code of a model, as a process, reaches other processes: {problem}", GIVE_NAMESPACES)
    return "namespaces of its own, and a filter of system calls"


def _check_metadata() -> Diagnosis:
    """A cloud gives a machine's credentials to whatever runs on it and asks there. Nothing but `/` is asked for."""
    with ThreadPoolExecutor(len(METADATA)) as pool:
        found = [address for address, answers in zip(METADATA, pool.map(_answers, METADATA), strict=True) if answers]
    detail = f"{', '.join(found)} may give this machine's credentials to code of a model" if found else "no address answers"
    return Diagnosis(
        what="cloud metadata", ok=not found, detail=detail, remedy=CLOSE_METADATA, optional=True, otherwise="found"
    )


def _answers(address: str) -> bool:
    connection = HTTPConnection(address, timeout=METADATA_LIMIT_S)
    try:
        connection.request("GET", "/")
        connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True


def _find_program(program: str, install: str) -> str:
    if path := shutil.which(program):
        return path
    raise HostError("not installed", f"only for the tests: {install}")


def _check_leftovers() -> Diagnosis:
    try:
        names = [leftover.name for launcher in LAUNCHERS.values() for leftover in launcher.leftovers()]
        detail, remedy, otherwise = ", ".join(names) or "none", "vllm-qualify doctor --clean", "found"
    except QualifyError as error:
        names, detail, remedy, otherwise = [""], error.problem, error.remedy, "unknown"
    return Diagnosis(what="leftovers", ok=not names, detail=detail, remedy=remedy, optional=True, otherwise=otherwise)


CHROMIUM = "chromium-headless-shell"
CHECKS: tuple[Callable[[], Diagnosis], ...] = (
    partial(_diagnose, "orchestrator", _find_orchestrator),
    partial(_diagnose, "engine", _find_vllm),
    partial(_diagnose, "libnuma1", find_libnuma, _has_gpus),
    partial(_diagnose, "GPU type", _find_gpus),
    partial(_diagnose, "memory", _find_memory),
    partial(_diagnose, "disk", _find_disk),
    partial(_diagnose, "Docker", _find_docker, True),
    partial(_diagnose, "confinement", _find_confinement, True),
    partial(_diagnose, "isolation", _find_isolation, True),
    _check_metadata,
    _check_leftovers,
    partial(_diagnose, "radosgw", partial(_find_program, "radosgw", "infra/radosgw.sh install"), True),
    partial(_diagnose, "chromium", partial(_find_program, CHROMIUM, f"infra/debian-package.sh {CHROMIUM}"), True),
)
