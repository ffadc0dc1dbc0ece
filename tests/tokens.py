"""Keys and tokens as Pulsar's tools make them, and tokens that none of them would."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

SECRET = bytes(range(32))
OTHER_SECRET = bytes(range(1, 33))

PrivateKey = RSAPrivateKey | EllipticCurvePrivateKey


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def der(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def pem(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def token(subject: Any, key: Any = SECRET, algorithm: str = "HS256", **claims: Any) -> str:
    """As `pulsar tokens create`: the algorithm alone in the header, the role in the claim `sub`."""
    return jwt.encode({"sub": subject, **claims}, key, algorithm, headers={"typ": None})


def forged(header: dict[str, Any], claims: Any, secret: bytes | None) -> str:
    """A token that a library refuses to make: signed with HMAC-SHA256 by any bytes, or with nothing."""
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signature = b"" if secret is None else hmac.digest(secret, b".".join(parts), hashlib.sha256)
    return b".".join([*parts, base64.urlsafe_b64encode(signature).rstrip(b"=")]).decode()
