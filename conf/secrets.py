"""Hides secrets in settings that are shown: what is not known to be harmless by its name, and what looks like one."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "..."

_FREE = "spark.conf."  # the settings whose names are not this program's

# Spark's settings that are shown: sizes, numbers and switches. Others may be secrets, as `spark.executorEnv.DB`.
_HARMLESS = re.compile(
    r"spark\.(master|app\.name|local\.dir|default\.parallelism|serializer|cores\.max|log\.level"
    r"|(driver|executor)\.(memory|memoryOverhead|memoryOverheadFactor|cores|instances|host|bindAddress|port"
    r"|maxResultSize|heartbeatInterval)"
    r"|(memory|shuffle|task|scheduler|locality|speculation|dynamicAllocation|python)\.[\w.]+"
    r"|sql\.(shuffle|adaptive|streaming|session|files|parquet|execution)\.[\w.]+"
    r"|authenticate|network\.timeout|network\.crypto\.enabled|ui\.(enabled|port)|rpc\.[\w.]+)"
)

# As Spark's spark.redaction.regex, but wider, since access keys have many names.
_NAME = re.compile(
    r"secret|key|token|pass|credential|headers|(?<![a-z])(sas|pw|pwd|dsn)(?![a-z])|signature", re.IGNORECASE
)
_VALUE = re.compile(r"secret|token|pass|credential|access|(?<![a-z])(sas|pw|pwd|sig)=|signature", re.IGNORECASE)
_IN_URL = re.compile(r"(://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether a setting's value may be a secret, by the setting's name, with those of its sections.

    Those of files and durations are none. Of Spark's settings those are none that are known to be harmless.
    """
    if name.startswith(_FREE) and not _HARMLESS.fullmatch(name.removeprefix(_FREE)):
        return True
    return bool(_NAME.search(name)) and not name.lower().endswith(("_file", "_millis"))


def without_secrets(value: Any, name: str = "") -> Any:
    """Returns a setting's value with HIDDEN in place of each secret, also within sections and lists.

    Args:
        value: the value, as in JSON.
        name: the setting's name, with those of its sections; empty for all settings.
    """
    if isinstance(value, dict):
        return {key: without_secrets(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items()}
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
