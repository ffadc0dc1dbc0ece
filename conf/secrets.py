"""Hides secrets in settings that are shown: values that are secret by their name or by their content."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "..."

# As Spark's spark.redaction.regex, but wider, since access keys have many names.
_NAME = re.compile(r"secret|key|token|passw|passphrase|credential|\b(sas|pw|pwd)\b|signature", re.IGNORECASE)
_VALUE = re.compile(r"secret|token|passw|credential|access|\b(sas|pw|pwd|sig)=|signature", re.IGNORECASE)
_IN_URL = re.compile(r"(://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether a setting's value is secret, by the setting's name. File names are not."""
    return bool(_NAME.search(name)) and not name.lower().endswith("_file")


def without_secrets(value: Any, name: str = "") -> Any:
    """Returns a setting's value with HIDDEN in place of each secret, also within sections and lists.

    Args:
        value: the value, as in JSON.
        name: the setting's name, with those of its sections; empty for all settings.
    """
    if isinstance(value, dict):
        return {key: without_secrets(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(inner, name) for inner in value]
    if value is None or isinstance(value, bool):
        return value
    if is_secret(name):
        return HIDDEN
    if not isinstance(value, str):
        return value
    # A value may contain a secret, as Java's options may.
    return HIDDEN if _VALUE.search(value) and "=" in value else _IN_URL.sub(rf"\1{HIDDEN}@", value)
