"""Debian's docker-registry, without Docker Engine: one store, served at four addresses that let one in in four ways."""

import base64
import hashlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from tests.ci import IN_CI
from tests.releases.service import Answer, Asked, Service, serving
from vllm_qualify.engine.confinement import quiet_environment
from vllm_qualify.engine.process import running_guarded, tail

PROGRAM = "docker-registry"
USER, PASSWORD, IDENTITY = "tester", "secret", "a-refresh-token"
BASIC = f"Basic {base64.b64encode(f'{USER}:{PASSWORD}'.encode()).decode()}"
# Of PASSWORD, by bcrypt: the registry takes no other.
HTPASSWD = f"{USER}:$2b$05$aaaaaaaaaaaaaaaaaaaaaOjOHCcGZ1ZydhnG2lX11qSmiRJbsbsA.\n"
SERVICE, ISSUER = "tests", "tests-tokens"
WEBHOOK_SECRET = "a-webhook's-secret"
NOTIFIED = f'headers: {{Authorization: ["Bearer {WEBHOOK_SECRET}"]}}, timeout: 5s, threshold: 5, backoff: 1s'


@dataclass(frozen=True)
class Registries:
    """Addresses of one and the same content; the requests to its token server, and those to the webhook of the open one."""

    open: str
    basic: str
    token: str
    tls: str
    certificate: Path
    tokens: Service
    webhook: Service
    client: httpx.Client

    def push(self, name: str, tag: str, content: str = "", media_type: str = "application/vnd.oci.image.index.v1+json") -> str:
        """Push an index without images, the same for the same content. Its digest."""
        body = json.dumps({"schemaVersion": 2, "mediaType": media_type, "manifests": [], "annotations": {"content": content}})
        return self.push_manifest(name, tag, body.encode(), media_type)

    def push_manifest(self, name: str, tag: str, body: bytes, media_type: str) -> str:
        headers = {"Content-Type": media_type}
        self.client.put(f"/v2/{name}/manifests/{tag}", content=body, headers=headers).raise_for_status()
        return f"sha256:{hashlib.sha256(body).hexdigest()}"


@contextmanager
def registries(folder: Path) -> Iterator[Registries]:
    if shutil.which(PROGRAM) is None:
        give_up = pytest.fail if IN_CI else pytest.skip
        give_up(f"no {PROGRAM}: infra/docker.sh install")
    key, certificate = _key_and_certificate(folder)
    (folder / "htpasswd").write_text(HTPASSWD)
    with ExitStack() as parts:
        tokens = parts.enter_context(serving(lambda asked: _grant(asked, key, certificate)))
        webhook = parts.enter_context(serving(lambda _: Answer()))
        token = f"realm: 'http://{tokens.address}/token?kept=1', service: {SERVICE}, issuer: {ISSUER}"
        ways = {
            "open": f"notifications: {{endpoints: [{{name: ours, url: 'http://{webhook.address}/', {NOTIFIED}}}]}}",
            "basic": f"auth: {{htpasswd: {{realm: tests, path: {folder / 'htpasswd'}}}}}",
            "token": f"auth: {{token: {{{token}, rootcertbundle: {certificate}}}}}",
            "tls": f"tls: {{certificate: {certificate}, key: {folder / 'key.pem'}}}",
        }
        addresses = {name: parts.enter_context(_served(folder, name, settings)) for name, settings in ways.items()}
        client = parts.enter_context(httpx.Client(base_url=f"http://{addresses['open']}"))
        yield Registries(**addresses, certificate=certificate, tokens=tokens, webhook=webhook, client=client)


@contextmanager
def _served(folder: Path, name: str, settings: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    http, others = (f", {settings}", "") if name == "tls" else ("", settings)
    written = folder / f"{name}.yml"
    written.write_text(
        f"version: 0.1\nlog: {{accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: '{address}', secret: tests{http}}}\n{others}\n"
    )
    with running_guarded([PROGRAM, "serve", str(written)], quiet_environment(), folder / f"{name}.log") as process:
        deadline = time.monotonic() + 60
        while not _listens(address):
            assert process.exit_code() is None, tail(process.log)
            assert time.monotonic() < deadline, tail(process.log)
            time.sleep(0.05)  # the program is loaded meanwhile
        yield address


def _listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


# --- tokens, as the registry verifies them


def _grant(asked: Asked, key: ec.EllipticCurvePrivateKey, certificate: Path) -> Answer:
    """A token that allows to pull; for who is known alone."""
    query = parse_qs(urlsplit(asked.path).query)
    form = parse_qs(asked.body.decode())
    if form.get("refresh_token") == [IDENTITY] and form["grant_type"] == ["refresh_token"] and form["service"] == [SERVICE]:
        return Answer(body=json.dumps({"access_token": _jwt(form["scope"][0], key, certificate)}).encode())
    if asked.method == "GET" and asked.headers.get("authorization") == BASIC and query["service"] == [SERVICE]:
        return Answer(body=json.dumps({"token": _jwt(query["scope"][0], key, certificate)}).encode())
    return Answer(401)


def _jwt(scope: str, key: ec.EllipticCurvePrivateKey, certificate: Path) -> str:
    kind, name, _ = scope.split(":")
    now = int(time.time())
    der = x509.load_pem_x509_certificate(certificate.read_bytes()).public_bytes(serialization.Encoding.DER)
    header = {"typ": "JWT", "alg": "ES256", "x5c": [base64.b64encode(der).decode()]}
    access = [{"type": kind, "name": name, "actions": ["pull"]}]
    claims = {"iss": ISSUER, "sub": USER, "aud": SERVICE, "exp": now + 300, "nbf": now - 5, "iat": now, "access": access}
    signed = f"{_base64url(json.dumps(header).encode())}.{_base64url(json.dumps(claims).encode())}"
    r, s = decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{signed}.{_base64url(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def _base64url(body: bytes) -> str:
    return base64.urlsafe_b64encode(body).rstrip(b"=").decode()


def _key_and_certificate(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, Path]:
    """Of 127.0.0.1, signed by itself."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    (folder / "key.pem").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    return key, folder / "certificate.pem"
