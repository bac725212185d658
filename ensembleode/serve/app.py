"""The HTTP service: its endpoints."""

import asyncio
import contextlib
import functools
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from ..ground.extras import installing
from ..problem.ensemble import EnsembleAlgorithm
from .exchange import JsonObject


try:
    from fastapi import Depends, FastAPI, Query, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.middleware.cors import CORSMiddleware
    from fastapi.responses import FileResponse, Response, StreamingResponse
    from fastapi.routing import APIRoute
    from fastapi.staticfiles import StaticFiles
    from starlette.exceptions import HTTPException
    from starlette.routing import Match
except ImportError as e:
    raise ImportError(f"the service needs FastAPI: {installing('serve')}.") from e

from ..ground.version import __version__
from ..problem.options import check_count
from . import bodies, documented, requests, tokens as tokens_of
from .batcher import ItemResult, QueueFull
from .bodies import RefusedRequest
from .calls import Call, in_json, LARGE, refusal, Reply, reply_to
from .jobs import Jobs
from .metrics import CONTENT_TYPE
from .registry import Registry, RegistryEntry
from .service import Service
from .solving import joined


_PAGE = Path(__file__).parent / "page"
_PAGE_OF_JOBS = 1000
_FIRST = 8  # pieces of a download, by which it has begun to read
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    # Browsers ask again each time, since modules of two versions don't work together.
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def create_app(
    registry: Registry,
    *,
    ensemblealg: EnsembleAlgorithm | None = None,
    max_batch: int = 4096,
    max_wait_ms: float = 5.0,
    queue: int = 16384,
    tokens: Sequence[str] | tokens_of.Tokens | None = None,
    hosts: Sequence[str] | None = None,
    cors: Sequence[str] = (),
    store: str | Path | None = None,
    drain_seconds: float = 30.0,
    batching: bool = True,
    batch_seconds: float = 60.0,
) -> "App":
    """The service of a registry, as an ASGI app.

    When it starts, it compiles everything that it needs, and is ready after that (`/readyz`).

    **Arguments:**

    - `registry`: the problems.
    - `ensemblealg`: the ensemble algorithm for batches, by default that of `solve`.
    - `max_batch`: the largest number of trajectories of a batch.
    - `max_wait_ms`: the longest time for which the first request of a batch waits for others. The
        wait is over earlier if no request arrives for a twentieth of that time.
    - `queue`: how many trajectories may wait; beyond that, requests are refused (429).
    - `tokens`: every request needs one of these; by default none is needed.
    - `hosts`: the host names, without port, to which the service answers; by default any.
    - `cors`: the origins whose pages may use the service; by default only its own.
    - `store`: a folder for durable ensembles; without it they are not offered.
    - `drain_seconds`: when the service ends, the time for finishing the requests that it has
        accepted.
    - `batching`: False solves every request on its own.
    - `batch_seconds`: the longest time of a batch. A batch that has not returned by then is given
        up (504), and its problem refuses requests (503) until it returns; other problems are
        solved.

    **Raises:** `ValueError` and `TypeError` for bad arguments, and any error of solving a problem
    of the registry.
    """
    if not isinstance(registry, Registry):
        raise TypeError(f"registry must be an eo.serve.Registry, got {type(registry).__name__}.")
    if not len(registry):
        raise ValueError("registry is empty; add a problem.")
    check_count("max_batch", max_batch)
    check_count("queue", queue)
    for name, value in (("max_wait_ms", max_wait_ms), ("drain_seconds", drain_seconds)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be zero or positive, got {value!r}.")
    if not batch_seconds > 0:
        raise ValueError(f"batch_seconds must be positive, got {batch_seconds!r}.")
    if tokens is not None and not isinstance(tokens, tokens_of.Tokens):
        tokens = tokens_of.Tokens(tokens)
    service = Service(
        registry, ensemblealg, max_batch, tokens, hosts, store, drain_seconds,
        max_wait=max_wait_ms / 1000, queue=queue, coalesce=batching, limit=batch_seconds,
    )  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = App(
        service, cors, title="ensembleode", version=__version__, description=documented.ABOUT,
        docs_url=None, redoc_url=None,  # these pages load scripts from other sites
        lifespan=lifespan,
    )  # fmt: skip
    if cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "Idempotency-Key"],
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    _add_problems(app, service)
    _add_ensembles(app, service)
    _add_health(app, service)
    _add_page(app)

    async def refused(request: Request, e: Exception) -> Response:
        if isinstance(e, HTTPException) and e.status_code == 405:
            # The error of Starlette lists only the methods of the first route with this path.
            at = [r for r in app.routes if r.matches(request.scope)[0] != Match.NONE]
            allowed = {method for route in at for method in getattr(route, "methods", None) or ()}
            e.headers = {"Allow": ", ".join(sorted(allowed))}
        return reply_to(refusal(e, secrets.token_hex(8))).response()

    for kind in (HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, refused)
    return app


