"""The clients with a service in a thread: their results, compared with those of `solve`."""

import asyncio
import contextlib
import functools
import re
import socket
import sys
import time
from datetime import datetime, timedelta, UTC
from email.utils import format_datetime

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.ground.extras import installing
from ensembleode.serve import exchange
from ensembleode.serve.client import client_jobs

from ..problems import lotka_volterra
from .running import Running


U0, P, TIMES = jnp.array([1.0, 1.0]), jnp.array([1.5, 1.0, 3.0, 1.0]), np.linspace(0.0, 2.0, 5)
STARTS = np.array([[1.0, 1.0], [1.2, 0.8], [0.5, 1.0]])
RATES = np.asarray(P) * np.array([[1.0], [1.1], [0.9]])
NETWORK = eqx.nn.MLP(2, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(1))
LOTKA = eo.ODEProblem(lotka_volterra, U0, (0.0, 2.0), P)


def problems():
    registry = eo.serve.Registry()
    few = eo.serve.Limits(saveat=8, trajectories=64)
    registry.add("lotka", LOTKA, saveat=TIMES, limits=few, reltol=1e-8, abstol=1e-8)
    network = eo.ODEProblem(lambda u, p, t: p(u), U0, (0.0, 1.0), NETWORK)
    registry.add("network", network, limits=few)
    # From 1 on it blows up before the end.
    square = eo.ODEProblem(lambda u, p, t: p * u**2, jnp.array(0.5), (0.0, 1.5), 1.0)
    registry.add("square", square, saveat=0.5, limits=few)
    return registry


class Flaky:
    """The app, but for faults in answers to come: `"drop"`, `"drop after"` the app has answered,
    `"hang"`, or a status and headers."""

    def __init__(self, app):
        self.app, self.faults, self.seen = app, [], []

    async def __call__(self, scope, receive, send):
        is_asked = scope["type"] == "http" and scope["path"].startswith("/v1")
        if is_asked:
            headers = {key.decode(): value.decode() for key, value in scope["headers"]}
            self.seen.append((scope["method"], scope["path"], headers))
        fault = self.faults.pop(0) if is_asked and self.faults else None
        if fault is None:
            await self.app(scope, receive, send)
            return
        # More is promised than comes, and the connection is closed.
        status, headers, pieces, ends, pause = 200, {"content-length": "100"}, [b"{"], False, 0.0
        if fault == "hang":
            await asyncio.sleep(1.0)
        elif fault == "drop after":

            async def swallow(message):
                pass

            await self.app(scope, receive, swallow)
        elif fault == "trickle":
            headers, pieces, ends, pause = {"content-length": "60"}, [b" "] * 60, True, 0.05
        elif fault != "drop":
            (status, headers), pieces, ends = fault, [b"Bad luck"], True
        headers = [(key.encode(), value.encode()) for key, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i, piece in enumerate(pieces, 1):
            await asyncio.sleep(pause)
            more = i < len(pieces) or not ends
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    @property
    def paths(self):
        return [path.rpartition("/")[2] for _, path, _ in self.seen]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """The address of a service, and the faults in front of it."""
    # (The smallest batches there are: one size to be compiled.)
    how = {"max_batch": 1, "max_wait_ms": 2.0, "store": tmp_path_factory.mktemp("jobs")}
    with Running(problems(), around=Flaky, **how) as running:
        yield running.url, running.around


@pytest.fixture
def flaky(service):
    faults = service[1]
    faults.faults, faults.seen = [], []
    return faults


@pytest.fixture
def client(service, flaky, monkeypatch):
    monkeypatch.setattr(exchange, "_FIRST_PAUSE", 0.001)
    with eo.Client(service[0], token="secret") as made:
        yield made
    flaky.faults = []


def locally(u0=U0, p=P, tspan=(0.0, 2.0), saveat=TIMES):
    prob = eo.remake(LOTKA, u0=u0, p=p, tspan=tspan)
    return eo.solve(prob, saveat=saveat, reltol=1e-8, abstol=1e-8)


def same(found, expected, rtol=1e-9):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-12)


def test_problems(client):
    assert [x["name"] for x in client.problems()] == ["lotka", "network", "square"]
    found = client.problem("lotka")
    assert found == client.problems()[0]
    assert found["state"]["shape"] == [2]
    assert found["parameters"]["size"] == 4


