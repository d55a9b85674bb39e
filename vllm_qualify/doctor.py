"""What this machine has and lacks for a qualification, one line each with the remedy."""

import ctypes
import importlib
import os
import shutil
from collections.abc import Callable
from importlib import metadata

from vllm_qualify.engine.confine import can_confine, landlock_version
from vllm_qualify.engine.confinement import USE_LANDLOCK
from vllm_qualify.engine.docker_host import docker_host, platform_of
from vllm_qualify.engine.environment import find_engine
from vllm_qualify.engine.gpu import check_driver, detect
from vllm_qualify.engine.launchers.registry import LAUNCHERS
from vllm_qualify.errors import QualifyError
from vllm_qualify.recipe.values import Frozen
from vllm_qualify.runs.home import home

LEAST_FREE_MIB = 2_000
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


def _orchestrator() -> Diagnosis:
    versions, missing = {}, []
    for name in TOOLS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Diagnosis(what="orchestrator", ok=False, detail=f"no {', '.join(missing)}", remedy="run `make setup`")
    return Diagnosis(what="orchestrator", ok=True, detail=", ".join(f"{name} {version}" for name, version in versions.items()))


def _flows() -> Diagnosis:
    try:
        importlib.import_module("flows")
    except ImportError:
        remedy = "install from a checkout: `make setup`, or pip install --editable"
        return Diagnosis(what="flows", ok=False, detail="flows and tasks are not importable", remedy=remedy)
    return Diagnosis(what="flows", ok=True, detail="importable")


def _engine() -> Diagnosis:
    try:
        engine = find_engine()
        identity = engine.identity()
    except QualifyError as error:
        return Diagnosis(what="engine", ok=False, detail=error.problem, remedy=error.remedy)
    return Diagnosis(what="engine", ok=True, detail=f"vLLM {identity.version} at {engine.python.parent.parent}")


def _libnuma() -> Diagnosis:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        detail = "vLLM's CPU workers die without it"
        return Diagnosis(what="libnuma1", ok=False, detail=detail, remedy="apt-get install libnuma1", optional=_has_gpus())
    return Diagnosis(what="libnuma1", ok=True, detail="installed")


def _has_gpus() -> bool:
    try:
        return detect().gpu_type != "cpu"
    except QualifyError:
        return True


def _machine() -> Diagnosis:
    try:
        machine = detect()
        check_driver(machine)
    except QualifyError as error:
        return Diagnosis(what="GPU type", ok=False, detail=error.problem, remedy=error.remedy)
    return Diagnosis(
        what="GPU type", ok=True, detail=f"{machine.gpu_type}: {machine.name}, {machine.count}, {machine.memory_mib:,} MiB"
    )


def _memory() -> Diagnosis:
    free_mib = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    return Diagnosis(
        what="memory",
        ok=free_mib >= LEAST_FREE_MIB,
        detail=f"{free_mib:,} MiB free",
        remedy=f"free at least {LEAST_FREE_MIB:,} MiB",
    )


def _disk() -> Diagnosis:
    folder = next(path for path in (home(), *home().parents) if path.exists())
    free_mib = shutil.disk_usage(folder).free // 2**20
    writable = os.access(folder, os.W_OK)
    return Diagnosis(
        what="disk",
        ok=free_mib >= LEAST_FREE_MIB and writable,
        detail=f"{free_mib:,} MiB free for {home()}{'' if writable else ', not writable'}",
        remedy=f"free at least {LEAST_FREE_MIB:,} MiB there, or set VLLM_QUALIFY_HOME",
    )


def _docker() -> Diagnosis:
    try:
        with docker_host("check") as host:
            detail = f"Docker Engine {host.version()['Version']}, {platform_of(host)}"
    except QualifyError as error:
        remedy = f"only for --launcher docker: {error.remedy}"
        return Diagnosis(what="Docker", ok=False, detail=error.problem, remedy=remedy, optional=True)
    return Diagnosis(what="Docker", ok=True, detail=detail)


def _leftovers() -> Diagnosis:
    try:
        names = [leftover.name for launcher in LAUNCHERS.values() for leftover in launcher.leftovers()]
    except QualifyError as error:
        return Diagnosis(
            what="leftovers", ok=False, detail=error.problem, remedy=error.remedy, optional=True, otherwise="unknown"
        )
    detail = ", ".join(names) or "none"
    return Diagnosis(
        what="leftovers", ok=not names, detail=detail, remedy="vllm-qualify doctor --clean", optional=True, otherwise="found"
    )


def _confinement() -> Diagnosis:
    version = landlock_version()
    if can_confine():
        return Diagnosis(what="confinement", ok=True, detail=f"Landlock, version {version}")
    return Diagnosis(
        what="confinement",
        ok=False,
        detail="code of a model, as a process, could read this user's keys",
        remedy=USE_LANDLOCK,
        optional=True,
    )


def _radosgw() -> Diagnosis:
    program = shutil.which("radosgw")
    remedy = "only for the tests: infra/radosgw.sh install"
    return Diagnosis(what="radosgw", ok=bool(program), detail=program or "not installed", remedy=remedy, optional=True)


def _chromium() -> Diagnosis:
    program = shutil.which("chromium-headless-shell")
    remedy = "only for the tests: infra/debian-package.sh chromium-headless-shell"
    return Diagnosis(what="chromium", ok=bool(program), detail=program or "not installed", remedy=remedy, optional=True)


CHECKS: tuple[Callable[[], Diagnosis], ...] = (
    _orchestrator,
    _flows,
    _engine,
    _libnuma,
    _machine,
    _memory,
    _disk,
    _docker,
    _confinement,
    _leftovers,
    _radosgw,
    _chromium,
)
