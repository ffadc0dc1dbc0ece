"""`delaylake api`: serves the admin REST API, until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import math
import signal
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from conf.errors import DelayLakeError
from jobs.logs import LogFormat, configure, name_settings
from jobs.options import Output, OutputOption, global_options, show

if TYPE_CHECKING:
    from conf.api_settings import AuthSettings

_BACKLOG = 2048


class ApiError(DelayLakeError):
    """The API can't be served."""


def api(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="The address to serve on; by default the setting api.host.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="By default the setting api.port; 0: any free one.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Serve the admin REST API. Prints its URL once it answers; needs no JVM, and starts without a broker.

    With --output json: {"url": ...}.
    """
    options = global_options(context)
    settings = options.settings
    if host is not None:
        settings = settings.model_copy(update={"api": settings.api.model_copy(update={"host": host})})
    configure(logging.INFO if options.verbose else logging.WARNING, options.log_format or LogFormat.TEXT)
    listener = _listen(settings.api.host, settings.api.port if port is None else port, settings.auth)

    import uvicorn

    from admin.app import create_app
    from admin.security.authentication import check_certificate, hide_tokens
    from admin.security.connections import TimedServer, allow_connections

    check_certificate(settings.api)
    logging.getLogger("uvicorn.access").addFilter(hide_tokens)

    config = uvicorn.Config(
        create_app(settings),
        log_config=None,
        access_log=options.verbose,
        server_header=False,
        proxy_headers=False,  # the app reads them itself, from api.trusted_proxies only
        ws="none",
        http=allow_connections(settings.api.max_connections),
        backlog=_BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.api.answer_timeout_millis / 1000) + 1,
        ssl_certfile=settings.api.tls_certificate_file,
        ssl_keyfile=settings.api.tls_key_file,
    )
    server = TimedServer(config)
    # Handles signals before the server has installed its own handlers, and the one that it raises again at its end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    address, bound_port = listener.getsockname()[:2]
    scheme = "https" if settings.api.tls_certificate_file else "http"
    url = f"{scheme}://{f'[{address}]' if ':' in address else address}:{bound_port}"
    name_settings(settings.file)
    show(output, {"url": url}, url)
    server.run(sockets=[listener])


def _listen(host: str, port: int, auth: AuthSettings) -> socket.socket:
    """Opens a socket, on which connections wait until the server accepts them.

    Raises:
        ApiError: the address can't be used.
        SecurityError: other machines can reach the address, and there is no authentication.
    """
    from admin.security.authentication import check_address

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        check_address(str(address[0]), auth)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise ApiError(f"can't serve on {host}:{port}: {error.strerror or error} (--host, --port)") from error
    return listener
