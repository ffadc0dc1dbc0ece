"""Debian's Chromium, for the dashboard's tests and pictures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_MISSING = "the dashboard's tests need Chromium: apt-get install chromium"
_IS_THERE = """() => !document.querySelector('[aria-busy="true"]')
    && !/counting|loading …|asking the job/.test((document.querySelector("main") ?? document.body).innerText)"""
_OPTIONS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"


def need_chromium() -> None:
    """Skips the tests where there is no browser; fails them if CI is set in the environment."""
    if shutil.which("chromium") is None:
        if os.environ.get("CI"):
            pytest.fail(_MISSING)
        pytest.skip(_MISSING)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    # It takes half a second, and most that import this module start no browser.
    from playwright.sync_api import expect, sync_playwright

    program = shutil.which("chromium")
    assert program, _MISSING
    with sync_playwright() as playwright:
        options = [*_OPTIONS.split(), "--disable-component-update", "--disable-sync"]
        expect.set_options(timeout=60_000)
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=options)
        try:
            yield browser
        finally:
            browser.close()


def wait_until_loaded(page: Page, timeout_millis: float = 60_000) -> None:
    """Waits until a page of the dashboard has all that it asks for by itself after it was opened.

    Raises:
        playwright.sync_api.TimeoutError: that took longer.
    """
    page.wait_for_load_state()
    page.wait_for_function(_IS_THERE, timeout=timeout_millis)