def test_one_trajectory(client):
    sol, here = client.solve("lotka", u0=[1, 2]), locally(jnp.array([1.0, 2.0]))
    assert isinstance(sol, eo.ODESolution)
    same(sol.u, here.u)
    assert sol.t.tolist() == TIMES.tolist()
    assert sol.retcode is eo.ReturnCode.Success
    assert (sol.length, sol.stats.naccept) == (5, here.stats.naccept)
    assert sol.engine.name == "service"
    assert client.url in str(sol.engine)
    assert "5 times" in repr(sol)


def test_an_ensemble(client):
    sim = client.solve("lotka", u0=STARTS, p=RATES)
    assert isinstance(sim, eo.EnsembleSolution)
    expected = [locally(jnp.asarray(u0), jnp.asarray(p)).u for u0, p in zip(STARTS, RATES)]  # noqa: B905
    same(sim.u, np.stack(expected))
    assert sim.successful.all()
    assert sim.t.shape == (5,)
    assert sim[1].u.shape == (5, 2)
    assert sim.elapsed > 0
    assert "service" in repr(sim)
    sim.u[0] = 0  # it is the caller's


def test_times(client):
    assert client.solve("lotka", saveat=0.5, tspan=(0.0, 1.0)).t.tolist() == [0.0, 0.5, 1.0]
    sim = client.solve("lotka", tspan=[[0.0, 1.0], [0.0, 2.0]], saveat=0.5)
    assert sim.lengths.tolist() == [3, 5]
    assert sim[0].t.tolist() == [0.0, 0.5, 1.0]
    same(sim[1].u, locally(saveat=0.5).u)


def test_failure_is_no_error(client):
    sim = client.solve("square", u0=[0.5, 2.0])
    assert sim.failed.tolist() == [1]
    assert np.isnan(sim.u[1, -1])
    assert sim.lengths[1] < 4


def test_pytree_of_parameters(client):
    other = jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, NETWORK)
    prob = eo.ODEProblem(lambda u, p, t: p(u), U0, (0.0, 1.0), other)
    same(client.solve("network", p=other).u, eo.solve(prob).u)
    numbers = jax.tree.leaves(eqx.filter(other, eqx.is_array))
    flat = np.concatenate([np.ravel(x) for x in numbers])
    same(client.solve("network", p=flat).u, client.solve("network", p=other).u, rtol=0)


def test_vjp_without_jax(client):
    found = client.vjp("lotka", np.ones((3, 5, 2)), u0=STARTS)

    def total(u0, p):
        return jnp.sum(locally(u0, p).u)

    here = [jax.grad(total, (0, 1))(jnp.asarray(u0), P) for u0 in STARTS]
    same(found.u0, np.stack([u0 for u0, _ in here]), rtol=1e-6)
    same(found.p, sum(p for _, p in here), rtol=1e-6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"u0": "numbers"}, "u0 must be an array of numbers"),
        ({"u0": [[1.0], [1.0, 2.0]]}, "u0 must be an array of numbers, got rows of unequal"),
        ({"p": {"a": "b"}}, "p must have numbers"),
        ({"p": [True, False]}, "p must be an array of numbers"),
    ],
)
def test_wrong_arguments(client, bad, message):
    with pytest.raises(TypeError, match=message):
        client.solve("lotka", **bad)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("127.0.0.1:8000", {}, "url must be like"),
        ("ftp://here", {}, "url must be like"),
        ("http://", {}, "url must be like"),
        ("http://here", {"timeout": 0}, "timeout must be positive"),
        ("http://here", {"retries": -1}, "retries must not be negative"),
    ],
)
def test_wrong_options(url, options, message):
    with pytest.raises(ValueError, match=message):
        eo.Client(url, **options)


def by_client(client):
    return lambda u0, p: client.solve("lotka", u0=u0, p=p)


def loss(solve, u0, p):
    return jnp.sum(solve(u0, p).u ** 2)


def gradients(solve):
    return jax.value_and_grad(functools.partial(loss, solve), (0, 1))


def mapped_twice(solve):
    of_starts = jax.vmap(lambda u0, p: solve(u0, p).u, (0, None))
    return jax.vmap(of_starts, (None, 0))(jnp.asarray(STARTS), jnp.asarray(RATES))


