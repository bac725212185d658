"""The HTTP service: endpoints, and what is between them and the batcher."""

import asyncio
import contextlib
import functools
import gc
import inspect
import itertools
import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


try:
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import FileResponse, Response
    from fastapi.routing import APIRoute
    from fastapi.staticfiles import StaticFiles
    from starlette.exceptions import HTTPException
except ImportError as e:
    raise ImportError("the service needs FastAPI: pip install 'ensembleode[serve]'.") from e

from .. import __version__, cpu_devices
from . import documented, tokens as tokens_of, wire
from .batcher import Batcher, BatchFailed, DeadlineExceeded, Done, Draining, QueueFull, Slice
from .jobs import Jobs
from .metrics import CONTENT_TYPE, Metrics
from .registry import Entry, Registry
from .solving import joined, Numbers, Program, Solver
from .wire import Refused


logger = logging.getLogger("ensembleode.serve")

_PAGE = Path(__file__).parent / "page"
# Bytes of a body, or numbers of an answer, that would keep the event loop from others.
_LARGE = 2**16
# Seconds until it is looked whether who asked is still there; and for a body to arrive.
_PATIENCE, _BODY_SECONDS = 0.25, 60.0
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    # (Asked for again, as the modules of two versions don't go together.)
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Service:
    """What the endpoints of an app share."""

    def __init__(
        self,
        registry: Registry,
        ensemblealg: Any,
        max_batch: int,
        max_wait_ms: float,
        queue: int,
        tokens: tokens_of.Tokens | None,
        store: str | Path | None,
        drain_seconds: float,
        batching: bool,
    ):
        self.registry = registry
        self.solvers = {e.name: Solver(e, ensemblealg, max_batch) for e in registry}
        self.tokens = tokens
        self.drain_seconds = drain_seconds
        self.status = "warming"
        self.failure: Exception | None = None
        self.on_ready: Callable[[], Any] = lambda: None
        self.on_failure: Callable[[], Any] = lambda: None
        self._make_batcher = lambda: Batcher(
            self._run,
            most=lambda program: program.most,
            max_wait=max_wait_ms / 1000,
            queue=queue,
            share=max(128, max_batch // 8),
            coalesce=batching,
            observe=self._observe,
        )
        self.batcher: Batcher | None = None
        self.metrics = Metrics(registry.names, lambda: self.batcher.waiting if self.batcher else 0)
        self.jobs = None if store is None else Jobs(Path(store), self.solvers, self._in_background)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._warming: threading.Thread | None = None
        self._ids = itertools.count(1)
        self._id_prefix = secrets.token_hex(4)

    #
    # Beginning and end
    #

    async def start(self) -> None:
        """Begin to warm up; requests are refused until that is done."""
        self._loop = asyncio.get_running_loop()
        self.status = "warming"
        self.batcher = self._make_batcher()
        self.batcher.start()
        self._warming = threading.Thread(target=self._warm, name="ensembleode-warming", daemon=True)
        self._warming.start()

    def _warm(self) -> None:
        began = time.perf_counter()
        try:
            with ThreadPoolExecutor(cpu_devices.cores()) as threads:
                every = [x for solver in self.solvers.values() for x in solver.warming()]
                # (The largest take longest.)
                for _ in threads.map(self._warm_up, reversed(every)):
                    pass
        except Exception as e:
            logger.error("a problem can't be solved", exc_info=e)
            self.failure, self.status = e, "failed"
            self.on_failure()
            return
        logger.info("ready after %.1f s", time.perf_counter() - began)
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._ready)

    def _warm_up(self, step: Callable[[], Any]) -> None:
        if self.status == "warming":
            step()

    def _ready(self) -> None:
        if self.status == "warming":
            self.on_ready()
            self.status = "ready"
            if self.jobs is not None:
                self.jobs.start()

    def begin_draining(self) -> None:
        """Refuse what comes from now on."""
        self.status = "draining"

    async def stop(self) -> None:
        """Finish what was taken, within `drain_seconds`, and end."""
        self.begin_draining()
        began = time.monotonic()
        if self.jobs is not None:
            await asyncio.to_thread(self.jobs.stop, self.drain_seconds)
        assert self.batcher is not None
        left = max(0.0, self.drain_seconds - (time.monotonic() - began))
        if not await self.batcher.drain(left):
            logger.warning("some requests were not answered within %s s", self.drain_seconds)
        if self._warming is not None and self._warming.is_alive():
            await asyncio.to_thread(self._warming.join, self.drain_seconds)

    #
    # Batches
    #

    def _run(self, program: Program, slices: Sequence[Slice]) -> list[Any]:
        solver = self.solvers[program.problem]
        results = solver.run(program, [_part(s) for s in slices])
        codes = [x.retcode for x in results]
        self.metrics.codes(program.problem, np.concatenate(codes))
        return results

    def _observe(self, program: Program, count: int, items: int, seconds: float) -> None:
        self.metrics.batch(program.problem, count, seconds)

    def _in_background(self, program: Program, numbers: Numbers) -> Any:
        """From another thread: a function that waits for the answer, and one that gives it up."""
        loop, batcher = self._loop, self.batcher
        assert loop is not None
        assert batcher is not None

        async def done() -> Done:
            n = len(numbers.u0)
            return await batcher.submit(program.problem, program, numbers, n, background=True)

        return asyncio.run_coroutine_threadsafe(done(), loop)

    async def done(
        self, request: Request, program: Program, numbers: Numbers, deadline: float | None
    ) -> Done:
        """The results of a request's numbers.

        **Raises:** `Refused` where who asked has gone; and as `Batcher.submit`.
        """
        assert self.batcher is not None
        assert self._loop is not None
        at = None if deadline is None else time.monotonic() + deadline
        n = len(numbers.u0)
        future = self.batcher.submit(program.problem, program, numbers, n, deadline=at)
        watch = _Watch(self._loop, request, future)
        try:
            done = await future
        except asyncio.CancelledError:
            if watch.gone:
                raise Refused(499, "gone", "the client has gone.") from None
            raise
        finally:
            watch.end()
        self.metrics.waits[program.problem].observe(done.wait)
        return done

    #
    # Requests
    #

    def entry(self, name: str) -> Entry:
        """
        **Raises:** `Refused`.
        """
        if name not in self.registry:
            raise Refused(404, "not_found", f"there is no problem {name[:100]!r}.")
        return self.registry[name]

    def ready(self) -> None:
        """
        **Raises:** `Refused` before and after the service answers.
        """
        if self.status != "ready":
            raise Refused(
                503, self.status, f"the service is {self.status}.", headers={"Retry-After": "1"}
            )

    async def answered(self, handle: Callable, request: Request, *, guarded: bool) -> Response:
        """The response of an endpoint, or that to what it raises."""
        began = time.perf_counter()
        id = f"{self._id_prefix}-{next(self._ids)}"
        problem = request.path_params.get("name", "")
        try:
            if guarded and self.tokens is not None:
                _check_token(self.tokens, request)
            response = await handle(request)
        except Exception as e:
            response = _response_to(_refusal(e, id))
        response.headers["X-Request-ID"] = id
        seconds = time.perf_counter() - began
        if guarded:
            known = problem if problem in self.registry else ""
            self.metrics.request(known, response.status_code, seconds)
            if logger.isEnabledFor(logging.INFO):
                count = getattr(request.state, "count", "-")
                status = response.status_code
                logger.info("%s %s %s %d %.4f s", id, known or "-", count, status, seconds)
        return response


