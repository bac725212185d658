"""The clients of a service: they send it requests to solve."""

import asyncio
import time
import urllib.parse
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from jax.typing import ArrayLike
from jaxtyping import PyTree

from ...ground.extras import installing
from ...solution.solution import EngineChoice
from ...tracing.program import is_tracer
from .. import exchange
from ..exchange import for_both, HttpRequest, JsonObject, path_of, ServiceError as ServiceError
from . import remote
from .client_jobs import EnsembleJob as EnsembleJob


# Another server of the app (such as uvicorn), or a proxy, may close connections that are idle for
# five seconds, possibly just as they are used again.
_IDLE = 4.0


class _CommonClient:
    """The common part of both clients. Each has its own way of sending a request and of pausing,
    and `_run_to_end`, which turns a coroutine into what the caller of a method gets."""

    _kind = ""  # the class of HTTPX
    _may_be_traced = False
    _sent: Callable[[HttpRequest, exchange.RetryPolicy], Coroutine]
    _paused: Callable[[float], Coroutine]
    _run_to_end: Callable[[Coroutine], Any]

    def __init__(
        self, url: str, token: str | None = None, *, timeout: float = 60.0, retries: int = 4
    ):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be like 'http://127.0.0.1:8000', got {url!r}.")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, in seconds, got {timeout}.")
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}.")
        try:
            import httpx
            import msgpack  # noqa: F401
        except ImportError as e:
            raise ImportError(
                f"the client of a service needs HTTPX and msgpack: {installing('serve')}."
            ) from e
        self.url, self._timeout, self._retries = url.rstrip("/"), timeout, retries
        self._httpx = httpx
        self._http = getattr(httpx, self._kind)(
            base_url=self.url,
            headers={"accept": f"{exchange.BINARY}, {exchange.JSON}"}
            | ({} if token is None else {"authorization": f"Bearer {token}"}),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE),
        )
        self._known: JsonObject = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @for_both
    async def problems(self) -> Any:
        """The problems of the service: a list of descriptions as from
        [`problem`][ensembleode.Client.problem]."""
        return (await self._ask("GET", "/v1/problems"))["problems"]

    @for_both
    async def problem(self, name: str) -> Any:
        """A problem: its description, its `state` (shape, dtype, labels and the registered
        numbers), `parameters`, `tspan`, `saveat` and `limits`.

        **Arguments:** `name`: the name under which it is registered.
        """
        self._known[name] = found = await self._ask("GET", path_of("problems", name))
        return found

    def solve(
        self,
        name: str,
        u0: PyTree = None,
        p: PyTree = None,
        tspan: PyTree = None,
        saveat: ArrayLike | None = None,
        deadline: float | None = None,
    ) -> PyTree:
        """Solve one trajectory, or several. Arguments that are left out have their registered
        values.

        **Arguments:**

        - `name`: the name of the problem.
        - `u0`: the initial state, or `[trajectory, *state]`.
        - `p`: the parameters: the vector of the numbers in the registered problem's arrays, or
            `[trajectory, number]`; or a pytree like the registered one.
        - `tspan`: `(t0, t1)`, or `[trajectory, 2]`.
        - `saveat`: a spacing, times, or `[trajectory, time]`.
        - `deadline`: the seconds after which the answer is of no use. The service drops requests
            that are late.

        **Returns:** an [`EnsembleSolution`][ensembleode.EnsembleSolution] of NumPy arrays; or, if
        no argument has an axis of trajectories, an [`ODESolution`][ensembleode.ODESolution]. A
        trajectory that failed has its return code, as with [`solve`][ensembleode.solve]; that isn't
        an error.

        Inside `jit`, `grad` and `vmap`, a `Client` makes the request when the program runs. Under
        `vmap`, it is one request with more trajectories. Gradients are with respect to `u0` and
        `p`, in reverse mode, and are those of the service's solver; `stats.nf` and `events` are
        None. An error of the service is then an error of JAX's, with the service's message in it.

        **Raises:** `ServiceError`; `TypeError` and `ValueError` for arguments that are not arrays
        of numbers, or, inside `jit`, `grad` and `vmap`, don't fit the problem.
        """
        given = {"u0": u0, "p": p, "tspan": tspan, "saveat": saveat}
        arguments = exchange.arguments_of(may_be_traced=self._may_be_traced, **given)
        if not any(map(is_tracer, arguments.values())):
            return self._ask_solution(name, arguments, deadline)
        known = self._known.get(name) or self.problem(name)
        return remote.solve(self, known, arguments, deadline, self._engine(name))

    def vjp(
        self,
        name: str,
        cotangent: PyTree,
        u0: PyTree = None,
        p: PyTree = None,
        tspan: Any = None,
        saveat: Any = None,
        deadline: float | None = None,
    ) -> PyTree:
        """The gradients of `sum(cotangent * u)` with respect to `u0` and `p`, for programs without
        JAX.

        **Arguments:** `cotangent`: an array of the shape of the solution's `u`. `name`, `u0`, `p`,
        `tspan`, `saveat` and `deadline`: see [`solve`][ensembleode.Client.solve].

        **Returns:** a named tuple of `u0` (in the shape of the request's), `p` (the vector; summed
        over the trajectories unless these have their own parameters) and `retcode`.

        **Raises:** the same errors as `solve`.
        """
        body = exchange.arguments_of(u0=u0, p=p, tspan=tspan, saveat=saveat, cotangent=cotangent)
        return self._ask_gradients(name, body, deadline)

    @for_both
    async def submit(
        self,
        name: str,
        u0: PyTree = None,
        p: PyTree = None,
        tspan: Any = None,
        saveat: Any = None,
        *,
        trajectories: int | None = None,
        seed: int | None = None,
    ) -> PyTree:
        """Submit a large ensemble, which the service solves durably: it goes on after a restart.

        **Arguments:**

        - `name`, `tspan`, `saveat`: see [`solve`][ensembleode.Client.solve].
        - `u0`, `p`: see `solve`; or, with `trajectories`, pairs `(low, high)` of bounds, between
            which the service draws the values of each trajectory.
        - `trajectories`: the number of trajectories to draw.
        - `seed`: the seed for drawing; the same seed draws the same values.

        **Returns:** a handle, with `status()`, `wait()`, `cancel()`, `resume()` and `result()`.

        **Raises:** the same errors as `solve`.
        """
        numbers = exchange.numbers_of if trajectories is None else exchange.bounds_of
        body = {x: numbers(x, given) for x, given in (("u0", u0), ("p", p)) if given is not None}
        body |= exchange.arguments_of(tspan=tspan, saveat=saveat)
        body |= {} if trajectories is None else {"trajectories": int(trajectories)}
        body |= {} if seed is None else {"seed": int(seed)}
        # By this key the service recognises a repeated request, and makes no second job.
        key = uuid.uuid4().hex
        answer = await self._ask("POST", path_of("problems", name, "/ensembles"), body, key=key)
        return EnsembleJob(self, answer["id"], name)

    @for_both
    async def job(self, id: str) -> Any:
        """The handle of a job that was submitted before.

        **Arguments:** `id`: the id of the job.
        """
        found = await self._ask("GET", path_of("ensembles", id))
        return EnsembleJob(self, id, found["problem"])

    @for_both
    async def jobs(self) -> Any:
        """The handles of all jobs of the service, the oldest first."""
        found, after = [], ""
        while after is not None:
            page = await self._ask("GET", "/v1/ensembles", query={"after": after})
            found += [EnsembleJob(self, job["id"], job["problem"]) for job in page["ensembles"]]
            after = page["next"]
        return found

    # The requests of `remote`.

    @for_both
    async def _ask_solution(self, name: str, body: Mapping[str, Any], deadline: Any) -> Any:
        """The solution for a request of NumPy arrays."""
        started = time.perf_counter()
        path = path_of("problems", name, "/solve")
        answer = await self._ask("POST", path, body, deadline=deadline)
        return exchange.solution(answer, self._engine(name), time.perf_counter() - started)

    @for_both
    async def _ask_gradients(self, name: str, body: Mapping[str, Any], deadline: Any) -> Any:
        """The `Gradients` for a request of NumPy arrays."""
        path = path_of("problems", name, "/vjp")
        return exchange.gradients(await self._ask("POST", path, body, deadline=deadline))

    async def _ask(self, method: str, path: str, body: PyTree = None, **options: Any) -> Any:
        request = HttpRequest(method, path, body, **options)
        attempts = exchange.RetryPolicy(
            self._retries, self._timeout, request.deadline, request.repeatable
        )
        while True:
            try:
                response = await self._sent(request, attempts)
            except self._httpx.TransportError as e:
                pause = self._after_loss(attempts, e)
            else:
                kind, content = response.headers.get("content-type", ""), response.content
                if response.is_success:
                    return exchange.unpack(kind, content)
                later = response.headers.get("retry-after")
                pause = attempts.after_refusal(response.status_code, kind, content, later)
            await self._paused(pause)

    def _engine(self, name: str) -> EngineChoice:
        return EngineChoice("service", f"{name!r} at {self.url}")

    def _after_loss(self, attempts: exchange.RetryPolicy, error: Any) -> float:
        """The seconds to wait after an exception of HTTPX; raises a `ServiceError` if it is no
        use."""
        httpx = self._httpx
        unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        slow = isinstance(error, httpx.TimeoutException) and not unsent
        if slow:
            limit = "the deadline" if attempts.left <= 0 else f"{attempts.patience:.3g} s"
            message, code = f"{self.url} did not answer within {limit}", "timeout"
        else:
            why = str(error) or type(error).__name__
            message, code = f"{self.url} can't be reached, or left off: {why}", "connection"
        broken = isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError)
        again = not slow and not broken and (unsent or attempts.repeatable)
        try:
            return attempts.after_loss(ServiceError(message, code=code), again=again)
        except ServiceError as e:
            raise e from error