WAYS = {
    "eager": lambda solve: gradients(solve)(U0, P),
    "jit": lambda solve: jax.jit(gradients(solve))(U0, P),
    "mapped": lambda solve: jax.vmap(gradients(solve), (0, None))(jnp.asarray(STARTS), P),
    "mapped, jit": lambda solve: jax.jit(jax.vmap(gradients(solve), (0, None)))(STARTS, P),
    "mapped twice": mapped_twice,
    "jacobian": lambda solve: jax.jacrev(lambda u0: solve(u0, P).u)(U0),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("way", WAYS)
def test_gradients(client, flaky, way):
    found = WAYS[way](by_client(client))
    pulled = way != "mapped twice"
    assert flaky.paths == ["lotka", "solve", "vjp"][: 2 + pulled]
    same(found, WAYS[way](locally), rtol=1e-6 if pulled else 1e-9)


def test_gradients_of_an_ensemble(client, flaky):
    def every(u0, p):
        return jax.vmap(lambda u0: locally(u0, p).u)(u0)

    found = jax.grad(lambda u0, p: loss(by_client(client), u0, p), (0, 1))(jnp.asarray(STARTS), P)
    here = jax.grad(lambda u0, p: jnp.sum(every(u0, p) ** 2), (0, 1))(jnp.asarray(STARTS), P)
    same(found, here, rtol=1e-6)
    assert flaky.paths == ["lotka", "solve", "vjp"]


def test_in_jit(client):
    sim = jax.jit(lambda u0: client.solve("lotka", u0=u0))(STARTS)
    assert isinstance(sim, eo.EnsembleSolution)
    same(sim.u, client.solve("lotka", u0=STARTS).u)
    assert np.isnan(sim.elapsed)
    assert sim.stats.nf is None
    sol = jax.jit(lambda u0: client.solve("lotka", u0=u0, saveat=0.5, tspan=(0.0, 1.0)))(U0)
    assert isinstance(sol, eo.ODESolution)
    assert sol.t.tolist() == [0.0, 0.5, 1.0]


def test_mapped_ensemble(client, flaky):
    """Trajectories of trajectories: those of one request that has some already."""

    def total(p):
        return jnp.sum(client.solve("lotka", u0=STARTS, p=p).u ** 2)

    found = jax.vmap(jax.grad(total))(jnp.asarray(RATES[:2]))
    assert flaky.paths == ["lotka", "solve", "vjp"]
    expected = [jax.grad(total)(jnp.asarray(p)) for p in RATES[:2]]
    same(found, np.stack(expected))


def test_mapped_times(client):
    """Times alone have no axis of trajectories at the service."""
    saveat = jnp.array([[0.5, 1.0], [1.0, 2.0]])
    found = jax.vmap(lambda saveat: client.solve("lotka", saveat=saveat))(saveat)
    assert found.t.tolist() == saveat.tolist()
    expected = [locally(saveat=np.asarray(x)).u for x in saveat]
    same(found.u, np.stack(expected))


@pytest.mark.slow
def test_gradient_by_a_pytree(client):
    def there(p):
        return jnp.sum(client.solve("network", p=p).u)

    def here(p):
        prob = eo.ODEProblem(lambda u, p, t: p(u), U0, (0.0, 1.0), p)
        return jnp.sum(eo.solve(prob).u)

    same(eqx.filter_grad(there)(NETWORK), eqx.filter_grad(here)(NETWORK), rtol=1e-6)


def test_gradient_by_a_list(client):
    def total(a, b):
        return jnp.sum(client.solve("lotka", p=[a, b, 3.0, 1.0]).u)

    found = jax.grad(total, (0, 1))(1.5, 1.0)
    here = jax.grad(lambda p: jnp.sum(locally(p=p).u))(P)
    same(jnp.stack(found), here[:2], rtol=1e-6)


def test_failed_trajectory_is_masked(client):
    def total(u0):
        sim = client.solve("square", u0=u0)
        return jnp.sum(jnp.where(sim.successful[:, None], sim.u, 0))

    found = jax.grad(total)(jnp.array([0.5, 2.0]))
    assert found[0] > 1
    assert found[1] == 0


def test_gradient_of_nan(client):
    """The service takes numbers only, but the gradient of what is NaN is NaN."""

    def total(u0, p):
        u = client.solve("lotka", u0=u0, p=p).u
        return jnp.sum(u[0]) * jnp.nan + jnp.sum(u[1:])

    u0, p = jax.grad(total, (0, 1))(jnp.asarray(STARTS), jnp.asarray(RATES))
    assert np.isnan(u0).all(axis=1).tolist() == [True, False, False]
    assert np.isnan(p).all(axis=1).tolist() == [True, False, False]
    assert np.isfinite(u0[1:]).all()
    _, p = jax.grad(total, (0, 1))(jnp.asarray(STARTS), P)
    assert np.isnan(p).all()


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f: jax.jvp(f, (U0,), (U0,)),
        lambda f: jax.hessian(f)(U0),
        lambda f: jax.grad(lambda u0: jnp.sum(jax.grad(f)(u0)))(U0),
    ],
    ids=["jvp", "hessian", "twice"],
)
def test_only_first_reverse_derivatives(client, differentiate):
    with pytest.raises(TypeError, match="first gradients, in reverse mode"):
        differentiate(lambda u0: loss(by_client(client), u0, P))


