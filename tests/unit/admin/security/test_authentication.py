"""What each role may do, how often, and where the API may be served."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption

from admin.security.authentication import (
    Authenticator,
    RateLimit,
    Roles,
    SecurityError,
    check_address,
    check_certificate,
    hide_tokens,
)
from admin.security.tokens import TokenError
from conf.api_settings import ApiSettings, AuthSettings, Operation, Role
from tests.support.clients.tokens import SECRET, certificate, encoded, token

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
        (f"{ORDERS}-*", ORDERS, False),
        (f"{ORDERS}-*", f"{ORDERS}-partition-0", False),
        (f"{ORDERS}-*", f"{ORDERS}-eu-partition-0", True),
        (f"{ORDERS}-partition-*", ORDERS, False),
        (f"{ORDERS}-partition-*", f"{ORDERS}-partition-12", True),
        (f"{ORDERS}-partition-*", f"{ORDERS}-eu-partition-12", False),
        ("persistent://shop/web/*-partition-0", f"{ORDERS}-partition-0", True),
        ("persistent://shop/web/*-partition-0", f"{ORDERS}-partition-10", False),
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
def test_admin_includes_all_and_skip_one_more(granted: Operation, asked: Operation) -> None:
    may = roles(("billing", [granted], ["*"])).allow("billing", asked, ORDERS)
    includes = {(Operation.SKIP, Operation.ACKNOWLEDGE)}
    assert may is (granted in (asked, Operation.ADMIN) or (granted, asked) in includes)


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


def test_the_log_of_accesses_has_no_tokens() -> None:
    arguments = ("127.0.0.1:1", "POST", "/x?ledgerId=1&token=secret&entryId=2", "1.1", 204)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)
    assert hide_tokens(record)
    assert record.getMessage() == '127.0.0.1:1 - "POST /x?ledgerId=1&token=...&entryId=2 HTTP/1.1" 204'


def test_a_rate_limit_is_each_callers_own() -> None:
    limit = RateLimit("2/day")
    assert [limit.take("role", "billing") for _ in range(2)] == [0, 0]
    wait = limit.take("role", "billing")
    assert isinstance(wait, int)
    assert 1 <= wait <= 86_400
    assert limit.take("role", "audit") == 0
    assert limit.take("address", "billing") == 0


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
def test_this_machine_is_served_without_authentication(address: str) -> None:
    check_address(address, AuthSettings())


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1", "::ffff:192.0.2.1", "fe80::1%eth0"])
def test_other_machines_are_served_with_authentication_only(address: str) -> None:
    with pytest.raises(SecurityError, match=r"can be reached from other machines: set auth.enabled, or serve on"):
        check_address(address, AuthSettings())
    check_address(address, AUTH)


def test_a_certificate_and_its_key_are_fine_and_so_is_none(tmp_path: Path) -> None:
    check_certificate(certificate(tmp_path))
    check_certificate(ApiSettings())


def test_a_certificate_that_can_not_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mine, other = certificate(tmp_path), certificate(tmp_path / "other")
    locked = certificate(tmp_path / "other", BestAvailableEncryption(b"secret"))
    for settings in (
        ApiSettings(tls_certificate_file=mine.tls_certificate_file, tls_key_file=other.tls_key_file),
        ApiSettings(tls_certificate_file=mine.tls_certificate_file, tls_key_file=tmp_path / "nowhere"),
        ApiSettings(tls_certificate_file=mine.tls_key_file, tls_key_file=mine.tls_key_file),
        locked,
    ):
        with pytest.raises(SecurityError, match=r"can't serve https with") as caught:
            check_certificate(settings)
        assert "\n" not in str(caught.value)
