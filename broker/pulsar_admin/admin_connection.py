"""Sends requests with the token to Pulsar's admin REST API, at the broker that owns the topic."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from broker.client import NoAnswerError, PulsarError, token_reader, trusted_certificates
from conf.errors import one_line
from conf.settings import PulsarSettings

if TYPE_CHECKING:
    import httpx

_REDIRECTS = (307, 308)  # the answer of a broker that does not own the topic

_MOST_REDIRECTS = 5


def http_client(settings: PulsarSettings, **options: Any) -> httpx.Client:
    """Makes an HTTP client that sends the token and trusts the certificates of the `pulsar` section.

    Args:
        settings: the `pulsar` section.
        options: further options of `httpx.Client`.

    Raises:
        PulsarError: the token file or the certificates can't be read.
    """
    import httpx

    verify = trusted_certificates(settings) if settings.trust_certs_file is not None else True
    auth = _bearer(token_reader(settings.token_file)) if settings.token_file is not None else None
    return httpx.Client(auth=auth, verify=verify, trust_env=False, **options)


class AdminConnection:
    """A connection to the admin REST API. One connection pool; safe in several threads."""

    def __init__(self, settings: PulsarSettings, timeout_seconds: float) -> None:
        self.url = settings.admin_url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._http = http_client(settings, base_url=f"{self.url}/admin/v2/", timeout=timeout_seconds)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def json(self, method: str, path: str) -> Any:
        """Sends a request, and returns the JSON of its answer. Raises as `request` and `body`."""
        return self.body(self.request(method, path))

    def body(self, response: httpx.Response) -> Any:
        """Returns the JSON of an answer.

        Raises:
            PulsarError: the answer's status is not 200.
        """
        if response.status_code != 200:
            raise self.refused(response)
        return response.json()

    def change(self, method: str, path: str, body: Any = None) -> None:
        """Sends a request that changes something.

        Raises:
            PulsarError: it is refused, or as `request`.
        """
        response = self.request(method, path, json=body)
        if response.status_code not in (200, 204):
            raise self.refused(response)

    def request(self, method: str, path: str, json: Any = None, timeout: float | None = None) -> httpx.Response:
        """Sends a request, and follows redirects to other brokers, with the token.

        Args:
            method: the HTTP method.
            path: the path below `admin/v2`.
            json: the body.
            timeout: time-out, seconds; None: the connection's.

        Raises:
            NoAnswerError: no answer came in time.
            PulsarError: the broker can't be reached, or redirects to a URL to which the token must not be sent.
        """
        import httpx

        url: httpx.URL | str = path
        for _ in range(_MOST_REDIRECTS + 1):
            try:
                # httpx could follow redirects, but without the token.
                response = self._http.request(method, url, json=json, timeout=timeout or self._timeout_seconds)
            except httpx.HTTPError as error:
                reason = str(error) or type(error).__name__
                kind = NoAnswerError if isinstance(error, httpx.TimeoutException) else PulsarError
                raise kind(
                    f"no answer from {self.url} ({reason}): "
                    "start a broker (delaylake broker start) or set pulsar.admin_url"
                ) from error
            if response.status_code not in _REDIRECTS or "Location" not in response.headers:
                break
            url = response.url.join(response.headers["Location"])
            if url.scheme != "https" and (response.url.scheme == "https" or url.scheme != "http"):
                raise PulsarError(f"{response.url} redirects to {url}: the token is not sent there")
        return response

    def refused(self, response: httpx.Response) -> PulsarError:
        """Returns the error for an answer that is a refusal."""
        try:
            reason = response.json()["reason"]
        except (ValueError, KeyError, TypeError):
            reason = response.reason_phrase
        request = response.request
        return PulsarError(f"{request.method} {request.url} was answered {response.status_code}: {one_line(reason)}")


def _bearer(token: Callable[[], str]) -> httpx.Auth:
    import httpx

    class Bearer(httpx.Auth):
        def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
            request.headers["Authorization"] = f"Bearer {token()}"
            yield request

    return Bearer()
