"""What each role may do, how often, and where the API may be served."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from admin.security import Authenticator, RateLimit, Roles, SecurityError, check_address, tls_options
from admin.tokens import TokenError
from conf.settings import ApiSettings, AuthSettings, Operation, Role
from tests.tokens import SECRET, encoded, token

ORDERS = "persistent://shop/web/orders"
AUTH = AuthSettings.model_validate({"enabled": True, "token_secret_key": encoded(SECRET)})


def roles(*rules: tuple[str, list[str], list[str]]) -> Roles:
    return Roles([Role.model_validate({"role": r, "operations": o, "topics": t}) for r, o, t in rules])


@pytest.mark.parametrize(
    ("pattern", "role", "fits"),
    [
        ("billing", "billing", True),
        ("billing", "Billing", False),
        ("billing", "billing2", False),
        ("billing", "xbilling", False),
        ("bill", "billing", False),
        ("ops-*", "ops-1", True),
        ("ops-*", "ops-", True),
        ("ops-*", "devops-1", False),
        ("*", "anyone", True),
        ("a.c", "abc", False),
        ("a|b", "a", False),
        ("a|b", "a|b", True),
    ],
)
def test_roles_fit_whole_and_only_a_star_stands_for_more(pattern: str, role: str, fits: bool) -> None:
    assert roles((pattern, ["skip"], [ORDERS])).allow(role, Operation.SKIP, ORDERS) is fits


@pytest.mark.parametrize(
    ("pattern", "topic", "fits"),
    [
        (ORDERS, ORDERS, True),
        (ORDERS, f"{ORDERS}2", False),
        (ORDERS, f"{ORDERS}-partition-3", True),
        (ORDERS, f"{ORDERS}-partition-x", False),
        (ORDERS, f"{ORDERS}-partition-3-partition-4", False),
        (f"{ORDERS}-partition-3", ORDERS, False),
        (f"{ORDERS}-partition-3", f"{ORDERS}-partition-3", True),
        (f"{ORDERS}-partition-3", f"{ORDERS}-partition-4", False),
        ("persistent://shop/web/*", ORDERS, True),
        ("persistent://shop/*", ORDERS, True),
        ("persistent://shop/web/*", "persistent://shop/web2/orders", False),
        ("persistent://shop/web/*", "persistent://shop2/web/orders", False),
        ("persistent://shop/web/[a-z]*", ORDERS, False),
        ("*", ORDERS, True),
        ("*", None, True),
        ("persistent://*", None, False),
        (ORDERS, None, False),
    ],
)
def test_topics_fit_whole_with_their_partitions(pattern: str, topic: str | None, fits: bool) -> None:
    assert roles(("billing", ["skip"], [pattern])).allow("billing", Operation.SKIP, topic) is fits


@pytest.mark.parametrize("asked", Operation)
@pytest.mark.parametrize("granted", Operation)
def test_admin_includes_all_and_the_others_only_themselves(granted: Operation, asked: Operation) -> None:
    may = roles(("billing", [granted], ["*"])).allow("billing", asked, ORDERS)
    assert may is (granted in (asked, Operation.ADMIN))


def test_several_rules_for_a_role_add_up_but_do_not_mix() -> None:
    other = "persistent://shop/web/other"
    both = roles(("billing", ["skip"], [ORDERS]), ("bill*", ["cancel"], [other]))
    assert both.allow("billing", Operation.SKIP, ORDERS)
    assert both.allow("billing", Operation.CANCEL, other)
    assert not both.allow("billing", Operation.CANCEL, ORDERS)
    assert not both.allow("billing", Operation.SKIP, other)
    assert not roles().allow("billing", Operation.READ, ORDERS)


@pytest.mark.parametrize(
    ("header", "parameter"),
    [
        (f"Bearer {token('billing')}", None),
        (f"Bearer {token('billing')}", "ignored"),
        (None, token("billing")),
        (None, f"Bearer {token('billing')}"),
    ],
)
def test_a_token_is_in_the_header_or_else_the_parameter(header: str | None, parameter: str | None) -> None:
    assert Authenticator(AUTH).role(header, parameter) == "billing"


@pytest.mark.parametrize(
    ("header", "parameter"),
    [
        (None, None),
        ("", token("billing")),
        ("Bearer ", None),
        ("Bearer", token("billing")),
        (token("billing"), None),
        (f"Basic {token('billing')}", token("billing")),
        (f"Bearer  {token('billing')}", None),
        (None, ""),
    ],
)
def test_anything_else_is_no_token(header: str | None, parameter: str | None) -> None:
    with pytest.raises(TokenError):
        Authenticator(AUTH).role(header, parameter)


def test_a_rate_limit_is_each_callers_own() -> None:
    limit = RateLimit("2/day")
    assert [limit.take("role", "billing") for _ in range(2)] == [0, 0]
    wait = limit.take("role", "billing")
    assert isinstance(wait, int)
    assert 1 <= wait <= 86_400
    assert limit.take("role", "audit") == 0
    assert limit.take("address", "billing") == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_this_machine_is_served_without_authentication(host: str) -> None:
    check_address(host, AuthSettings())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "::ffff:192.0.2.1"])
def test_other_machines_are_served_with_authentication_only(host: str) -> None:
    with pytest.raises(SecurityError, match=r"can be reached from other machines: set auth.enabled, or serve on"):
        check_address(host, AuthSettings())
    check_address(host, AUTH)


def test_a_host_that_is_no_address_is_said() -> None:
    with pytest.raises(SecurityError, match="no address to serve on"):
        check_address("no such host", AuthSettings())


def certificate(folder: Path, encryption: KeySerializationEncryption) -> ApiSettings:
    """A self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "delaylake")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(key, SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(signed.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    return ApiSettings(tls_certificate_file=files[0], tls_key_file=files[1])


def test_tls_is_on_with_a_certificate_and_its_key(tmp_path: Path) -> None:
    settings = certificate(tmp_path, NoEncryption())
    assert tls_options(settings) == {
        "ssl_certfile": str(settings.tls_certificate_file),
        "ssl_keyfile": str(settings.tls_key_file),
    }
    assert tls_options(ApiSettings()) == {}


def test_a_certificate_that_can_not_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mine, other = certificate(tmp_path, NoEncryption()), certificate(tmp_path / "other", NoEncryption())
    locked = certificate(tmp_path / "other", BestAvailableEncryption(b"secret"))
    for settings in (
        ApiSettings(tls_certificate_file=mine.tls_certificate_file, tls_key_file=other.tls_key_file),
        ApiSettings(tls_certificate_file=mine.tls_certificate_file, tls_key_file=tmp_path / "nowhere"),
        ApiSettings(tls_certificate_file=mine.tls_key_file, tls_key_file=mine.tls_key_file),
        locked,
    ):
        with pytest.raises(SecurityError, match=r"can't serve https with") as caught:
            tls_options(settings)
        assert "\n" not in str(caught.value)
