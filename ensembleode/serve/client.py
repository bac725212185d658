"""The clients of a service, which solve on it, and their handles of long jobs."""

import asyncio
import dataclasses
import functools
import math
import time
import urllib.parse
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..solution import EngineChoice, ODESolution
from ..tracing.program import is_tracer
from . import exchange, remote
from .exchange import ServiceError as ServiceError


# The service closes connections that are idle for half a minute. A different server for its app
# (such as uvicorn), or a proxy, may close them after five seconds, possibly at the moment at which
# they are used again.
_IDLE = 4.0
# The seconds between two queries for a job's status, at first and at most.
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 5.0
# The bytes of one part of a job's result.
_PART = 2**24
_ENDED = frozenset({"done", "failed", "cancelled"})


@dataclasses.dataclass
class _Request:
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    query: Mapping[str, Any] | None = None
    deadline: float | None = None
    repeatable: bool = True
    key: str | None = None

    def options(self, attempts: exchange.Attempts) -> dict[str, Any]:
        """The options of HTTPX's `request`."""
        headers = {} if self.key is None else {"idempotency-key": self.key}
        content = None
        if self.body is not None:
            headers["content-type"] = exchange.BINARY
            # The service is told how much of the deadline is left.
            late = {} if self.deadline is None else {"deadline_ms": max(1.0, 1e3 * attempts.left)}
            content = exchange.pack({**self.body, **late})
        asked = {"method": self.method, "url": self.path, "params": self.query}
        return asked | {"headers": headers, "content": content, "timeout": attempts.patience}


def _path(kind: str, name: str, what: str = "") -> str:
    return f"/v1/{kind}/{urllib.parse.quote(name, safe='')}{what}"


def _bounds(name: str, pair: Any) -> dict[str, Any]:
    if not (isinstance(pair, list | tuple | np.ndarray) and len(pair) == 2):
        what = "a pair (low, high), between which each trajectory's is drawn"
        raise ValueError(f"with trajectories, {name} must be {what}, got {pair!r:.200}.")
    return {"low": _numbers(name, pair[0]), "high": _numbers(name, pair[1])}


def _arguments(*, may_be_traced: bool = False, **given: Any) -> dict[str, Any]:
    """The arguments that are not None, as NumPy arrays; those that are traced stay as they are."""
    return {name: _numbers(name, x, may_be_traced) for name, x in given.items() if x is not None}


def _numbers(name: str, x: Any, may_be_traced: bool = False) -> Any:
    x = _as_vector(x) if name == "p" else x
    if not remote.is_traced(x):
        return exchange.numbers(name, x)
    if not may_be_traced:
        raise TypeError(
            f"{name} is traced: only Client.solve works inside jit, grad and vmap. Call this "
            "outside of them."
        )
    return x if is_tracer(x) else jnp.asarray(x)


def _as_vector(p: Any) -> Any:
    """Parameters as they are, if they are an array or lists of numbers; for a pytree, the vector of
    its numbers that are real and not integers."""
    if p is None or isinstance(p, jax.Array | np.ndarray | np.generic):
        return p
    leaves = jax.tree.leaves(p)
    if isinstance(p, int | float | list | tuple) and not any(map(eqx.is_array, leaves)):
        return p
    leaves = [x for x in leaves if eqx.is_inexact_array(x) or isinstance(x, float)]
    leaves = [x for x in leaves if not jnp.iscomplexobj(x)]
    if not leaves:
        raise TypeError(f"p must have numbers that are no integers in it, got {p!r:.200}.")
    xp = jnp if any(map(is_tracer, leaves)) else np
    dtype = jnp.result_type(*leaves)
    return xp.concatenate([xp.asarray(x).astype(dtype).reshape(-1) for x in leaves])


def _both(method: Callable[..., Coroutine]) -> Callable[..., Any]:
    """Makes a method for both clients from a coroutine. In the asynchronous client it is awaited.
    In the other one it is run to its end at once, as its requests and pauses block."""

    @functools.wraps(method)
    def asking(self: Any, *arguments: Any, **named: Any) -> Any:
        return self._made(method(self, *arguments, **named))

    return asking


