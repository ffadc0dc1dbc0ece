"""Debian's Chromium, for the dashboard's tests and pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
_OPTIONS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    assert CHROMIUM.exists(), "the dashboard's tests need Chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        options = [*_OPTIONS.split(), "--disable-component-update", "--disable-sync"]
        expect.set_options(timeout=60_000)
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), headless=True, args=options)
        try:
            yield browser
        finally:
            browser.close()
