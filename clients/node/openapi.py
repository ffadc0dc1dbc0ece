"""Prints what clients take their types from: the schemas of the API's OpenAPI document, without a running API."""

from __future__ import annotations

import json
import tempfile

from admin.app import create_app
from conf.settings import Settings


def described() -> str:
    """Returns the document's schemas as an OpenAPI document without paths."""
    with tempfile.TemporaryDirectory() as folder:
        api = create_app(Settings(warehouse=folder, routes=())).openapi()
    parts = {"openapi": api["openapi"], "info": {"title": "delaylake", "version": "1"}, "paths": {}}
    return json.dumps(parts | {"components": api["components"]})


if __name__ == "__main__":
    print(described())
