"""The library that the clients call the admin API with: the one place that imports it, by which it can be replaced.

It is httpx, which has had no release since 2024-12. Its successor is Pydantic's httpx2, with the same names. It needs
Python 3.11, and an application's own `http=` would have to be a client of it: so it is for a new major version of this
package. Then the import below is all that changes here.
"""

from __future__ import annotations

import httpx

__all__ = ["httpx"]
