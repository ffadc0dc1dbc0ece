"""Pulsar's tokens: JSON Web Tokens, checked as the broker's AuthenticationProviderToken does."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, SECP521R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_der_public_key, load_pem_public_key

from conf.api_settings import AuthSettings
from conf.errors import DelayLakeError
from conf.settings import local_path
from tracker.schemas import MAX_NAME_BYTES

MAX_TOKEN_BYTES = 16_384  # a longer token is refused without being decoded

_DATA_URL = re.compile(r"data:[^,]*?(?P<base64>;base64)?,(?P<data>.*)", re.DOTALL)

# The minimum length of a secret in bytes, by algorithm (RFC 7518, 3.2).
_SECRET_BYTES = {"HS256": 32, "HS384": 48, "HS512": 64}
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_RSA_BITS = 2048
_CURVES = {SECP256R1.name: "ES256", SECP384R1.name: "ES384", SECP521R1.name: "ES512"}


class TokenKeyError(DelayLakeError):
    """The key for tokens can't be read, or fits no algorithm. The message is one line, without the key."""


class TokenError(DelayLakeError):
    """A token is not accepted. The message is one line, and safe to show to the caller."""


@dataclass(frozen=True)
class TokenVerifier:
    """Checks tokens with one key.

    The algorithms are those of the key's kind, whatever a token's header names: no unsigned token is accepted, and none
    that is signed with the public key as if that were a secret.

    Attributes:
        key: a secret (bytes) or a public key.
        algorithms: the accepted algorithms of JWT.
        auth_claim: the claim with the role.
        audience_claim: the claim with the audience; None: it is not checked.
        audience: the audience that a token must have.
    """

    key: Any
    algorithms: Sequence[str]
    auth_claim: str = "sub"
    audience_claim: str | None = None
    audience: str | None = None

    @classmethod
    def from_settings(cls, settings: AuthSettings) -> TokenVerifier:
        """Reads the key that the settings name.

        Raises:
            TokenKeyError: the key can't be read, is too weak, or is not of the kind of `token_public_alg`.
        """
        key: Any
        if settings.token_secret_key is not None:
            key = _read("token_secret_key", settings.token_secret_key.get_secret_value())
            if _load(key) is not None:
                raise TokenKeyError("auth.token_secret_key is a public key: it belongs to auth.token_public_key")
            algorithms: Sequence[str] = [name for name, least in _SECRET_BYTES.items() if len(key) >= least]
            if not algorithms:
                raise TokenKeyError(f"auth.token_secret_key has {len(key)} bytes: at least 32 are needed")
        else:
            key, algorithms = _public_key(settings.token_public_key or "")
            if settings.token_public_alg not in algorithms:
                raise TokenKeyError(
                    f"auth.token_public_alg is {settings.token_public_alg}, but the key is for {', '.join(algorithms)}"
                )
        return cls(key, algorithms, settings.token_auth_claim, settings.token_audience_claim, settings.token_audience)

    def role(self, token: str) -> str:
        """Returns the role in a token; the first one if it has a list.

        Raises:
            TokenError: the text is not a token, or the token is not signed with the key, not valid now, for another
                audience, or without a role.
        """
        claims = self._claims(token)
        if self.audience_claim is not None:
            audiences = claims.get(self.audience_claim)
            if self.audience not in (audiences if isinstance(audiences, list) else [audiences]):
                raise TokenError("the token is for another audience")
        role = claims.get(self.auth_claim)
        if isinstance(role, list) and role:
            role = role[0]  # as the broker does
        if not isinstance(role, str) or not role.strip() or not role.isprintable():
            raise TokenError("the token names no role")
        if len(role.encode()) > MAX_NAME_BYTES:
            raise TokenError(f"the token's role has more than {MAX_NAME_BYTES:,} bytes")
        return role

    def _claims(self, token: str) -> dict[str, Any]:
        if len(token) > MAX_TOKEN_BYTES:
            raise TokenError("the token is too long")
        try:
            return jwt.decode(
                token,
                self.key,
                algorithms=self.algorithms,
                # The broker does not check these claims.
                options={"verify_aud": False, "verify_iat": False, "verify_sub": False, "verify_jti": False},
            )
        except jwt.ExpiredSignatureError:
            raise TokenError("the token has expired") from None
        except jwt.ImmatureSignatureError:
            raise TokenError("the token is not valid yet") from None
        except jwt.PyJWTError:
            # The text does not say what is wrong, so as not to help forgers.
            raise TokenError("the token is not accepted") from None


def _public_key(value: str) -> tuple[Any, Sequence[str]]:
    key = _load(_read("token_public_key", value))
    if key is None:
        raise TokenKeyError("auth.token_public_key is no public key in DER or PEM")
    if isinstance(key, RSAPublicKey):
        if key.key_size < _RSA_BITS:
            raise TokenKeyError(f"auth.token_public_key has {key.key_size} bits: at least {_RSA_BITS} are needed")
        return key, _RSA
    if isinstance(key, EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return key, [_CURVES[key.curve.name]]
    raise TokenKeyError("auth.token_public_key is neither RSA nor of the curves P-256, P-384 and P-521")


def _load(data: bytes) -> object | None:
    """Reads a public key in DER, as Pulsar's tools write it, or in PEM; None: the bytes are not a public key."""
    try:
        return load_pem_public_key(data) if data.lstrip().startswith(b"-----") else load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        return None


def _read(name: str, value: str) -> bytes:
    """Returns a key's bytes from a file, a data URL, base64 or PEM, as in Pulsar's settings.

    Args:
        name: name of the setting, for the error.

    Raises:
        TokenKeyError: the file can't be read, or the value is none of these.
    """
    value = value.strip()
    if value.startswith("file:"):
        try:
            return Path(local_path(value)).read_bytes()
        except OSError as error:
            raise TokenKeyError(f"auth.{name}: can't read {value}: {error.strerror}") from None
    if value.startswith("-----"):
        return value.encode()
    encoded: str | bytes = value
    if match := _DATA_URL.fullmatch(value):
        encoded = unquote_to_bytes(match["data"])
        if not match["base64"]:
            return encoded
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise TokenKeyError(f"auth.{name} is neither file:..., nor data:..., nor base64") from None
