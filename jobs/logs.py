"""Configures the log: lines on stderr, as text or JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from conf.errors import printable


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


class TextFormatter(logging.Formatter):
    """Formats a record as text that can't control a terminal, whoever has written parts of it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line, or lines, without what the exception says."""
        return printable(super().formatMessage(record), kept="\n\t")


def name_settings(file: Path | None) -> None:
    """Logs the settings file that the program has read, whatever the log's level."""
    log = logging.getLogger("delaylake")
    log.setLevel(logging.INFO)
    log.info("settings: %s", file)


def configure(level: int, form: LogFormat) -> None:
    """Makes the program log to stderr from now on.

    Args:
        level: the lowest level that is logged, as in `logging`.
        form: text or JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("py4j", "httpx", "httpcore", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
