"""Topics on pages are called by what tells them apart."""

from __future__ import annotations

import pytest

from admin.dashboard.responses import short_names, topic_html

ORDERS = "persistent://shop/web/orders"


@pytest.mark.parametrize(
    ("topics", "names"),
    [
        ([], []),
        ([ORDERS], ["orders"]),
        ([ORDERS, "persistent://shop/web/mail"], ["orders", "mail"]),
        ([ORDERS, "persistent://shop/app/orders"], ["web/orders", "app/orders"]),
        ([ORDERS, "persistent://bank/web/orders"], ["shop/web/orders", "bank/web/orders"]),
    ],
)
def test_what_all_topics_share_is_left_out(topics: list[str], names: list[str]) -> None:
    assert list(short_names(topics).values()) == names


def test_the_whole_name_is_in_the_tooltip_and_nothing_in_it_is_markup() -> None:
    assert topic_html(ORDERS, {ORDERS: "orders"}) == f'<span title="{ORDERS}">orders</span>'
    assert topic_html("persistent://a/b/<i>", {}) == '<span title="persistent://a/b/&lt;i&gt;">a/b/&lt;i&gt;</span>'
    assert topic_html(None, {}) == ""