class _Watch:
    """Cancels a future when the client has gone, after a while: most answers are there sooner."""

    def __init__(self, loop: Any, request: Request, future: asyncio.Future):
        self._request = request
        self._future = future
        self._loop = loop
        self._task: asyncio.Task | None = None
        self._timer = loop.call_later(_PATIENCE, self._begin)
        self.gone = False

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._look())

    async def _look(self) -> None:
        while True:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                self._future.cancel()
                return

    def end(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


def _part(part: Slice) -> Numbers:
    numbers = part.payload
    if part.stop - part.start == len(numbers.u0):
        return numbers
    at = slice(part.start, part.stop)
    return Numbers(*(None if x is None else x[at] for x in numbers))


#
# Errors
#


def _check_token(tokens: tokens_of.Tokens, request: Request) -> None:
    if not tokens.admits(request.headers.get("authorization")):
        raise Refused(
            401,
            "unauthorized",
            "a token is needed: send the header Authorization: Bearer TOKEN.",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _refusal(e: Exception, id: str) -> Refused:
    match e:
        case Refused():
            return e
        case QueueFull():
            return Refused(
                429, "queue_full", "the queue is full; try again later.",
                headers={"Retry-After": str(int(e.seconds))},
            )  # fmt: skip
        case DeadlineExceeded():
            return Refused(504, "deadline", "the answer is not there within deadline_ms.")
        case Draining():
            return Refused(
                503, "draining", "the service is draining.", headers={"Retry-After": "1"}
            )
        case BatchFailed():
            return Refused(500, "batch_failed", "solving it failed; the log has why.", id=e.id)
        case RequestValidationError():
            first = e.errors()[0]
            path = ".".join(map(str, first.get("loc", ())[1:]))
            return Refused(422, "invalid", str(first.get("msg", "it is not valid")), path or None)
        case HTTPException():
            codes = {404: "not_found", 405: "method_not_allowed"}
            headers = dict(e.headers) if e.headers else None
            code = codes.get(e.status_code, "refused")
            return Refused(e.status_code, code, str(e.detail), headers=headers)
    logger.error("request %s failed", id, exc_info=e)
    return Refused(500, "internal", "something went wrong; the log has what.", id=id)


def _response_to(refused: Refused) -> Response:
    return _json(refused.body(), refused.status, refused.headers)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(wire.encoded(content, False), status, headers, wire.JSON)


#
# Bodies
#


async def _body_of(request: Request, limit: int) -> bytes:
    """
    **Raises:** `Refused` for one over the limit, or that doesn't arrive.
    """
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    message = await request.receive()
    body = message.get("body", b"")
    if message.get("more_body"):
        parts, size = [body], len(body)
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while message.get("more_body"):
                    message = await request.receive()
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(limit)
        except TimeoutError:
            raise Refused(408, "timeout", "the body did not arrive.") from None
        body = b"".join(parts)
    if message["type"] == "http.disconnect":
        raise Refused(499, "gone", "the client has gone.")
    if len(body) > limit:
        raise _too_large(limit)
    return body


def _too_large(limit: int) -> Refused:
    message = f"the body is larger than the limit body={limit} bytes."
    return wire.over("body", None, message, 413)


def _is_binary(request: Request) -> bool:
    """Whether the body is MessagePack.

    **Raises:** `Refused` for another type than that and JSON: the page of another site can't send
    one of these two without having asked first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == wire.JSON:
        return False
    if kind in (wire.BINARY, "application/msgpack"):
        return True
    message = f"the Content-Type must be {wire.JSON} or {wire.BINARY}."
    raise Refused(415, "unsupported_media_type", message)


def _wants_binary(request: Request) -> bool:
    accepted = request.headers.get("accept", "")
    return wire.BINARY in accepted or "application/msgpack" in accepted


async def _apart(large: bool, function: Callable, *args: Any) -> Any:
    """Call it, in a thread if it takes long."""
    return await asyncio.to_thread(function, *args) if large else function(*args)


#
# The app
#


def create_app(
    registry: Registry,
    *,
    ensemblealg: Any = None,
    max_batch: int = 4096,
    max_wait_ms: float = 5.0,
    queue: int = 16384,
    tokens: Sequence[str] | tokens_of.Tokens | None = None,
    cors: Sequence[str] = (),
    store: str | Path | None = None,
    drain_seconds: float = 30.0,
    batching: bool = True,
) -> FastAPI:
    """The service of a registry, as an ASGI app.

    It compiles all it needs when it starts, and is ready after that (`/readyz`).

    **Arguments:**

    - `registry`: the problems.
    - `ensemblealg`: where batches are solved, by default `EnsembleThreads()`.
    - `max_batch`: trajectories of a batch at most.
    - `max_wait_ms`: how long the first request of a batch waits for others at most; no longer, when
        none comes for a fifth of that.
    - `queue`: how many trajectories may wait; with more, requests are refused (429).
    - `tokens`: one of these is wanted with every request; by default none is.
    - `cors`: origins whose pages may use the service, by default only its own.
    - `store`: a folder for durable ensembles; without one there are none.
    - `drain_seconds`: how long what was taken may take when the service ends.
    - `batching`: False solves every request on its own.

    **Raises:** `ValueError` and `TypeError` for bad arguments, and what solving a problem of the
    registry raises.
    """
    if not isinstance(registry, Registry):
        raise TypeError(f"registry must be an eo.serve.Registry, got {type(registry).__name__}.")
    if not len(registry):
        raise ValueError("registry is empty; add a problem.")
    for name, value in (("max_batch", max_batch), ("queue", queue)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    for name, value in (("max_wait_ms", max_wait_ms), ("drain_seconds", drain_seconds)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be zero or positive, got {value!r}.")
    if tokens is not None and not isinstance(tokens, tokens_of.Tokens):
        tokens = tokens_of.Tokens(tokens)
    service = Service(
        registry, ensemblealg, max_batch, max_wait_ms, queue, tokens, store, drain_seconds, batching
    )

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = _App(
        title="ensembleode",
        version=__version__,
        description=documented.ABOUT,
        lifespan=lifespan,
        # Their pages are scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.shortcut = not cors
    if cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key"],
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    app.router.route_class = _route_class(service)
    _add_problems(app, service)
    _add_ensembles(app, service)
    _add_health(app, service)
    _add_page(app)

    async def refused(request: Request, e: Exception) -> Response:
        return _response_to(_refusal(e, secrets.token_hex(8)))

    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, refused)
    return app


class _App(FastAPI):
    """Takes requests to solve to their endpoint at once: what is between takes as long as all
    else that is done for one."""

    shortcut = False
    endpoints: dict[str, Callable]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.shortcut and scope["type"] == "http" and scope["method"] == "POST":
            path, root = scope["path"], scope.get("root_path", "")
            parts = path.removeprefix(root).split("/")
            if len(parts) == 5 and parts[:3] == ["", "v1", "problems"]:
                answer = self.endpoints.get(parts[4])
                if answer is not None:
                    scope["app"], scope["path_params"] = self, {"name": parts[3]}
                    response = await answer(Request(scope, receive))
                    await response(scope, receive, send)
                    return
        await super().__call__(scope, receive, send)


def _route_class(service: Service) -> type[APIRoute]:
    class Route(APIRoute):
        """Answers by way of the service. An endpoint that takes a request alone is called as it
        is, as FastAPI takes its time."""

        def get_route_handler(self) -> Callable:
            endpoint = self.endpoint
            handle = super().get_route_handler()
            if getattr(endpoint, "plain", False):
                handle = endpoint
            guarded = self.path.startswith("/v1/") or self.path == "/metrics"

            async def answer(request: Request) -> Response:
                return await service.answered(handle, request, guarded=guarded)

            return answer

    return Route


def _plain(endpoint: Callable) -> Callable:
    """An endpoint that looks up what it needs in the request; to FastAPI, which documents it, it
    has the parameter of its path."""

    @functools.wraps(endpoint)
    async def called(request: Request) -> Response:
        return await endpoint(request, request.path_params["name"])

    called.plain = True  # pyright: ignore
    called.__signature__ = inspect.signature(endpoint)  # pyright: ignore
    return called


def _add_problems(app: _App, service: Service) -> None:
    @app.post("/v1/problems/{name}/solve", **documented.solve())
    @_plain
    async def solve(request: Request, name: str) -> Response:
        """Solve one trajectory, or many."""
        entry, asked = await _asked(service, request, name)
        solver = service.solvers[name]
        program = solver.program(asked.rows, own=asked.numbers.p is not None)
        done = await service.done(request, program, asked.numbers, asked.deadline)
        binary = _wants_binary(request)

        def content() -> bytes:
            answer = joined(done.results)
            return wire.encoded(wire.solved(asked, answer, done.wait, done.seconds), binary)

        size = asked.n * asked.rows * max(1, entry.u0.size)
        body = await _apart(size > _LARGE // 8, content)
        return Response(body, media_type=wire.BINARY if binary else wire.JSON)

    @app.post("/v1/problems/{name}/vjp", **documented.vjp())
    @_plain
    async def vjp(request: Request, name: str) -> Response:
        """Pull a cotangent of the saved states back to u0 and p."""
        entry, asked = await _asked(service, request, name, "cotangent")
        numbers = asked.numbers
        if numbers.p is None and entry.p.size:
            shared = np.broadcast_to(entry.p, (asked.n, entry.p.size))
            numbers = numbers._replace(p=shared)
        numbers = numbers._replace(cotangent=wire.cotangent(entry, asked))
        program = service.solvers[name].program(asked.rows, own=True, pulls=True)
        done = await service.done(request, program, numbers, asked.deadline)
        binary = _wants_binary(request)

        def content() -> bytes:
            gradients = joined(done.results)
            found = wire.pulled(entry, asked, gradients, done.wait, done.seconds)
            return wire.encoded(found, binary)

        size = asked.n * (entry.u0.size + entry.p.size)
        body = await _apart(size > _LARGE // 8, content)
        return Response(body, media_type=wire.BINARY if binary else wire.JSON)

    app.endpoints = {
        name: functools.partial(service.answered, endpoint, guarded=True)
        for name, endpoint in (("solve", solve), ("vjp", vjp))
    }

    @app.get("/v1/problems", **documented.problems())
    async def problems() -> Response:
        """The problems that are served."""
        return _json({"problems": [entry.describe() for entry in service.registry]})

    @app.get("/v1/problems/{name}", **documented.problem())
    async def problem(name: str) -> Response:
        """One of them."""
        return _json(service.entry(name).describe())


async def _asked(
    service: Service, request: Request, name: str, *more: str
) -> tuple[Entry, wire.Query]:
    entry = service.entry(name)
    binary = _is_binary(request)
    body = await _body_of(request, entry.limits.body)
    service.ready()

    def read() -> wire.Query:
        return wire.query(entry, wire.parsed(body, binary), more)

    asked = await _apart(len(body) > _LARGE, read)
    request.state.count = asked.n
    return entry, asked


def _add_ensembles(app: FastAPI, service: Service) -> None:
    def jobs() -> Jobs:
        if service.jobs is None:
            raise Refused(
                404, "no_store", "this service keeps no ensembles; start it with a store."
            )
        return service.jobs

    @app.post("/v1/problems/{name}/ensembles", status_code=202, **documented.ensembles())
    async def create(request: Request, name: str) -> Response:
        """Solve an ensemble, which is kept."""
        entry = service.entry(name)
        binary = _is_binary(request)
        body = await _body_of(request, entry.limits.body)
        here = jobs()
        service.ready()
        key = request.headers.get("idempotency-key")
        parsed = await asyncio.to_thread(wire.parsed, body, binary)
        job = await asyncio.to_thread(here.create, entry, parsed, key)
        request.state.count = job["trajectories"]
        return _json(job, 202)

    @app.get("/v1/ensembles", **documented.jobs())
    async def every() -> Response:
        """The ensembles that are kept."""
        return _json({"ensembles": await asyncio.to_thread(jobs().every)})

    @app.get("/v1/ensembles/{id}", **documented.job())
    async def one(id: str) -> Response:
        """How far an ensemble is."""
        return _json(await asyncio.to_thread(jobs().status, id))

    @app.delete("/v1/ensembles/{id}", **documented.job())
    async def cancel(id: str) -> Response:
        """Stop it; what is done stays."""
        return _json(await asyncio.to_thread(jobs().cancel, id))

    @app.post("/v1/ensembles/{id}/resume", **documented.job())
    async def resume(id: str) -> Response:
        """Go on with one that was cancelled, or failed."""
        service.ready()
        return _json(await asyncio.to_thread(jobs().resume, id))

    @app.get("/v1/ensembles/{id}/download", **documented.download())
    async def download(
        id: str, start: int = 0, stop: int | None = None, format: str = "msgpack"
    ) -> Response:
        """Some of its trajectories."""
        if format not in ("msgpack", "npz"):
            raise wire.invalid("format", "format must be msgpack or npz.")
        body = await asyncio.to_thread(jobs().read, id, start, stop, format == "npz")
        if format == "npz":
            headers = {"Content-Disposition": f'attachment; filename="{id}.npz"'}
            return Response(body, media_type="application/x-npz", headers=headers)
        return Response(body, media_type=wire.BINARY)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", **documented.health())
    async def healthz() -> Response:
        """Whether the process answers."""
        return _json({"status": "ok"})

    @app.get("/readyz", **documented.health())
    async def readyz() -> Response:
        """Whether it solves."""
        return _json({"status": service.status}, 200 if service.status == "ready" else 503)

    @app.get("/metrics", **documented.metrics())
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def _add_page(app: FastAPI) -> None:
    if not (_PAGE / "index.html").exists():
        return

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(_PAGE / "index.html", headers=_HEADERS)

    app.mount("/page", _PageFiles(directory=_PAGE), name="page")


#
# The process
#


def run(
    registry: Registry,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "info",
    **options: Any,
) -> None:
    """Serve until the process is told to end (SIGTERM, or Ctrl-C).

    **Arguments:** `host`: the address that it listens at, by default this computer's alone;
    `options`: those of [`create_app`][ensembleode.serve.create_app].

    **Raises:** as `create_app`, and what solving a problem raises when it is compiled; `SystemExit`
    where the address can't be had.
    """
    import uvicorn

    app = create_app(registry, **options)
    service: Service = app.state.service

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # (uvicorn's own would end the process by the signal, when all is done.)
            service.begin_draining()
            self.force_exit = self.should_exit and sig == signal.SIGINT
            self.should_exit = True

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    # The thread of the batches should not wait long for the interpreter.
    sys.setswitchinterval(0.0005)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(service.drain_seconds)),
        lifespan="on",
        ws="none",
    )
    server = Server(config)
    service.on_failure = functools.partial(setattr, server, "should_exit", True)
    service.on_ready = _leave_alone
    server.run()
    if service.failure is not None:
        raise service.failure


def _leave_alone() -> None:
    """Have the garbage collector not look through what stays: compiled programs are a million
    objects, and it took a fifth of a second, time and again."""
    gc.collect()
    gc.freeze()
