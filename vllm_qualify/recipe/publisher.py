"""The key of a model's publisher, as Open Model Signing has it."""

import hashlib
from collections.abc import Mapping

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

# By the size of the curve, as Sigstore's bundles have it.
HASHES: Mapping[int, hashes.HashAlgorithm] = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}


def public_key(pem: str) -> ec.EllipticCurvePublicKey:
    """Raises ValueError if it is not the public key of a model's publisher, on P-256, P-384 or P-521."""
    try:
        key = load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError("not a public key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.key_size not in HASHES:
        raise ValueError("not a key on the curves P-256, P-384 or P-521, which Open Model Signing uses")
    return key


def key_id(pem: str) -> str:
    """The key's SHA-256, as a bundle names it. Raises as `public_key`."""
    written = public_key(pem).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(written).hexdigest()
