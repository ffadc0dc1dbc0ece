"""Settings from the environment, and variables that look like settings and are none."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

from conf.secrets import is_secret
from conf.settings_file import brief


class EnvironmentSource(EnvSettingsSource):
    """Reads the environment; what is no JSON where JSON is wanted stays a text, so that its error names the setting."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except (ValueError, RecursionError):
            return value


def unknown_variables(prefix: str, settings: type[BaseModel]) -> list[str]:
    """Returns a line for each environment variable of a setting in an unknown section, or with one `_` after it.

    Other variables without `__`, such as DELAYLAKE_CACHE, are not settings. Nor are those that Kubernetes sets for a
    service, as DELAYLAKE_API_PORT=tcp://10.0.0.1:8081.

    Args:
        prefix: the prefix of environment variables that are settings.
    """
    models = {name: type(field.default) for name, field in settings.model_fields.items()}
    sections = {name: model for name, model in models.items() if issubclass(model, BaseModel)}
    single = {f"{name}_{inner}": f"{name}__{inner}" for name, model in sections.items() for inner in model.model_fields}
    lines = []
    for variable, value in sorted(os.environ.items()):
        if not variable.upper().startswith(prefix):
            continue
        named = variable.lower().removeprefix(prefix.lower())
        section, separator, name = named.partition("__")
        setting = f"{section}.{name.replace('__', '.')}"
        shown = "" if is_secret(setting) else f" = {brief(value)}"
        if separator and section not in (*sections, "routes"):
            lines.append(f"{variable}: {setting}{shown}: no such setting")
        elif named in single and not value.startswith(("tcp://", "udp://")):
            lines.append(f"{variable}: no such setting: write {prefix}{single[named].upper()}")
    return lines