@pytest.mark.parametrize("name", ["tspan", "saveat"])
def test_not_differentiated_by_times(client, name):
    def total(end):
        times = {"saveat": np.array([0.5, 1.0]), name: jnp.stack([0.5 * (name == "saveat"), end])}
        return jnp.sum(client.solve("lotka", **times).u)

    with pytest.raises(TypeError, match=f"by {name}.*stop_gradient"):
        jax.grad(total)(1.5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"p": np.ones(3)}, ValueError, r"p must have the shape \[4\], or \[n, 4\]"),
        ({"p": np.ones((2, 4))}, ValueError, "different numbers of trajectories"),
        ({"tspan": np.array([[0.0, 1.0]] * 3), "saveat": 0.5}, TypeError, "as an array of times"),
    ],
)
def test_wrong_shapes_in_jit(client, arguments, error, message):
    with pytest.raises(error, match=message):
        jax.jit(lambda u0: client.solve("lotka", u0=u0, **arguments).u)(STARTS)


def test_error_in_jit_says_why(client):
    with pytest.raises(Exception, match=r"(?s)u0\[0\]\[0\].*422"):
        jax.jit(lambda u0: client.solve("lotka", u0=u0).u)(STARTS * np.nan).block_until_ready()


def test_numbers_that_are_not_traced_stay_exact(client):
    """A float32 program does not round the constants of a request."""
    with jax.enable_x64(False):
        sol = jax.jit(lambda u0: client.solve("lotka", u0=u0, tspan=(0.0, 0.3), saveat=0.1))(
            np.ones(2, np.float32)
        )
        assert sol.u.dtype == np.float32
        g = jax.jit(jax.grad(lambda u0: jnp.sum(client.solve("lotka", u0=u0).u)))(
            np.ones(2, np.float32)
        )
        assert g.dtype == np.float32
    same(sol.u, locally(tspan=(0.0, 0.3), saveat=0.1).u, rtol=1e-6)


def test_async(service):
    async def everything():
        async with eo.AsyncClient(service[0]) as client:
            assert "http" in repr(client)
            names = [x["name"] for x in await client.problems()]
            sols = await asyncio.gather(*(client.solve("lotka", u0=u0) for u0 in STARTS))
            with pytest.raises(eo.ServiceError, match="NaN"):
                await client.solve("lotka", u0=[np.nan, 1.0])
            gradient = await client.vjp("lotka", np.ones((5, 2)))
            job = await client.submit("lotka", u0=STARTS)
            assert job.id in {other.id for other in await client.jobs()}
            assert (await client.job(job.id)).problem == "lotka"
            sols.append(await job.result(timeout=60))
            return names, sols, (await client.problem("lotka"))["name"], gradient

    names, (*sols, of_job), name, gradient = asyncio.run(everything())
    assert "lotka" in names
    assert name == "lotka"
    assert gradient.u0.shape == (2,)
    with eo.Client(service[0]) as client:
        together = client.solve("lotka", u0=STARTS)
    for sol, u in zip(sols, together.u, strict=True):
        np.testing.assert_array_equal(sol.u, u)
    np.testing.assert_array_equal(of_job.u, together.u)


def test_async_is_not_for_jit(service):
    async def solved(u0):
        async with eo.AsyncClient(service[0]) as client:
            return (await client.solve("lotka", u0=u0)).u

    with pytest.raises(TypeError, match="u0 is traced"):
        jax.jit(lambda u0: asyncio.run(solved(u0)))(U0)


def test_async_tries_again(service, flaky, monkeypatch):
    monkeypatch.setattr(exchange, "_FIRST_PAUSE", 0.001)
    flaky.faults = ["drop", (503, {})]

    async def solved():
        async with eo.AsyncClient(service[0]) as client:
            return await client.solve("lotka")

    assert asyncio.run(solved()).u.shape == (5, 2)
    assert len(flaky.seen) == 3