class App(FastAPI):
    """An app, some of whose endpoints take a `Call`, so that they need neither FastAPI nor an ASGI
    server."""

    def __init__(self, service: Service, cors: Sequence[str], **options: Any):
        super().__init__(**options)
        self.service = self.state.service = service
        self.endpoints: dict[str, Callable] = {}
        self.router.route_class = _route_class(service, cors)

    def openapi(self) -> JsonObject:
        if self.openapi_schema is None:
            documented.complete(super().openapi())
        return super().openapi()

    def takes(self, what: str, **documented: Any) -> Callable:
        """Decorates the endpoint of `POST /v1/problems/{name}/{what}`, which takes a `Call`."""

        def decorated(endpoint: Callable) -> Callable:
            # The function that FastAPI documents and routes to.
            async def route(name: str) -> Any:
                raise NotImplementedError

            route.__name__, route.__doc__ = endpoint.__name__, endpoint.__doc__
            route.endpoint = endpoint  # pyright: ignore
            self.endpoints[what] = endpoint
            self.post(f"/v1/problems/{{name}}/{what}", **documented)(route)
            return endpoint

        return decorated


def _route_class(service: Service, cors: Sequence[str]) -> type[APIRoute]:
    class Route(APIRoute):
        """A route whose answers the service sends."""

        def get_route_handler(self) -> Callable:
            handle = super().get_route_handler()
            endpoint = getattr(self.endpoint, "endpoint", None)
            guarded = self.path.startswith("/v1/") or self.path == "/metrics"

            async def answer(request: Request) -> Response:
                async def handled(call: Call) -> Response:
                    if request.method != "GET":
                        call.check_origin(cors)
                    return await handle(request)

                name = request.path_params.get("name", "")
                request.state.call = call = Call(
                    dict(request.scope["headers"]), request.receive, name
                )
                reply, id = await service.answered(endpoint or handled, call, guarded=guarded)
                response = reply.response() if isinstance(reply, Reply) else reply
                response.headers["X-Request-ID"] = id
                if service.status == "draining":
                    response.headers["Connection"] = "close"
                return response

            return answer

    return Route


def _json(content: Any, status: int = 200) -> Response:
    return in_json(content, status).response()


def _add_problems(app: App, service: Service) -> None:
    @app.takes("solve", **documented.SOLVE)
    async def solve(call: Call) -> Reply:
        """Solve one trajectory, or several."""
        entry, asked = await _asked(service, call)
        requests.check_answer(entry, asked)
        program = service.solver(entry.name).program(asked.rows, own=asked.numbers.p is not None)
        done = await service.done(call, program, asked.numbers, asked.deadline)
        size = asked.n * asked.rows * max(1, entry.u0.size)
        return await _replied(call, done, functools.partial(requests.solved, asked), size)

    @app.takes("vjp", **documented.VJP)
    async def vjp(call: Call) -> Reply:
        """Pull a cotangent of the saved states back to u0 and p."""
        solver = service.solver(call.name)
        if solver.no_gradient is not None:
            raise RefusedRequest(404, "no_gradient", f"there is no gradient: {solver.no_gradient}.")
        entry, asked = await _asked(service, call, "cotangent")
        requests.check_answer(entry, asked, pulls=True)
        numbers = asked.numbers._replace(cotangent=requests.cotangent(entry, asked))
        if numbers.p is None and entry.p.size:
            numbers = numbers._replace(p=np.broadcast_to(entry.p, (asked.n, entry.p.size)))
        program = solver.program(asked.rows, own=True, pulls=True)
        done = await service.done(call, program, numbers, asked.deadline)
        size = asked.n * (entry.u0.size + entry.p.size)
        return await _replied(call, done, functools.partial(requests.pulled, asked), size)

    @app.get("/v1/problems", **documented.PROBLEMS)
    async def problems() -> Response:
        """The problems that are served."""
        return _json({"problems": [x.describe() for x in service.solvers.values()]})

    @app.get("/v1/problems/{name}", **documented.PROBLEM)
    async def problem(name: str) -> Response:
        """A problem that is served."""
        return _json(service.solver(name).describe())


async def _read(
    service: Service, call: Call, made: Callable[[RegistryEntry, dict], Any], writes: bool = False
) -> Any:
    """The result of `made` for a body. It is computed in another thread if it takes long, or
    `writes` to disk."""
    entry, binary = service.solver(call.name).entry, call.sends_binary()
    body = await call.body(entry.limits.body, service.bodies)
    service.check_ready()

    def read() -> Any:
        return made(entry, bodies.parsed(body, binary))

    if len(body) > LARGE:
        async with service.reading_large:  # reading takes several times the bytes of the body
            return await asyncio.to_thread(read)
    return await asyncio.to_thread(read) if writes else read()


async def _asked(service: Service, call: Call, *more: str) -> tuple[RegistryEntry, requests.Query]:
    asked = await _read(service, call, lambda entry, body: requests.query(entry, body, more))
    call.count = asked.n
    return service.solver(call.name).entry, asked


