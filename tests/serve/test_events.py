"""Events of callbacks over HTTP: in answers, in pages of ensembles, and in different batches."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.serve import exchange

from .running import Running


TIMES = [0.0, 1.0, 2.0]
STARTS = np.array([[1.0, 0.0], [1.4, 0.0], [40.0, 0.0], [0.1, 0.0]])


def ball():
    def bounce(integrator):
        height, speed = integrator.u
        return eo.remake(integrator, u=jnp.stack([height, -0.9 * speed]))

    ground = eo.ContinuousCallback(lambda u, t, integrator: u[0], None, bounce)
    fast = eo.ContinuousCallback(lambda u, t, integrator: u[1] - 4.0, eo.terminate)
    return eo.ODEProblem(
        lambda u, p, t: jnp.stack([u[1], -p]),
        jnp.array([1.0, 0.0]),
        (0.0, 2.0),
        jnp.array(9.8),
        callback=eo.CallbackSet(ground, fast),
        abstol=1e-8,
        reltol=1e-8,
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    few = eo.serve.Limits(saveat=8, trajectories=64)
    registry = eo.serve.Registry().add("ball", ball(), saveat=jnp.array(TIMES), limits=few)
    store = tmp_path_factory.mktemp("jobs")
    with Running(registry, max_batch=1, store=store) as found:
        yield found


@pytest.fixture(scope="module")
def expected():
    starts = jnp.asarray(STARTS)
    ens = eo.EnsembleProblem(ball(), lambda prob, ctx: eo.remake(prob, u0=starts[ctx.index]))
    return eo.solve(ens, trajectories=4, saveat=jnp.array(TIMES), max_events=16)


def assert_same(events, expected):
    for name, x in vars(expected).items():
        np.testing.assert_array_equal(getattr(events, name), np.asarray(x), name)


def test_events_of_answers(running, expected):
    assert np.asarray(expected.events.count).max() > 2
    assert 0 in np.asarray(expected.events.count)
    with eo.Client(running.url) as client:
        sim = client.solve("ball", u0=STARTS)
        assert_same(sim.events, expected.events)
        np.testing.assert_array_equal(sim.retcode, expected.retcode)
        assert "events   0 to " in repr(sim)
        for i, start in enumerate(STARTS):
            sol = client.solve("ball", u0=start)
            assert_same(sol.events, expected[i].events)
            assert int(sol.events.count) == int(expected.events.count[i])
    # As JSON, with null for what did not happen.
    answer = running.solve("ball", u0=STARTS.tolist()).json()
    assert answer["events"]["t"][2][0] is None
    sim = exchange.solution(answer, expected.engine)
    assert_same(sim.events, expected.events)
    np.testing.assert_array_equal(sim.retcode, expected.retcode)
    np.testing.assert_array_equal(sim.u, expected.u)
    np.testing.assert_array_equal(sim.lengths, expected.lengths)
    assert np.isnan(sim.u).any()  # of one that was ended
    one = exchange.solution(running.solve("ball", u0=[40.0, 0.0]).json(), expected.engine)
    assert one.events.u_before.shape == (0, 2)


def test_events_of_pages(running, expected):
    """Kept as an ensemble, beside requests; and read in pages, each as long as another."""
    with eo.Client(running.url) as client:
        job = client.submit("ball", u0=STARTS)
        job.wait(120)
        sim = job.result()
        assert_same(sim.events, expected.events)
    pages = [exchange.concatenated([sim]), sim]
    assert_same(pages[0].events, expected.events)
    answer = running.client.get(f"/v1/ensembles/{job.id}/download", params={"format": "npz"})
    with np.load(io.BytesIO(answer.content), allow_pickle=False) as file:
        np.testing.assert_array_equal(file["events.t"], expected.events.t)
        np.testing.assert_array_equal(file["u"], expected.u)
        np.testing.assert_array_equal(file["retcode"], expected.retcode)


def test_pages_of_different_lengths(expected):
    def page(rows, most):
        cut = {k: np.asarray(x)[rows] for k, x in vars(expected.events).items()}
        cut = {k: x[:, :most] if k != "count" else x for k, x in cut.items()}
        return eo.EnsembleSolution(
            np.asarray(expected.u)[rows], np.asarray(expected.t), expected.retcode[rows],
            expected.lengths[rows], jax.tree.map(lambda x: x[rows], expected.stats), True, 0.0,
            expected.engine, "trajectories", events=type(expected.events)(**cut),
        )  # fmt: skip

    whole = expected.events.t.shape[1]
    most = int(np.asarray(expected.events.count)[:1].max())
    parts = [page(slice(0, 1), most), page(slice(1, 4), whole)]
    assert_same(exchange.concatenated(parts).events, expected.events)


@pytest.mark.slow
def test_gradients_of_what_a_callback_ended(running):
    """By the states before the end, as of a solve here."""

    start, times = np.array([1.4, 0.0]), np.array([0.0, 0.25, 0.5, 1.0])

    def loss(sim):
        return jnp.sum(sim.u[..., :3, 0] ** 2)

    def here(p):
        return eo.solve(eo.remake(ball(), p=p, u0=jnp.asarray(start)), saveat=jnp.asarray(times))

    p = jnp.array(9.8)
    assert here(p).retcode == eo.ReturnCode.Terminated
    assert here(p).length == 3
    with eo.Client(running.url) as client:
        found = jax.grad(lambda p: loss(client.solve("ball", u0=start, p=p[None], saveat=times)))(p)
    expected = jax.grad(lambda p: loss(here(p)))(p)
    assert abs(expected) > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-10)