class Client(_CommonClient):
    """A client of a service (`ensembleode serve`), whose solves work inside `jax.grad`, `jit` and
    `vmap`.

    Requests are tried again after a lost connection, and when the service is full or starting, or a
    gateway in front of it gave up. The pauses in between grow, or are those that the service asks
    for. Connections are kept open. A client can be used by several threads, and as a context
    manager, which closes it.

    **Arguments:**

    - `url`: the address of the service, such as `"http://127.0.0.1:8000"`.
    - `token`: sent with each request, if the service needs one.
    - `timeout`: the seconds to wait for an answer. The service has its own limits as well.
    - `retries`: how often a request is tried again.

    **Raises:** `ValueError` for malformed arguments; `ImportError` without HTTPX and msgpack.

    Its methods raise [`ServiceError`][ensembleode.ServiceError] when the service refuses a request
    or can't be reached.
    """

    _kind = "Client"
    _may_be_traced = True

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run_to_end(self, coroutine: Coroutine) -> Any:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value

    async def _paused(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _sent(self, request: HttpRequest, attempts: exchange.RetryPolicy) -> Any:
        """The answer to a request. HTTPX's timeout is that of a single read, so an answer that
        arrives byte by byte needs a limit of its own."""
        parts = []
        with self._http.stream(**request.options(attempts)) as response:
            for part in response.iter_raw():
                parts.append(part)
                if attempts.is_too_late(response.is_success):
                    raise self._httpx.ReadTimeout("too late", request=response.request)
        content = b"".join(parts)
        return self._httpx.Response(response.status_code, headers=response.headers, content=content)


class AsyncClient(_CommonClient):
    """A client of a service for `asyncio`: a [`Client`][ensembleode.Client] whose methods are
    awaited, and so are those of its jobs.

    Its solves can't be differentiated, nor be used inside `jit`. It belongs to one event loop. It
    can be used as an asynchronous context manager, which closes it.

    **Arguments:** `url`, `token`, `timeout` and `retries`: see `Client`.

    **Raises:** the same errors as `Client`.
    """

    _kind = "AsyncClient"

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.aclose()

    def _run_to_end(self, coroutine: Coroutine) -> Any:
        return coroutine

    async def _paused(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _sent(self, request: HttpRequest, attempts: exchange.RetryPolicy) -> Any:
        try:
            async with asyncio.timeout(attempts.rest):
                return await self._http.request(**request.options(attempts))
        except TimeoutError as e:
            raise self._httpx.ReadTimeout("too late") from e