async def _replied(call: Call, done: ItemResult, answer: Callable[..., dict], size: int) -> Reply:
    """An answer, of which `size` is the number of numbers."""
    binary = call.wants_binary()

    def content() -> bytes:
        return bodies.encoded(answer(joined(done.results), done.wait, done.seconds), binary)

    body = await asyncio.to_thread(content) if size > LARGE // 8 else content()
    return Reply(body, bodies.BINARY if binary else bodies.JSON)


def _add_ensembles(app: App, service: Service) -> None:
    def jobs() -> Jobs:
        if service.jobs is None:
            message = "this service keeps no ensembles; start it with a store."
            raise RefusedRequest(404, "no_store", message)
        return service.jobs

    async def owner(request: Request) -> str:
        return request.state.call.owner

    Owner = Annotated[str, Depends(owner)]

    @app.takes("ensembles", status_code=202, **documented.ENSEMBLES)
    async def create(call: Call) -> Reply:
        """Solve an ensemble, and keep it."""
        key, here = call.header(b"idempotency-key") or None, jobs()

        def made(entry: RegistryEntry, body: JsonObject) -> JsonObject:
            return here.create(entry, body, key, call.owner or "")

        job = await _read(service, call, made, writes=True)
        call.count = job["trajectories"]
        return in_json(job, 202)

    @app.get("/v1/ensembles", **documented.JOBS)
    async def every(
        owner: Owner, after: str = "", most: Annotated[int, Query(ge=1)] = _PAGE_OF_JOBS
    ) -> Response:
        """The ensembles that are kept, page by page."""
        return _json(await asyncio.to_thread(jobs().page, after, min(most, _PAGE_OF_JOBS), owner))

    @app.get("/v1/ensembles/{id}", **documented.JOB)
    async def one(owner: Owner, id: str) -> Response:
        """The status of an ensemble."""
        return _json(await asyncio.to_thread(jobs().status, id, owner))

    @app.delete("/v1/ensembles/{id}", **documented.JOB)
    async def delete(owner: Owner, id: str) -> Response:
        """Delete an ensemble that has ended, with its results; cancel one that has not."""
        return _json(await asyncio.to_thread(jobs().delete, id, owner))

    @app.post("/v1/ensembles/{id}/cancel", **documented.JOB)
    async def cancel(owner: Owner, id: str) -> Response:
        """Cancel an ensemble, if it has not ended; its results so far are kept."""
        return _json(await asyncio.to_thread(jobs().cancel, id, owner))

    @app.post("/v1/ensembles/{id}/resume", **documented.JOB)
    async def resume(owner: Owner, id: str) -> Response:
        """Resume an ensemble that was cancelled, or that failed."""
        service.check_ready()
        return _json(await asyncio.to_thread(jobs().resume, id, owner))

    @app.get("/v1/ensembles/{id}/download", **documented.DOWNLOAD)
    async def download(
        owner: Owner,
        id: str,
        start: Annotated[int, Query(ge=0)] = 0,
        stop: Annotated[int | None, Query(ge=1)] = None,
        format: Literal["msgpack", "npz"] = "msgpack",
    ) -> Response:
        """The results of some trajectories of an ensemble."""
        pieces, size = await asyncio.to_thread(jobs().read, id, start, stop, format == "npz", owner)
        held = object()
        if not service.answers.has(held, owner, size):
            raise QueueFull(1.0)

        def sent() -> Iterator[bytes]:
            try:
                yield first
                yield from pieces
            finally:
                service.answers.drop(held)

        # Where the store can't be read, that can still be said.
        first = await asyncio.to_thread(lambda: b"".join(itertools.islice(pieces, _FIRST)))
        service.answers.put(held, owner, size)
        if format == "npz":
            headers = {"Content-Disposition": f'attachment; filename="{id}.npz"'}
            return StreamingResponse(sent(), media_type="application/x-npz", headers=headers)
        return StreamingResponse(sent(), media_type=bodies.BINARY)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", **documented.HEALTH)
    async def healthz() -> Response:
        """Whether the process works; if it doesn't, it has to be replaced by a new one."""
        dead = service.dead()
        return _json({"status": "dead", "dead": dead}, 503) if dead else _json({"status": "ok"})

    @app.get("/readyz", **documented.HEALTH)
    async def readyz() -> Response:
        """Whether the service is ready to solve."""
        status: JsonObject = {"status": service.status}
        if service.hung:
            status["hung"] = service.hung
        if service.status == "warming" and service.compiled[1]:
            status |= dict(zip(("compiled", "programs"), service.compiled, strict=True))
        if service.status == "ready" and service.jobs is not None and not service.jobs.is_open:
            status["ensembles"] = "waiting for another process"
        return _json(status, 200 if service.status == "ready" else 503)

    @app.get("/metrics", **documented.METRICS)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


class _PageFiles(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return FileResponse(_PAGE / "index.html", headers=_HEADERS)

    app.mount("/page", _PageFiles(directory=_PAGE), name="page")
