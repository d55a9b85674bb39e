"""A real Docker Engine with a real registry for tests, started by the project's own script, and images for it."""

import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from tests.ci import IN_CI
from tests.s3 import settings_in
from vllm_qualify.engine.containers.leftovers import RUN_LABEL
from vllm_qualify.engine.environment import EngineEnvironment

CHECKOUT = Path(__file__).parents[1]
SCRIPT, BUILD = CHECKOUT / "infra" / "docker.sh", CHECKOUT / "infra" / "cpu_image.sh"
# Not in a folder of this run's own: the image is built once, and is there in the next run. A socket's path must be short.
IN_CHECKOUT, LONGEST = CHECKOUT / ".docker", 66
# As `docker push` sends it.
MANIFEST, CONFIG, LAYER = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.container.image.v1+json",
    "application/vnd.docker.image.rootfs.diff.tar",
)


@dataclass(frozen=True)
class Engine:
    """A Docker Engine of the tests' own."""

    settings: Mapping[str, str]
    folder: Path

    @property
    def registry(self) -> str:
        return self.settings["VLLM_QUALIFY_REGISTRY"]

    @property
    def login_registry(self) -> str:
        return self.settings["VLLM_QUALIFY_LOGIN_REGISTRY"]

    def client(self) -> docker.DockerClient:
        # Removing an image of gigabytes takes its time on a busy disk.
        return docker.DockerClient(base_url=self.settings["DOCKER_HOST"], timeout=600)

    def containers(self) -> list[str]:
        """The names of the containers that vllm-qualify made and that are there, running or not."""
        with closing(self.client()) as client:
            there = client.containers.list(all=True, ignore_removed=True, filters={"label": RUN_LABEL})
            return [container.name for container in there]

    def stop(self) -> None:
        subprocess.run([SCRIPT, "engine-stop", self.folder], check=True, capture_output=True)

    def start(self) -> None:
        subprocess.run([SCRIPT, "engine-start", self.folder], check=True, capture_output=True)


def _folder() -> Path:
    """In CI there is no next run, and a temporary folder may be in memory."""
    return Path(tempfile.gettempdir(), "vllm-qualify-docker") if IN_CI or len(str(IN_CHECKOUT)) > LONGEST else IN_CHECKOUT


@pytest.fixture(scope="session")
def _docker_engine() -> Iterator[Engine]:
    folder = _folder()
    started = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True, check=False)
    try:
        if started.returncode:
            (pytest.fail if IN_CI else pytest.skip)(f"no Docker Engine: {started.stderr[-600:]}")
        yield Engine(settings_in(folder / "env"), folder)
    finally:
        subprocess.run([SCRIPT, "stop", folder], capture_output=True, check=False)


@pytest.fixture
def docker_engine(_docker_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine, named by this process's environment, without a container of an earlier test."""
    for name, value in _docker_engine.settings.items():
        monkeypatch.setenv(name, value)
    assert _docker_engine.containers() == []
    return _docker_engine


@pytest.fixture(scope="session")
def cpu_image(_docker_engine: Engine, engine: EngineEnvironment) -> str:
    """The real vLLM for the CPU, pushed as vllm/vllm-openai. Its name with the tag."""
    assert engine.python.is_relative_to(CHECKOUT), "the image is built from the checkout's engine environment"
    built = subprocess.run([BUILD, _docker_engine.folder], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    return built.stdout.split()[-1].partition("@")[0] + ":v0.32.0"


def push_image(registry: str, name: str, tag: str, architecture: str = "amd64", content: str = "") -> str:
    """Push an image of one small file, as any OCI client would. Returns its digest."""
    with httpx.Client(base_url=f"http://{registry}/v2/{name}") as client:
        layer = _layer({"content": content.encode()})
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
        body = json.dumps(config).encode()
        for blob in (layer, body):
            _push_blob(client, blob)
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": _entry(CONFIG, body), "layers": [_entry(LAYER, layer)]}
        return _push_manifest(client, tag, manifest)


def push_rebuilt(registry: str, name: str, tag: str, version: str) -> str:
    """Push the image at a tag once more as `v<version>`, built now: a digest of its own, of the same layers. Returns it."""
    with httpx.Client(base_url=f"http://{registry}/v2/{name}") as client:
        manifest, config = _pushed(client, tag)
        config["created"] = datetime.now(UTC).isoformat()
        config["config"].setdefault("Labels", {})["org.opencontainers.image.version"] = f"v{version}"
        return _push_changed(client, f"v{version}", manifest, config)


def push_extended(registry: str, name: str, tag: str, new_tag: str, files: Mapping[str, bytes] | None = None) -> str:
    """Push the image at a tag as `new_tag`, with one layer more: of these files, or a small one that no engine has yet.

    Returns its digest.
    """
    with httpx.Client(base_url=f"http://{registry}/v2/{name}") as client:
        manifest, config = _pushed(client, tag)
        layer = _layer(files or {"content": new_tag.encode()})
        _push_blob(client, layer)
        manifest["layers"].append(_entry(LAYER, layer))
        config["rootfs"]["diff_ids"].append(_digest(layer))
        config["history"].append({"created": datetime.now(UTC).isoformat(), "created_by": "a file"})
        return _push_changed(client, new_tag, manifest, config)


def _pushed(client: httpx.Client, tag: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest of what is at a tag, and its configuration."""
    manifest = client.get(f"/manifests/{tag}", headers={"accept": MANIFEST}).raise_for_status().json()
    return manifest, client.get(f"/blobs/{manifest['config']['digest']}").raise_for_status().json()


def _push_changed(client: httpx.Client, tag: str, manifest: dict[str, Any], config: Mapping[str, Any]) -> str:
    body = json.dumps(config).encode()
    _push_blob(client, body)
    return _push_manifest(client, tag, manifest | {"config": _entry(CONFIG, body)})


def _push_blob(client: httpx.Client, blob: bytes) -> None:
    place = client.post("/blobs/uploads/").raise_for_status().headers["location"]
    client.put(httpx.URL(place).copy_merge_params({"digest": _digest(blob)}), content=blob).raise_for_status()


def _push_manifest(client: httpx.Client, tag: str, manifest: Mapping[str, object]) -> str:
    pushed = client.put(f"/manifests/{tag}", json=manifest, headers={"content-type": MANIFEST}).raise_for_status()
    return str(pushed.headers["docker-content-digest"])


def _layer(files: Mapping[str, bytes]) -> bytes:
    """Files by their paths; each may be executed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, body in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(body), 0o755
            archive.addfile(member, io.BytesIO(body))
    return packed.getvalue()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _entry(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "size": len(blob), "digest": _digest(blob)}
