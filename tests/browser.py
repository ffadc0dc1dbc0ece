"""Debian's Chromium, for the dashboard's tests and pictures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

_MISSING = "the dashboard's tests need Chromium: apt-get install chromium"
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
