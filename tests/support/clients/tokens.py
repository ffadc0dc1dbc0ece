"""Keys and tokens as Pulsar's tools make them, tokens that none of them would, and certificates."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import ipaddress
import json
from pathlib import Path
from typing import Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from conf.api_settings import ApiSettings

SECRET = bytes(range(32))
OTHER_SECRET = bytes(range(1, 33))

PrivateKey = RSAPrivateKey | ec.EllipticCurvePrivateKey


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


def certificate(folder: Path, encryption: KeySerializationEncryption | None = None) -> ApiSettings:
    """A self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "delaylake")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(key, SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(signed.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption()))
    return ApiSettings(tls_certificate_file=files[0], tls_key_file=files[1])