@pytest.mark.parametrize(
    "faults",
    [
        ["drop"],
        ["drop", "drop", "drop", "drop"],
        [(429, {"retry-after": "0"}), (502, {}), (503, {}), (504, {})],
    ],
)
def test_tries_again(client, flaky, faults):
    flaky.faults = list(faults)
    same(client.solve("lotka").u, locally().u)
    assert len(flaky.seen) == len(faults) + 1
    assert {headers["authorization"] for *_, headers in flaky.seen} == {"Bearer secret"}


def test_in_jit_it_tries_again(client, flaky):
    gradient = jax.jit(jax.grad(lambda u0: loss(by_client(client), u0, P)))
    client.problem("lotka")
    flaky.faults = ["drop", None, (503, {})]
    found = gradient(U0)
    same(found, jax.grad(lambda u0: loss(locally, u0, P))(U0), rtol=1e-6)


def test_waits_as_long_as_asked(client, flaky):
    flaky.faults = [(429, {"retry-after": "0.3"})]
    started = time.perf_counter()
    client.solve("lotka")
    assert time.perf_counter() - started >= 0.3


def test_gives_up(client, flaky):
    flaky.faults = ["drop"] * 10
    with pytest.raises(eo.ServiceError, match="can't be reached, or left off") as caught:
        client.solve("lotka")
    assert (caught.value.status, caught.value.code) == (None, "connection")
    assert len(flaky.seen) == 5
    flaky.faults = [(503, {})] * 10
    with pytest.raises(eo.ServiceError, match="Bad luck") as caught:
        client.solve("lotka")
    assert caught.value.status == 503


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 500])
def test_does_not_repeat_what_is_refused(client, flaky, status):
    flaky.faults = [(status, {})] * 2
    with pytest.raises(eo.ServiceError, match="Bad luck"):
        client.solve("lotka")
    assert len(flaky.seen) == 1


def test_refusal_names_the_field(client, flaky):
    u0 = STARTS.copy()
    u0[2, 1] = np.nan
    with pytest.raises(eo.ServiceError, match=r"u0\[2\]\[1\]: NaN.*422") as caught:
        client.solve("lotka", u0=u0)
    error = caught.value
    assert (error.status, error.code, error.path) == (422, "invalid", "u0[2][1]")
    assert len(flaky.seen) == 1
    with pytest.raises(eo.ServiceError, match="limit trajectories=64") as caught:
        client.solve("lotka", u0=np.ones((65, 2)))
    assert caught.value.status == 413
    with pytest.raises(eo.ServiceError, match="no problem 'nobody'") as caught:
        client.solve("nobody")
    assert caught.value.status == 404


def test_timeout(service, flaky):
    flaky.faults = ["hang"]
    with (
        eo.Client(service[0], timeout=0.1) as client,
        pytest.raises(eo.ServiceError, match=r"did not answer within 0\.1 s") as caught,
    ):
        client.solve("lotka")
    assert caught.value.code == "timeout"
    assert len(flaky.seen) == 1


def test_an_answer_that_comes_by_the_byte(service, client, flaky):
    """Each byte is there in time; the answer is not."""
    flaky.faults = ["trickle"]
    with pytest.raises(eo.ServiceError) as raised:
        client.solve("lotka", deadline=0.3)
    assert raised.value.code == "deadline"
    flaky.faults = ["trickle"]

    async def ask():
        async with eo.AsyncClient(service[0]) as client:
            await client.solve("lotka", deadline=0.3)

    with pytest.raises(eo.ServiceError) as raised:
        asyncio.run(ask())
    assert raised.value.code == "deadline"


def test_own_deadline(client, flaky):
    flaky.faults = [(504, {})]
    with pytest.raises(eo.ServiceError, match="504"):
        client.solve("lotka", deadline=10.0)
    assert len(flaky.seen) == 1
    # It is for all the attempts together.
    flaky.faults = [(429, {"retry-after": "5"})]
    started = time.perf_counter()
    with pytest.raises(eo.ServiceError, match="429"):
        client.solve("lotka", deadline=1.0)
    assert time.perf_counter() - started < 1.0
    flaky.faults = ["drop"]
    assert client.solve("lotka", deadline=30.0).u.shape == (5, 2)


def test_nobody_there():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with (
        eo.Client(url, retries=1) as client,
        pytest.raises(eo.ServiceError, match="can't be reached") as caught,
    ):
        client.problems()
    assert caught.value.code == "connection"


