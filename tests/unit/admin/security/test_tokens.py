"""A token is taken if the broker would take it, and for nothing else."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import example, given
from hypothesis import strategies as st

from admin.security.tokens import TokenError, TokenKeyError, TokenVerifier
from conf.api_settings import AuthSettings
from tests.support.clients.tokens import OTHER_SECRET, SECRET, der, encoded, forged, pem, token

RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
P256, P384, P521 = (ec.generate_private_key(curve) for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()))


def verifier(**settings: Any) -> TokenVerifier:
    if "token_public_key" not in settings:
        settings = {"token_secret_key": encoded(SECRET), **settings}
    return TokenVerifier.from_settings(AuthSettings(enabled=True, **settings))


def refusal(token: str, **settings: Any) -> str:
    with pytest.raises(TokenError) as caught:
        verifier(**settings).role(token)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "key"), [("HS256", bytes(32)), ("HS256", bytes(64)), ("HS384", bytes(48)), ("HS512", bytes(64))]
)
def test_a_secret_fits_the_algorithms_that_it_is_long_enough_for(name: str, key: bytes) -> None:
    assert verifier(token_secret_key=encoded(key)).role(token("billing", key, name)) == "billing"


@pytest.mark.parametrize(("name", "size"), [("HS384", 47), ("HS512", 48), ("HS512", 63)])
@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
def test_a_secret_that_is_too_short_for_the_algorithm_fits_no_token(name: str, size: int) -> None:
    key = bytes(size)
    assert refusal(token("billing", key, name), token_secret_key=encoded(key)) == "the token is not accepted"


@pytest.mark.parametrize("name", ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"])
@pytest.mark.parametrize("configured", ["RS256", "PS512"])
def test_an_rsa_key_fits_all_rsa_algorithms_as_at_the_broker(name: str, configured: str) -> None:
    check = verifier(token_public_key=encoded(der(RSA)), token_public_alg=configured)
    assert check.role(token("billing", RSA, name)) == "billing"


@pytest.mark.parametrize(("name", "key"), [("ES256", P256), ("ES384", P384), ("ES512", P521)])
def test_an_elliptic_curve_key_fits_its_own_algorithm(name: str, key: ec.EllipticCurvePrivateKey) -> None:
    check = verifier(token_public_key=encoded(der(key)), token_public_alg=name)
    assert check.role(token("billing", key, name)) == "billing"
    assert check.algorithms == [name]


def test_keys_come_from_files_data_urls_and_base64(tmp_path: Path) -> None:
    binary, text = tmp_path / "secret.key", tmp_path / "public.pem"
    binary.write_bytes(SECRET)
    text.write_bytes(pem(RSA))
    for given_as in (
        f"file://{binary}",
        f"file:{binary}",
        f" {encoded(SECRET)}\n",
        f"data:;base64,{encoded(SECRET)}",
        f"data:application/octet-stream;base64,{encoded(SECRET)}",
        f"data:,{quote(SECRET)}",
    ):
        assert verifier(token_secret_key=given_as).role(token("billing")) == "billing", given_as
    for given_as in (f"file://{text}", pem(RSA).decode(), f"data:;base64,{encoded(der(RSA))}", encoded(pem(RSA))):
        assert verifier(token_public_key=given_as).role(token("billing", RSA, "RS256")) == "billing", given_as


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"token_secret_key": encoded(bytes(31))}, "31 bytes: at least 32"),
        ({"token_secret_key": "file:/nowhere/secret.key"}, "can't read file:/nowhere/secret.key: No such file"),
        ({"token_secret_key": "hunter2!"}, "is neither file:..., nor data:..., nor base64"),
        ({"token_secret_key": "data:;base64,hunter2!"}, "is neither file:..., nor data:..., nor base64"),
        ({"token_secret_key": encoded(der(RSA))}, "is a public key"),
        ({"token_secret_key": encoded(pem(RSA))}, "is a public key"),
        ({"token_public_key": encoded(SECRET)}, "no public key in DER or PEM"),
        ({"token_public_key": encoded(b"-----BEGIN PUBLIC KEY-----")}, "no public key in DER or PEM"),
        ({"token_public_key": encoded(der(P256))}, "token_public_alg is RS256, but the key is for ES256"),
        ({"token_public_key": encoded(der(P256)), "token_public_alg": "ES384"}, "but the key is for ES256"),
        ({"token_public_key": encoded(der(RSA)), "token_public_alg": "ES256"}, "but the key is for RS256"),
        (
            {
                "token_public_key": encoded(
                    ed25519.Ed25519PrivateKey.generate()
                    .public_key()
                    .public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
                )
            },
            "neither RSA nor of the curves",
        ),
        ({"token_public_key": encoded(der(ec.generate_private_key(ec.SECP256K1())))}, "neither RSA nor of the curves"),
        ({"token_public_key": encoded(der(rsa.generate_private_key(65537, 1024)))}, "1024 bits"),
    ],
)
def test_a_key_that_can_not_be_used_is_said_without_the_key(settings: dict[str, str], expected: str) -> None:
    with pytest.raises(TokenKeyError) as caught:
        verifier(**settings)
    text = str(caught.value)
    assert expected in text
    assert "\n" not in text
    assert "hunter2" not in text


NOW = int(time.time())
PUBLIC = {"token_public_key": encoded(der(RSA))}


@pytest.mark.parametrize(
    ("sent", "settings", "expected"),
    [
        (token("billing", exp=NOW - 1), {}, "the token has expired"),
        (token("billing", nbf=NOW + 3600), {}, "the token is not valid yet"),
        (token("billing", exp="soon"), {}, "the token is not accepted"),
        (token("billing", OTHER_SECRET), {}, "the token is not accepted"),
        (token("billing", OTHER_RSA, "RS256"), PUBLIC, "the token is not accepted"),
        (token("billing")[:-4] + "AAAA", {}, "the token is not accepted"),
        (token("billing", None, "none"), {}, "the token is not accepted"),
        (token("billing", None, "none"), PUBLIC, "the token is not accepted"),
        (forged({"alg": "None"}, {"sub": "billing"}, None), {}, "the token is not accepted"),
        (forged({"alg": "HS256"}, {"sub": "billing"}, None), {}, "the token is not accepted"),
        (forged({"alg": "HS256"}, {"sub": "billing"}, der(RSA)), PUBLIC, "the token is not accepted"),
        (forged({"alg": "HS256"}, {"sub": "billing"}, pem(RSA)), PUBLIC, "the token is not accepted"),
        (forged({"alg": "HS256"}, {"sub": "billing"}, encoded(der(RSA)).encode()), PUBLIC, "the token is not accepted"),
        (forged({}, {"sub": "billing"}, SECRET), {}, "the token is not accepted"),
        (forged({"alg": ["HS256"]}, {"sub": "billing"}, SECRET), {}, "the token is not accepted"),
        (forged({"alg": "HS256"}, ["sub"], SECRET), {}, "the token is not accepted"),
        (forged({"alg": "HS256", "crit": ["exp"]}, {"sub": "billing"}, SECRET), {}, "the token is not accepted"),
        (token("billing", RSA, "RS256"), {}, "the token is not accepted"),
        (token("x" * 20_000), {}, "the token is too long"),
        (token("ä" * 513), {}, "the token's role has more than 1,024 bytes"),
        (forged({"alg": "HS256"}, {}, SECRET), {}, "the token names no role"),
        (token(""), {}, "the token names no role"),
        (token("a\nb"), {}, "the token names no role"),
        (token("\ud800"), {}, "the token names no role"),
        (token(7), {}, "the token names no role"),
        (token([]), {}, "the token names no role"),
        (token("billing"), {"token_auth_claim": "role"}, "the token names no role"),
    ],
    ids=lambda value: (
        value if isinstance(value, str) and value.startswith("the token") else ""
    ),  # not the keys of this run
)
def test_what_is_refused(sent: str, settings: dict[str, Any], expected: str) -> None:
    assert refusal(sent, **settings) == expected


def test_the_forged_tokens_are_well_made() -> None:
    """Each would be taken by a verifier without the care of ours."""
    assert verifier().role(forged({"alg": "HS256"}, {"sub": "billing"}, SECRET)) == "billing"
    assert jwt.decode(token("billing", None, "none"), options={"verify_signature": False}) == {"sub": "billing"}
    text = encoded(der(RSA))
    by_public_key = forged({"alg": "HS256"}, {"sub": "billing"}, text.encode())
    assert jwt.decode(by_public_key, text, algorithms=["HS256"]) == {"sub": "billing"}


def test_the_list_of_algorithms_counts_whatever_the_key() -> None:
    sent = token("billing")
    assert TokenVerifier(SECRET, ["HS256"]).role(sent) == "billing"
    with pytest.raises(TokenError):
        TokenVerifier(SECRET, ["RS256"]).role(sent)


def test_what_is_valid_now_is_taken_whatever_else_it_says() -> None:
    sent = token("billing", exp=NOW + 3600, nbf=NOW - 1, iat=NOW + 3600, aud="elsewhere", iss="someone", jti=7)
    assert verifier().role(sent) == "billing"


def test_the_role_is_in_the_claim_that_the_settings_name() -> None:
    assert verifier(token_auth_claim="role").role(token("someone", role="billing")) == "billing"
    assert verifier(token_auth_claim="roles").role(token("someone", roles=["billing", "audit"])) == "billing"


@pytest.mark.parametrize("audience", ["pulsar", ["other", "pulsar"]])
def test_a_token_for_the_audience_is_taken(audience: object) -> None:
    check = verifier(token_audience_claim="aud", token_audience="pulsar")
    assert check.role(token("billing", aud=audience)) == "billing"


@pytest.mark.parametrize("claims", [{}, {"aud": "other"}, {"aud": ["other"]}, {"aud": 7}, {"aud": {"pulsar": 1}}])
def test_a_token_for_another_audience_is_refused(claims: dict[str, Any]) -> None:
    said = refusal(token("billing", **claims), token_audience_claim="aud", token_audience="pulsar")
    assert said == "the token is for another audience"


CHECK = verifier()


@given(st.text())
@example("..")
@example(f"{base64.urlsafe_b64encode(b'[' * 10_000).decode().rstrip('=')}.e30.AA")
@example(f"{base64.urlsafe_b64encode(b'{' * 5_000).decode().rstrip('=')}.e30.AA")
@example("\u0661.\u0661.\u0661")
def test_any_text_is_refused_in_one_way(text: str) -> None:
    with pytest.raises(TokenError):
        CHECK.role(text)


@given(st.data())
def test_a_token_that_was_changed_anywhere_is_refused(data: st.DataObject) -> None:
    sent = bytearray(token("billing").encode())
    at = data.draw(st.integers(0, len(sent) - 2))  # the last one has bits that do not count
    sent[at] = data.draw(st.integers(0, 127).filter(lambda byte: byte != sent[at]))
    with pytest.raises(TokenError):
        CHECK.role(sent.decode())