class _Both:
    """The common part of both clients. Each has its own way of sending a request and of pausing,
    and `_made`, which turns a coroutine into what the caller of a method gets."""

    _kind = ""  # the class of HTTPX
    _may_be_traced = False
    _sent: Callable[[_Request, exchange.Attempts], Coroutine]
    _paused: Callable[[float], Coroutine]
    _made: Callable[[Coroutine], Any]

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
                "the client of a service needs HTTPX and msgpack: pip install 'ensembleode[serve]'."
            ) from e
        self.url, self._timeout, self._retries = url.rstrip("/"), timeout, retries
        self._httpx = httpx
        self._http = getattr(httpx, self._kind)(
            base_url=self.url,
            headers={"accept": f"{exchange.BINARY}, {exchange.JSON}"}
            | ({} if token is None else {"authorization": f"Bearer {token}"}),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_IDLE),
        )
        self._known: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    @_both
    async def problems(self) -> Any:
        """The problems of the service: a list of descriptions as from
        [`problem`][ensembleode.Client.problem]."""
        return (await self._ask(_Request("GET", "/v1/problems")))["problems"]

    @_both
    async def problem(self, name: str) -> Any:
        """A problem: its description, its `state` (shape, dtype, labels and the registered
        numbers), `parameters`, `tspan`, `saveat` and `limits`.

        **Arguments:** `name`: the name under which it is registered.
        """
        self._known[name] = found = await self._ask(_Request("GET", _path("problems", name)))
        return found

    def solve(
        self,
        name: str,
        u0: Any = None,
        p: Any = None,
        tspan: Any = None,
        saveat: Any = None,
        deadline: float | None = None,
    ) -> Any:
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
        arguments = _arguments(may_be_traced=self._may_be_traced, **given)
        if not any(map(is_tracer, arguments.values())):
            return self._ask_solution(name, arguments, deadline)
        known = self._known.get(name) or self.problem(name)
        return remote.solve(self, known, arguments, deadline, self._engine(name))

    def vjp(
        self,
        name: str,
        cotangent: Any,
        u0: Any = None,
        p: Any = None,
        tspan: Any = None,
        saveat: Any = None,
        deadline: float | None = None,
    ) -> Any:
        """The gradients of `sum(cotangent * u)` with respect to `u0` and `p`, for programs without
        JAX.

        **Arguments:** `cotangent`: an array of the shape of the solution's `u`. `name`, `u0`, `p`,
        `tspan`, `saveat` and `deadline`: see [`solve`][ensembleode.Client.solve].

        **Returns:** a named tuple of `u0` (in the shape of the request's), `p` (the vector; summed
        over the trajectories unless these have their own parameters) and `retcode`.

        **Raises:** the same errors as `solve`.
        """
        body = _arguments(u0=u0, p=p, tspan=tspan, saveat=saveat, cotangent=cotangent)
        return self._ask_gradients(name, body, deadline)

    @_both
    async def submit(
        self,
        name: str,
        u0: Any = None,
        p: Any = None,
        tspan: Any = None,
        saveat: Any = None,
        *,
        trajectories: int | None = None,
        seed: int | None = None,
    ) -> Any:
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
        numbers = _numbers if trajectories is None else _bounds
        body = {x: numbers(x, given) for x, given in (("u0", u0), ("p", p)) if given is not None}
        body |= _arguments(tspan=tspan, saveat=saveat)
        body |= {} if trajectories is None else {"trajectories": int(trajectories)}
        body |= {} if seed is None else {"seed": int(seed)}
        # By this key the service recognises a repeated request, and makes no second job.
        path, key = _path("problems", name, "/ensembles"), uuid.uuid4().hex
        answer = await self._ask(_Request("POST", path, body, key=key))
        return EnsembleJob(self, answer["id"], name)

    @_both
    async def job(self, id: str) -> Any:
        """The handle of a job that was submitted before.

        **Arguments:** `id`: the id of the job.
        """
        found = await self._ask(_Request("GET", _path("ensembles", id)))
        return EnsembleJob(self, id, found["problem"])

    @_both
    async def jobs(self) -> Any:
        """The handles of all jobs of the service, the oldest first."""
        found, after = [], ""
        while after is not None:
            page = await self._ask(_Request("GET", "/v1/ensembles", query={"after": after}))
            found += [EnsembleJob(self, job["id"], job["problem"]) for job in page["ensembles"]]
            after = page["next"]
        return found

    # The requests of `remote`.

    @_both
    async def _ask_solution(self, name: str, body: Mapping[str, Any], deadline: Any) -> Any:
        """The solution for a request of NumPy arrays."""
        started = time.perf_counter()
        request = _Request("POST", _path("problems", name, "/solve"), body, deadline=deadline)
        answer = await self._ask(request)
        return exchange.solution(answer, self._engine(name), time.perf_counter() - started)

    @_both
    async def _ask_gradients(self, name: str, body: Mapping[str, Any], deadline: Any) -> Any:
        """The `Gradients` for a request of NumPy arrays."""
        request = _Request("POST", _path("problems", name, "/vjp"), body, deadline=deadline)
        return exchange.gradients(await self._ask(request))

    async def _ask(self, request: _Request) -> Any:
        attempts = exchange.Attempts(
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

    def _after_loss(self, attempts: exchange.Attempts, error: Any) -> float:
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


class Client(_Both):
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

    def _made(self, coroutine: Coroutine) -> Any:
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value

    async def _paused(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _sent(self, request: _Request, attempts: exchange.Attempts) -> Any:
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


class AsyncClient(_Both):
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

    def _made(self, coroutine: Coroutine) -> Any:
        return coroutine

    async def _paused(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _sent(self, request: _Request, attempts: exchange.Attempts) -> Any:
        try:
            async with asyncio.timeout(attempts.rest):
                return await self._http.request(**request.options(attempts))
        except TimeoutError as e:
            raise self._httpx.ReadTimeout("too late") from e


class EnsembleJob:
    """The handle of a job of [`Client.submit`][ensembleode.Client.submit]. If it is from an
    `AsyncClient`, its methods are awaited.

    - `id`: the job's id in the service, with which [`Client.job`][ensembleode.Client.job] finds it
        again.
    - `problem`: the name of the problem.
    """

    def __init__(self, client: _Both, id: str, problem: str):
        self._client, self.id, self.problem = client, id, problem
        self._made = client._made

    async def _ask(self, method: str, what: str = "", **options: Any) -> Any:
        request = _Request(method, _path("ensembles", self.id, what), **options)
        return await self._client._ask(request)

    @_both
    async def status(self) -> Any:
        """The status of the job: a dictionary of `"status"` (`"queued"`, `"running"`, `"done"`,
        `"failed"` or `"cancelled"`), how many of the `"trajectories"` are `"done"`, their
        `"retcodes"`, when it was `"created"`, for how many `"seconds"` it has run, and its
        `"error"`."""
        return await self._ask("GET")

    @_both
    async def wait(self, timeout: float | None = None) -> Any:
        """Wait until the job has ended, and return its status: done, failed or cancelled.

        **Arguments:** `timeout`: in seconds; None for as long as it takes.

        **Raises:** `TimeoutError` after that time.
        """
        return await self._ended(timeout)

    async def _ended(self, timeout: float | None) -> Any:
        started, pause = time.monotonic(), _FIRST_LOOK
        while (status := await self._ask("GET"))["status"] not in _ENDED:
            left = math.inf if timeout is None else started + timeout - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"the job {self.id} has not ended after {timeout:g} s: "
                    f"{status['done']} of {status['trajectories']} trajectories are done."
                )
            await self._client._paused(min(pause, left))
            pause = min(_LONGEST_LOOK, 1.5 * pause)
        return status

    @_both
    async def cancel(self) -> Any:
        """Cancel the job, unless it has ended; its results so far are kept. Returns its status."""
        return await self._ask("POST", "/cancel")

    @_both
    async def delete(self) -> Any:
        """Delete the job from the service, with all its results; if it is running, cancel it
        first."""
        await self._ask("POST", "/cancel")
        await self._ask("DELETE", repeatable=False)

    @_both
    async def resume(self) -> Any:
        """Resume a job that was cancelled or failed. Returns its status."""
        return await self._ask("POST", "/resume", repeatable=False)

    @_both
    async def result(
        self, start: int = 0, stop: int | None = None, *, timeout: float | None = None
    ) -> Any:
        """Wait for the end of the job, and fetch the solution.

        **Arguments:**

        - `start`, `stop`: the range of trajectories; by default all. They must fit into memory.
        - `timeout`: the seconds to wait for the end.

        **Returns:** an [`EnsembleSolution`][ensembleode.EnsembleSolution]. Trajectories that a
        cancelled job did not get to have the return code `Default`.

        **Raises:** `TimeoutError`; `ServiceError` for a job that failed.
        """
        status = await self._ended(timeout)
        if status["status"] == "failed":
            raise ServiceError(str(status.get("error") or "the job failed."), code="job_failed")
        n = status["trajectories"]
        at, end, _ = slice(start, stop).indices(n)
        if at >= end:
            raise ValueError(f"there are no trajectories from {start} to {stop}: the job has {n}.")
        engine, elapsed = self._client._engine(self.problem), float(status.get("seconds", math.nan))
        # The first trajectory alone, whose size then tells how many fit into a part.
        parts, size = [], 1
        while at < end:
            query = {"start": at, "stop": min(end, at + size)}
            answer = await self._ask("GET", "/download", query=query)
            part = exchange.solution(answer, engine, elapsed)
            if isinstance(part, ODESolution) or not len(part):
                raise ServiceError("the answer is not of an ensemble.", code="bad_answer")
            parts.append(part)
            at += len(part)
            size = max(1, _PART // max(1, part.u[0].nbytes))
        return exchange.concatenated(parts)

    def __repr__(self) -> str:
        return f"EnsembleJob({self.id!r}, problem={self.problem!r})"
