"""The service as a process, from its start to the signal that ends it."""

import faulthandler
import functools
import gc
import logging
import os
import signal
import sys
from typing import Any, TYPE_CHECKING

# This import says which packages to install where they are missing, so it comes before others.
from .app import App, create_app
from .http11 import protocol
from .registry import Registry


if TYPE_CHECKING:
    import uvicorn


logger = logging.getLogger("ensembleode.serve")

# The seconds for the remaining work, when accepted requests are done or given up.
_LAST_SECONDS = 1.5
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


def run(
    registry: Registry,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "info",
    **options: Any,
) -> None:
    """Serve until the process is told to end (SIGTERM, or Ctrl-C).

    If something hangs at the end, the process still ends, with exit status 1.

    **Arguments:** `host`: the address to listen at, by default only this computer's (without
    tokens, the service then answers only to this computer's names); `options`: those of
    [`create_app`][ensembleode.serve.create_app].

    **Raises:** the errors of `create_app`, and any error of solving a problem when it is compiled;
    `SystemExit` where the address can't be used.
    """
    import uvicorn

    if not 0 <= port < 2**16:  # (Of a larger one, the lower bits would be taken.)
        raise ValueError(f"port must be from 0 to {2**16 - 1}, got {port}.")
    open_to_all = options.get("tokens") is None
    if open_to_all and host in _LOOPBACK and options.get("hosts") is None:
        # Another site can't make its pages reach the service by giving its own name this address.
        options = options | {"hosts": _LOOPBACK}
    app = create_app(registry, **options)
    service = app.service

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # uvicorn's own handler would close the socket at once, so that nobody is told that the
            # service is draining; and at the end it would end the process by the signal.
            self.force_exit = service.status == "draining" and sig == signal.SIGINT
            self.should_exit |= self.force_exit
            if service.status != "draining":
                # This ends the process even if something hangs, and prints where.
                seconds = service.drain_seconds + _LAST_SECONDS
                faulthandler.dump_traceback_later(seconds, exit=True)
            service.begin_draining()

    def end(left: float) -> None:
        # Answers that are ready are still written.
        server.config.timeout_graceful_shutdown = max(0.5, left)  # pyright: ignore
        server.should_exit = True

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    if open_to_all and host not in _LOOPBACK:
        what = "whoever can reach %s may use this service, as it has no tokens: %s"
        logger.warning(what, host, "give --tokens FILE, or set ENSEMBLEODE_TOKENS")
    # The thread of the batches should not wait long for the interpreter.
    sys.setswitchinterval(0.0001)
    server = Server(configured(app, host=host, port=port, log_level=log_level))
    service.on_failure = functools.partial(setattr, server, "should_exit", True)
    service.on_ready, service.on_drained = _leave_alone, end
    server.run()
    faulthandler.cancel_dump_traceback_later()
    if service.failure is not None:
        raise service.failure
    if service.is_at_work:
        # Python would wait for the thread that hangs, or crash in it.
        logger.error("the process ends, though something hangs in it")
        logging.shutdown()
        os._exit(1)


def configured(app: App, **options: Any) -> "uvicorn.Config":
    """The configuration with which uvicorn serves an app."""
    import uvicorn

    service = app.service
    # (Middleware sees all requests, so none may take the shorter path.)
    endpoints = {} if app.user_middleware else app.endpoints
    return uvicorn.Config(
        app,
        http=protocol(service, endpoints),
        access_log=False,
        server_header=False,
        # The addresses of clients behind a proxy are not needed.
        proxy_headers=False,
        timeout_keep_alive=30,
        limit_concurrency=_most_connections(),
        timeout_graceful_shutdown=max(1, round(service.drain_seconds)),
        lifespan="on",
        ws="none",
        **options,
    )


def _most_connections() -> int:
    """The limit of open files, minus some that are needed otherwise; further clients get a 503."""
    most = 4096
    try:
        import resource
    except ImportError:  # on Windows
        return most
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else max(16, min(most, files - 128))


def _leave_alone() -> None:
    """Keep the garbage collector from looking through the millions of objects of compiled programs.
    (The objects of a request are freed without it.)"""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
