"""Settings as they may be shown: values that are secret by their name, or by their content, are left out."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "..."

# As Spark's spark.redaction.regex, and wider: access keys have many names.
_NAME = re.compile(r"secret|key|token|passw|passphrase|credential|\b(sas|pw|pwd)\b|signature", re.IGNORECASE)
_VALUE = re.compile(r"secret|token|passw|credential|access|\b(sas|pw|pwd|sig)=|signature", re.IGNORECASE)
_IN_URL = re.compile(r"(://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Tells whether the value of a setting is secret, by the setting's name. The name of a file is no secret."""
    return bool(_NAME.search(name)) and not name.lower().endswith("_file")


def without_secrets(value: Any, name: str = "") -> Any:
    """Returns a setting's value to show: HIDDEN for each secret in it, also within sections and lists.

    Args:
        value: as JSON has it.
        name: of the setting, with those of its sections; empty for all settings.
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
    # A value may have secrets among other things, as Java's options do.
    return HIDDEN if _VALUE.search(value) and "=" in value else _IN_URL.sub(rf"\1{HIDDEN}@", value)