def test_retry_after_a_date():
    in_a_minute = datetime.now(UTC) + timedelta(seconds=60)
    assert 50 < exchange._seconds(format_datetime(in_a_minute, usegmt=True)) <= 60
    assert exchange._seconds("soon") == exchange._seconds(None) == exchange._seconds("-3") == 0


def test_pauses_grow():
    attempts = exchange.RetryPolicy(4, 60.0, None)
    pauses = [attempts.after_refusal(503, "", b"", None) for _ in range(4)]
    for i, pause in enumerate(pauses):
        assert 0.5 <= pause / (0.1 * 2**i) <= 1
    with pytest.raises(eo.ServiceError):
        attempts.after_refusal(503, "", b"", None)
    # Longer than an answer may take is not waited.
    with pytest.raises(eo.ServiceError):
        exchange.RetryPolicy(4, 60.0, None).after_refusal(429, "", b"", "61")


def test_what_can_not_be_repeated():
    error = eo.ServiceError("lost")
    for status in (502, 504):
        with pytest.raises(eo.ServiceError):
            exchange.RetryPolicy(4, 60.0, None, repeatable=False).after_refusal(
                status, "", b"", None
            )
    assert exchange.RetryPolicy(4, 60.0, None, repeatable=False).after_refusal(503, "", b"", None)
    with pytest.raises(eo.ServiceError, match="lost"):
        exchange.RetryPolicy(4, 60.0, None, repeatable=False).after_loss(error, again=False)


def test_answers_are_numbers_only():
    packed = exchange.pack({"x": {"dtype": "|O", "shape": [1], "data": b"12345678"}})
    with pytest.raises(eo.ServiceError, match="can't be read"):
        exchange.unpack(exchange.BINARY, packed)
    with pytest.raises(eo.ServiceError, match="is this an ensembleode service"):
        exchange.unpack("text/html", b"<html>")


def test_job(client):
    job = client.submit("lotka", u0=np.tile(STARTS, (100, 1)))
    assert client.job(job.id).problem == "lotka"
    assert job.id in {other.id for other in client.jobs()}
    assert job.id in repr(job)
    assert job.wait(60)["status"] == "done"
    sim = job.result()
    assert len(sim) == 300
    assert sim.successful.all()
    same(sim.u[297:], client.solve("lotka", u0=STARTS).u)
    same(job.result(298).u, sim.u[298:])
    same(job.result(1, 3).u, sim.u[1:3])
    with pytest.raises(ValueError, match="the job has 300"):
        job.result(300)


@pytest.mark.slow
def test_job_of_samples(client, monkeypatch):
    ranges = {"u0": ([0.5, 0.5], [1.5, 1.5]), "trajectories": 30, "seed": 3}
    first = client.submit("lotka", **ranges).result(timeout=60)
    again = client.submit("lotka", **ranges)
    again.wait(60)
    monkeypatch.setattr(client_jobs, "_PART", 7 * first.u[0].nbytes)
    second = again.result()  # in parts
    np.testing.assert_array_equal(first.u, second.u)
    assert second.t.tolist() == first.t.tolist()
    assert len(np.unique(first.u[:, 0, 0])) == 30
    other = client.submit("lotka", **ranges | {"seed": 4}).result(timeout=60)
    assert not (other.u == first.u).any()
    with pytest.raises(ValueError, match=r"u0 must be a pair \(low, high\)"):
        client.submit("lotka", u0=STARTS, trajectories=10)


def test_job_is_submitted_once(client, flaky):
    before = len(client.jobs())
    flaky.faults = ["drop after"]
    job = client.submit("lotka", u0=STARTS)
    assert job.result(timeout=60).successful.all()
    assert len(client.jobs()) == before + 1


def test_cancelled_job(client):
    job = client.submit("lotka", u0=([0.5, 0.5], [1.5, 1.5]), trajectories=2_000_000, seed=0)
    with pytest.raises(TimeoutError, match="has not ended after 0 s"):
        job.wait(0)
    job.cancel()
    status = job.wait(60)
    assert status["status"] == "cancelled"
    assert status["done"] < status["trajectories"]
    with contextlib.suppress(eo.ServiceError):  # it may be underway again
        job.resume()
    assert job.status()["status"] in ("queued", "running")
    job.cancel()
    job.wait(60)


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ImportError, match=re.escape(installing("serve"))):
        eo.Client("http://127.0.0.1:8000")
