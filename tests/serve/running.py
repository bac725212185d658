"""Services for tests: registries that are quick to compile, and apps on a port of loopback."""

import threading
import time

import httpx
import jax.numpy as jnp
import uvicorn

import ensembleode as eo
from ensembleode.serve import create_app
from ensembleode.serve.process import configured

from ..problems import linear, lotka_volterra, mlp, network


def registry(**limits):
    """A small system, a network, and decay backwards in time; one size of everything."""
    limits = {"saveat": 16, "trajectories": 64, "maxiters": 1000, "body": 2**17} | limits
    within = {"u0": (0.1, 5.0), "p": (0.1, 4.0), "tspan": (0.0, 10.0)}
    lotka = eo.ODEProblem(
        lotka_volterra, jnp.array([1.0, 1.0]), (0.0, 2.0), jnp.array([1.5, 1.0, 3.0, 1.0])
    )
    node = eo.ODEProblem(mlp, jnp.array([2.0, 0.0]), (0.0, 1.5), network())
    back = eo.ODEProblem(linear, jnp.array([1.0]), (1.0, 0.0), jnp.array(-1.0))
    return (
        eo.serve.Registry()
        .add(
            "lotka",
            lotka,
            saveat=0.25,
            limits=eo.serve.Limits(**limits, **within),
            labels={"u0": ["rabbits", "foxes"], "p": ["a", "b", "c", "d"]},
        )
        .add("node", node, saveat=0.125, limits=eo.serve.Limits(**limits))
        .add("back", back, limits=eo.serve.Limits(**limits))
    )


class Running:
    """An app that is served from a thread, once it is ready.

    **Arguments:** `like`: another, whose compiled programs are used; `warm`: False compiles nothing
    before it is asked for; `around`: makes another app of it, which uvicorn serves by its own
    protocol.
    """

    def __init__(self, registry, *, like=None, warm=True, around=None, **options):
        self.app = create_app(registry, **{"max_batch": 128} | options)
        self.service = self.app.state.service
        if like is not None:
            for name, solver in like.service.solvers.items():
                self.service.solvers[name] = solver
        if like is not None or not warm:
            self.service._warm_up = lambda step: None
        if around is None:
            config = configured(self.app, port=0, log_level="error")
        else:
            self.around = around(self.app)
            how = {"log_level": "critical", "ws": "none", "lifespan": "on"}
            config = uvicorn.Config(self.around, port=0, **how)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        until(lambda: self.service.status != "warming")
        assert self.service.status == "ready"
        self.client = httpx.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(self, *exception):
        self.client.close()
        self.stop()

    def stop(self):
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    def solve(self, problem="lotka", what="solve", **body):
        return self.client.post(f"/v1/problems/{problem}/{what}", json=body)


def until(true, seconds=120):
    """Wait for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def held_back(service, problem=None):
    """Has batches wait, of one problem or of all, for the event that it returns."""
    let_go, run = threading.Event(), service.batcher._run

    def wait(program, slices):
        assert problem not in (None, program.problem) or let_go.wait(60)
        return run(program, slices)

    service.batcher._run = wait
    return let_go
