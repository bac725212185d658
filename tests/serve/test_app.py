"""The service over HTTP: its answers, and what it refuses."""

import asyncio
import collections
import gzip
import json
import logging
import operator
import re
import time
import types

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode import cli
from ensembleode.serve import bodies, calls, commands, create_app, process, solving
from ensembleode.serve.room import MemoryRoom
from ensembleode.serve.tokens import read, Tokens, TokensError

from .running import registry, Running


def unpacked(x):
    return np.frombuffer(x["data"], x["dtype"]).reshape(x["shape"])


def some(problem, rng):
    """The body of a request with numbers of its own."""
    if problem == "back":
        return {"u0": [rng.uniform(0.5, 2)], "saveat": [1.0, rng.uniform(0.1, 0.9)]}
    t1 = rng.uniform(0.5, 3)
    rows = rng.integers(1, 16)
    body = {"u0": rng.uniform(0.5, 2, 2).tolist(), "tspan": [0.0, t1]}
    body["saveat"] = np.sort(rng.uniform(0, t1, rows)).tolist()
    if rng.integers(2):
        body["saveat"] = t1 / 7
    if problem == "lotka" and rng.integers(2):
        body["p"] = rng.uniform(0.5, 3, 4).tolist()
    return body


async def without_server(app, ask):
    """What an app answers to a client that calls it."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        return await ask(client)


def without_seconds(response):
    assert response.status_code == 200, response.text
    return {k: v for k, v in response.json().items() if k != "seconds"}


def test_the_registered_problem(running):
    answer = running.solve().json()
    assert answer["t"] == (np.arange(9) / 4).tolist()
    assert answer["retcode"] == "Success"
    assert answer["lengths"] == 9
    assert answer["seconds"]["solve"] > 0
    assert answer["seconds"].keys() == {"wait", "solve"}
    assert answer.keys() == {"u", "t", "retcode", "stats", "lengths", "seconds"}
    entry = running.service.solvers["lotka"].entry
    sol = eo.solve(entry.prob, saveat=entry.default_times, maxiters=1000)
    np.testing.assert_allclose(answer["u"], sol.u, rtol=1e-10)
    assert answer["stats"] == {
        "naccept": int(sol.stats.naccept),
        "nreject": int(sol.stats.nreject),
        "nf": int(sol.stats.nf),
        **dict.fromkeys(("njac", "nw", "nsolve")),
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("problem", ["lotka", "node"])
def test_the_bits_of_an_ensemble(running, problem):
    """An answer has those of `solve` with the same chunk width."""
    entry = running.service.solvers[problem].entry
    u0s = np.random.default_rng(0).uniform(0.5, 2, (40, 2))
    answer = running.solve(problem, u0=u0s.tolist()).json()
    u0s = jnp.asarray(np.concatenate([u0s, np.ones((100, 2))]))
    ens = eo.EnsembleProblem(entry.prob, lambda prob, ctx: eo.remake(prob, u0=u0s[ctx.index]))
    sim = eo.solve(ens, trajectories=140, saveat=entry.default_times, maxiters=1000)
    np.testing.assert_array_equal(answer["u"], sim.u[:40])
    np.testing.assert_array_equal(answer["stats"]["nf"], sim.stats.nf[:40])


def test_answers_under_load_are_those_alone(running, compiles):
    """Whatever the others ask for: the same bits, and nothing is compiled."""
    rng = np.random.default_rng(1)
    problems = ["lotka", "node", "back"]
    asked = [(x, some(x, rng)) for x in rng.choice(problems, 100).tolist()]
    asked += [("lotka", {"u0": rng.uniform(0.5, 2, (60, 2)).tolist()}) for _ in range(5)]
    order = rng.permutation(len(asked)).tolist()

    async def all_at_once():
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=running.url, timeout=60, limits=limits) as client:
            posts = [
                client.post(f"/v1/problems/{asked[i][0]}/solve", json=asked[i][1]) for i in order
            ]
            return await asyncio.gather(*posts)

    compiles.count = 0
    together = asyncio.run(all_at_once())
    assert compiles.count == 0
    alone = [running.solve(problem, **body) for problem, body in asked]
    assert compiles.count == 0
    for i, response in zip(order, together, strict=True):
        assert without_seconds(response) == without_seconds(alone[i]), asked[i]
    assert largest_batch(running.client.get("/metrics").text) > 4


def largest_batch(metrics):
    """A bound on it, by its bucket."""
    counts = collections.Counter()
    for size, count in re.findall(r'batch_size_bucket{le="([\d.]+)".*} ([\d.]+)', metrics):
        counts[float(size)] += float(count)
    return min(size for size, count in counts.items() if count == max(counts.values()))


def test_batches_of_several_sizes_have_the_same_bits():
    """One of a chunk, and one of many."""
    entry = registry()["node"]
    solver = solving.BatchSolver(entry, max_batch=1024)
    program = solver.program(10, own=False)
    assert len(solver._sizes(program.rows, False)) == 2
    rng = np.random.default_rng(2)

    def numbers(n):
        ones = np.ones(n)
        times = np.broadcast_to(np.linspace(0, 1, 5), (n, 5))
        return solving.RequestArrays(rng.uniform(-2, 2, (n, 2)), None, 0 * ones, ones, times)

    many = [numbers(int(n)) for n in rng.integers(1, 40, 20)]
    together = solver.run(program, many)
    for x, expected in zip(many[::5], together[::5], strict=True):
        (alone,) = solver.run(program, [x])
        jax.tree.map(np.testing.assert_array_equal, alone, expected)


def test_without_batching_the_answers_are_the_same(running):
    with Running(registry(), like=running, batching=False) as alone:
        for problem in ("lotka", "node", "back"):
            body = some(problem, np.random.default_rng(3))
            expected = without_seconds(running.solve(problem, **body))
            assert without_seconds(alone.solve(problem, **body)) == expected


@pytest.mark.slow
def test_maxiters_is_a_limit():
    limited = registry(maxiters=3)
    with Running(limited, warm=False) as running:
        assert running.solve().json()["retcode"] == "MaxIters"


@pytest.mark.slow
def test_gradients(running):
    """Those of `jax.vjp`; bit for bit the same, alone or among others."""
    entry = running.service.solvers["lotka"].entry
    u0, p = jnp.array([[1.0, 2.0], [2.0, 1.0]]), jnp.array([1.4, 1.1, 2.9, 1.0])
    times = jnp.array([0.3, 0.9])

    def states(u0, p):
        ens = eo.EnsembleProblem(
            entry.prob, lambda prob, ctx: eo.remake(prob, u0=u0[ctx.index], p=p)
        )
        return eo.solve(ens, trajectories=2, saveat=times, maxiters=1000).u

    u, pull = jax.vjp(states, u0, p)
    cotangent = np.random.default_rng(0).normal(size=u.shape)
    expected = pull(jnp.asarray(cotangent))
    body = {"u0": u0.tolist(), "saveat": times.tolist(), "cotangent": cotangent.tolist()}
    answer = running.solve(what="vjp", p=p.tolist(), **body).json()
    np.testing.assert_allclose(answer["u0"], expected[0], rtol=1e-10)
    np.testing.assert_allclose(answer["p"], expected[1], rtol=1e-10)
    assert answer["retcode"] == ["Success"] * 2
    each = running.solve(what="vjp", p=[p.tolist()] * 2, **body).json()
    np.testing.assert_allclose(np.sum(each["p"], 0), answer["p"], rtol=1e-10)

    async def all_at_once():
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
            url = "/v1/problems/lotka/vjp"
            asked = [body | {"p": (p + i / 100).tolist()} for i in range(20)]
            return await asyncio.gather(*(client.post(url, json=b) for b in asked))

    together = asyncio.run(all_at_once())
    for i, response in enumerate(together):
        alone = running.solve(what="vjp", p=(p + i / 100).tolist(), **body)
        assert without_seconds(response) == without_seconds(alone)


@pytest.mark.slow
def test_gradients_by_the_registered_weights(running):
    entry = running.service.solvers["node"].entry
    u0 = jnp.array([1.0, -1.0])

    def end(flat):
        prob = eo.remake(entry.prob, u0=u0, p=entry.with_parameters(flat))
        return eo.solve(prob, saveat=jnp.array([1.5]), maxiters=1000).u[0, 0]

    answer = running.solve(
        "node", "vjp", u0=u0.tolist(), saveat=[1.5], cotangent=[[1.0, 0.0]]
    ).json()
    expected = jax.grad(end)(jnp.asarray(entry.p))
    np.testing.assert_allclose(answer["p"], expected, rtol=1e-8, atol=1e-12)


def test_spans_backwards_in_time(running):
    answer = running.solve("back", tspan=[[1.0, 0.0], [0.0, 1.0]], saveat=0.5).json()
    np.testing.assert_allclose(answer["t"], [[1, 0.5, 0], [0, 0.5, 1]])
    np.testing.assert_allclose(np.squeeze(answer["u"])[0], np.exp([0, 0.5, 1]), rtol=1e-3)


@pytest.mark.slow
def test_ensemble_algorithms():
    """Others have the same bits; trajectories that share steps are refused."""
    with Running(registry(), warm=False, ensemblealg=eo.EnsembleSerial()) as serial:
        expected = without_seconds(serial.solve("node", u0=[[1.0, 2.0]] * 3))
    with Running(registry(), warm=False, ensemblealg=eo.EnsembleGPUArray()) as arrays:
        assert without_seconds(arrays.solve("node", u0=[[1.0, 2.0]] * 3)) == expected
    with pytest.raises(ValueError, match="EnsembleColumns"):
        create_app(registry(), ensemblealg=eo.EnsembleColumns())


@pytest.mark.slow
def test_on_workers(running):
    with (
        eo.EnsembleDistributed(workers=2) as alg,
        Running(registry(), ensemblealg=alg) as distributed,
    ):
        for problem in ("lotka", "node", "back"):
            body = some(problem, np.random.default_rng(4))
            answer = without_seconds(distributed.solve(problem, **body))
            assert answer == without_seconds(running.solve(problem, **body))
        body = {"saveat": [1.0], "cotangent": [[1.0, 0.0]]}
        answer = without_seconds(distributed.solve("lotka", "vjp", **body))
        expected = without_seconds(running.solve("lotka", "vjp", **body))
        np.testing.assert_allclose(answer["p"], expected["p"], rtol=1e-10)


@pytest.mark.slow
def test_implicit_methods():
    """Another engine, whose saved times are filled up otherwise."""
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.0]), (0.0, 1.0), jnp.array(2.0))
    limits = eo.serve.Limits(saveat=8)
    few = eo.serve.Registry().add("stiff", prob, alg=eo.Kvaerno3(), limits=limits)
    with Running(few, warm=False) as running:
        answer = running.solve("stiff", u0=[[1.0], [2.0]], saveat=[0.5, 1.0]).json()
        np.testing.assert_allclose(np.squeeze(answer["u"])[1], 2 * np.exp([-1.0, -2.0]), rtol=1e-2)
        assert answer["lengths"] == [2, 2]
        assert min(answer["stats"]["nf"]) > max(answer["stats"]["naccept"])
        assert min(answer["stats"]["nsolve"]) > max(answer["stats"]["njac"])
        single = running.solve("stiff", u0=[1.0], saveat=[1.0]).json()
        assert single["stats"]["nw"] == answer["stats"]["nw"][0]


def refused(response, status, code, path=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"code", "message", "path", "id"}
    assert (error["code"], error["path"]) == (code, path)
    return error


def test_refusals(running):
    refused(running.solve(u0=[1, 9]), 422, "limit_u0", "u0[1]")
    refused(running.solve(u0=[[1, 1]] * 65), 413, "limit_trajectories")
    refused(running.solve("nothing"), 404, "not_found")
    refused(running.client.get("/v1/problems/nothing"), 404, "not_found")
    refused(running.client.get("/nowhere"), 404, "not_found")
    refused(running.client.get("/v1/problems/lotka/solve"), 405, "method_not_allowed")
    refused(running.solve(what="vjp"), 422, "invalid", "cotangent")
    wrong = running.solve(what="vjp", saveat=[1.0], cotangent=[[1.0, 0.0], [1.0, 0.0]])
    refused(wrong, 422, "invalid", "cotangent")
    wrong = running.solve(what="vjp", saveat=[1.0], cotangent=[[1.0, "x"]])
    refused(wrong, 422, "invalid", "cotangent[0][1]")
    refused(running.solve(cotangent=[1.0]), 422, "invalid", "cotangent")


@pytest.mark.parametrize("step", [1e300, 1.79e308])
def test_spacings_beyond_the_span(running, step):
    """However large."""
    answer = running.solve(saveat=step)
    assert answer.status_code == 200
    assert answer.json()["t"] == running.solve(saveat=1e6).json()["t"]
    refused(running.solve(saveat=-step), 422, "invalid", "saveat")


def test_bodies_that_are_too_large(running):
    url = "/v1/problems/lotka/solve"
    headers = {"Content-Type": "application/json"}
    error = refused(
        running.client.post(url, content=b" " * 200_000, headers=headers), 413, "limit_body"
    )
    assert "body=131072" in error["message"]

    def pieces():
        for _ in range(200):
            yield b" " * 1000

    refused(running.client.post(url, content=pieces(), headers=headers), 413, "limit_body")
    # One that is large, and allowed, is read in a thread.
    u0 = [[1.0 + i / 1e9, 1.0] for i in range(64)]
    padded = json.dumps({"u0": u0}).encode() + b" " * 100_000
    assert running.client.post(url, content=padded, headers=headers).status_code == 200


@pytest.mark.slow
def test_answers_that_are_too_large(running, monkeypatch):
    """Of one request; and of all that are under way."""
    with Running(registry(answer=1000), like=None, warm=False) as limited:
        refused(limited.solve(u0=[[1, 1]] * 7), 413, "limit_answer")
        assert limited.solve(u0=[[1, 1]] * 6).status_code == 200
    with monkeypatch.context() as context:
        answers = MemoryRoom(1000, 1000)
        context.setattr(running.service, "answers", answers)
        # (One that is larger has its turn when it is alone.)
        assert running.solve(u0=[[1, 1]] * 8).status_code == 200
        answers.put("another", "", 900)
        refused(running.solve(u0=[[1, 1]]), 429, "queue_full")
        assert answers.total == 900
    assert running.service.answers.total == 0


def test_other_kinds_of_bodies(running):
    url = "/v1/problems/lotka/solve"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/pickle", None):
        headers = {"Content-Type": kind} if kind else {}
        response = running.client.post(url, content=b"{}", headers=headers)
        refused(response, 415, "unsupported_media_type")
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = running.client.post(url, content=gzip.compress(b"{}"), headers=headers)
    assert "'gzip'" in refused(response, 415, "unsupported_media_type")["message"]


def test_pages_of_others_are_not_let_in(running):
    headers = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    response = running.client.options("/v1/problems/lotka/solve", headers=headers)
    assert "access-control-allow-origin" not in response.headers
    app = create_app(registry(), cors=["https://example.org"])

    ask = operator.methodcaller("options", "/v1/problems/lotka/solve", headers=headers)
    response = asyncio.run(without_server(app, ask))
    assert response.headers["access-control-allow-origin"] == "https://example.org"


def test_tokens(running):
    with Running(registry(), like=running, tokens=["one", "two"]) as running:
        for header in (None, "Bearer three", "Bearer", "Basic one"):
            running.client.headers = {} if header is None else {"Authorization": header}
            for response in (
                running.solve(),
                running.client.get("/v1/problems"),
                running.client.get("/v1/ensembles"),
                running.client.get("/metrics"),
            ):
                refused(response, 401, "unauthorized")
                assert response.headers["www-authenticate"] == "Bearer"
            assert running.client.get("/healthz").status_code == 200
            assert running.client.get("/readyz").status_code == 200
        running.client.headers = {"Authorization": "Bearer two"}
        assert running.solve().status_code == 200
        assert running.client.get("/metrics").status_code == 200


def test_names(running):
    """One that answers to some names only can't be reached by another that has its address."""
    with Running(registry(), like=running, hosts=["localhost", "[::1]"]) as running:
        for host in ("evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1"):
            running.client.headers["Host"] = host
            refused(running.solve(), 421, "misdirected")
            refused(running.client.get("/v1/problems"), 421, "misdirected")
            assert running.client.get("/healthz").status_code == 200
        for host in ("localhost", "LOCALHOST:8000", "[::1]:8000"):
            running.client.headers["Host"] = host
            assert running.solve().status_code == 200


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, process._LOOPBACK),
        ({"host": "localhost"}, process._LOOPBACK),
        ({"tokens": ["one"]}, None),
        ({"host": "0.0.0.0"}, None),
        ({"hosts": ["here"]}, ["here"]),
    ],
)
def test_whose_names(monkeypatch, options, names):
    """Of its own computer, where anybody is let in and nobody else should be there."""

    def create_app(registry, *, hosts=None, **_):
        raise InterruptedError(hosts)

    monkeypatch.setattr(process, "create_app", create_app)
    with pytest.raises(InterruptedError) as found:
        process.run(None, **options)
    assert found.value.args == (names,)


@pytest.mark.parametrize(
    ("options", "warned"),
    [({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "tokens": ["one"]}, False), ({}, False)],
)
def test_open_to_all(monkeypatch, caplog, options, warned):
    """Who lets everybody in is told so."""

    def configured(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(process, "create_app", lambda *_, **__: create_app(registry()))
    monkeypatch.setattr(process, "configured", configured)
    with pytest.raises(InterruptedError):
        process.run(None, **options)
    assert ("has no tokens" in caplog.text) == warned


def test_where_tokens_come_from(tmp_path, monkeypatch):
    monkeypatch.delenv("ENSEMBLEODE_TOKENS", raising=False)
    assert read(None) is None
    monkeypatch.setenv("ENSEMBLEODE_TOKENS", "a, b")
    tokens = read(None)
    assert tokens.owner("Bearer a")
    assert tokens.owner("bearer b")
    assert not tokens.owner("Basic a")
    assert not tokens.owner("a")
    assert not tokens.owner(None)
    path = tmp_path / "tokens"
    path.write_text("# of the group\nsecret # mine\n\n")
    assert read(path).owner("Bearer secret")
    path.write_text("# none\n")
    with pytest.raises(TokensError, match="has no tokens"):
        read(path)
    monkeypatch.setenv("ENSEMBLEODE_TOKENS", "")
    with pytest.raises(TokensError, match="ENSEMBLEODE_TOKENS"):
        read(None)
    with pytest.raises(TokensError, match="empty"):
        Tokens([])


def test_health_and_metrics(running):
    assert running.client.get("/healthz").json() == {"status": "ok"}
    assert running.client.get("/readyz").json() == {"status": "ready"}
    running.solve()
    running.solve(u0=[1, 9])
    text = running.client.get("/metrics").text
    for name in (
        "ensembleode_queue_trajectories 0.0",
        'ensembleode_batch_size_bucket{le="1.0",problem="lotka"}',
        'ensembleode_wait_seconds_count{problem="lotka"}',
        'ensembleode_solve_seconds_sum{problem="lotka"}',
        'ensembleode_request_seconds_count{problem="lotka"}',
        'ensembleode_retcodes_total{problem="lotka",retcode="Success"}',
        'ensembleode_requests_total{problem="lotka",status="200"}',
        'ensembleode_requests_total{problem="lotka",status="422"}',
    ):
        assert name in text


def test_not_ready_yet():
    """It says so, and how far it is."""
    app = create_app(registry())
    url = "/v1/problems/lotka/solve"

    async def ask(client):
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).json() == {"status": "warming"}
        first = await client.post(url, json={})
        app.state.service.compiled = (3, 24)
        found = (await client.get("/readyz")).json()
        assert found == {"status": "warming", "compiled": 3, "programs": 24}
        return first, await client.post(url, json={})

    responses = asyncio.run(without_server(app, ask))
    errors = [refused(response, 503, "warming") for response in responses]
    assert [response.headers["retry-after"] for response in responses] == ["1", "1"]
    assert "3 of 24" in errors[1]["message"]


def test_warming_is_logged(running, caplog):
    with (
        caplog.at_level(logging.INFO, logger="ensembleode.serve"),
        Running(registry(), like=running),
    ):
        pass
    lines = [x.getMessage() for x in caplog.records if "compiled" in x.getMessage()]
    assert re.fullmatch(r"compiled 1 of (\d+) \(\d+\.\d s\)", lines[0])
    assert lines[-1].startswith(f"compiled {len(lines)} of {len(lines)} ")


def host(u):
    return -np.asarray(u)


def called(u, p, t):
    return jax.pure_callback(
        host, jax.ShapeDtypeStruct(u.shape, u.dtype), u, vmap_method="expand_dims"
    )


@pytest.mark.slow
def test_a_problem_without_a_gradient(running):
    """Is solved all the same, and those beside it have theirs."""
    limits = eo.serve.Limits(saveat=2)
    prob = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(1), (0.0, 1.0), 3.0)
    two = eo.serve.Registry().add("good", prob, limits=limits)
    two.add("bad", eo.remake(prob, f=called), limits=limits)
    with Running(two, max_batch=8) as served:
        body = {"cotangent": [[1.0], [1.0]]}
        error = refused(served.solve("bad", "vjp", **body), 404, "no_gradient")
        assert "JVP" in error["message"]
        assert "JVP" in served.client.get("/v1/problems/bad").json()["no_gradient"]
        assert served.client.get("/v1/problems/good").json()["no_gradient"] is None
        assert served.solve("bad").json()["retcode"] == "Success"
        assert served.solve("good", "vjp", **body).status_code == 200


@pytest.mark.slow
def test_gradients_of_scalars():
    """By the client, whose answers are in MessagePack."""
    start = jnp.float32(2)
    prob = eo.ODEProblem(lambda u, p, t: -p * u, start, (0.0, 1.0), jnp.float32(1))
    one = eo.serve.Registry().add("one", prob, limits=eo.serve.Limits(saveat=2))
    with Running(one, max_batch=8) as served, eo.Client(served.url) as client:
        found = jax.grad(lambda u0: client.solve("one", u0=u0).u[-1])(start)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.exp(-1), rtol=1e-2)


def test_what_no_text_can_be_is_answered(running):
    """Half a character in a name, and in what is said of an error."""
    headers = {"Content-Type": "application/json"}
    for body in (b'{"\\ud800": 1}', b'{"u0": "\\ud800"}', b"{"):
        response = running.client.post("/v1/problems/lotka/solve", content=body, headers=headers)
        refused(response, 400, "invalid_body")
    odd = bodies.RefusedRequest(422, "invalid", "\ud800", "\udfff")
    assert json.loads(calls.reply_to(odd).body)["error"]["path"] == "\udfff"


@pytest.mark.slow
def test_draining_has_one_end(running, monkeypatch):
    """What waits for one thing has not as long again for the next."""
    given = []
    with Running(registry(), like=running, drain_seconds=1.0) as ending:
        drain = ending.service.batcher.drain

        def drained(seconds):
            given.append(seconds)
            return drain(seconds)

        monkeypatch.setattr(ending.service.batcher, "drain", drained)
        jobs = types.SimpleNamespace(end=lambda: None, stop=lambda seconds: time.sleep(0.6))
        monkeypatch.setattr(ending.service, "jobs", jobs)
        ending.service.begin_draining()
        ending.service.begin_draining()
    assert len(given) == 1
    assert given[0] <= 0.4


def test_logs_say_why_and_have_no_payloads(running, caplog):
    with caplog.at_level(logging.INFO, logger="ensembleode.serve"):
        response = running.solve(u0=[1.234567, 2.0], p=[1, 1, 1, 7.654321])
        running.solve(u0=[1.234567, 2.0])
        running.solve(u0=[1, 9])
        running.solve(**{"x\n2027 forged": 1})
    lines = [x.getMessage() for x in caplog.records if x.name == "ensembleode.serve"]
    assert any(response.headers["x-request-id"] in x and " lotka " in x for x in lines)
    assert not any("1.2345" in x or "7.654" in x for x in lines)
    assert lines[-2].endswith("s limit_u0 'u0[1]'")
    assert lines[-1].endswith("s invalid 'x\\n2027 forged'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch must be a positive integer"),
        ({"queue": True}, "queue must be a positive integer"),
        ({"max_wait_ms": -1}, "max_wait_ms must be zero or positive"),
        ({"batch_seconds": 0}, "batch_seconds must be positive"),
        ({"tokens": []}, "tokens is empty"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        create_app(registry(), **options)
    with pytest.raises(ValueError, match="registry is empty"):
        create_app(eo.serve.Registry())
    with pytest.raises(TypeError, match="registry must be"):
        create_app({})


def test_names_on_the_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "app.py").write_text(
        "import ensembleode as eo\n"
        "prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))\n"
        "registry = eo.serve.Registry().add('x', prob)\n"
        "def made():\n"
        "    return registry\n"
        "wrong = 3\n"
    )
    (tmp_path / "broken.py").write_text(
        "import ensembleode as eo\n"
        "import jax.numpy as jnp\n"
        "def fails():\n"
        "    raise ValueError('deep within')\n"
        "def missing():\n"
        "    import no_such_module\n"
        "def reshapes():\n"
        "    prob = eo.ODEProblem(lambda u, p, t: jnp.reshape(u, (3, 5)), [1.0], (0.0, 1.0))\n"
        "    return eo.serve.Registry().add('x', prob)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NPROC", "8")  # which it sets otherwise
    assert commands._registry("app.py:registry").names == ["x"]
    assert commands._registry("app.py:made").names == ["x"]
    assert commands._ensemblealg("EnsembleThreads") == eo.EnsembleThreads()
    assert commands._ensemblealg("EnsembleThreads(n=1)") == eo.EnsembleThreads(1)

    def said(*arguments):
        with pytest.raises(SystemExit) as raised:
            cli.main(["serve", *arguments])
        assert raised.value.code == 1
        return capsys.readouterr().err

    assert "it is missing" in said("app.py:nothing")
    assert "it is int" in said("app.py:wrong")
    assert "there is no file" in said("other.py:registry")
    assert "ensemblealg must be" in said("app.py:registry", "--ensemblealg", "open('x')")
    assert "EnsembleColumns" in said("app.py:registry", "--ensemblealg", "EnsembleColumns")
    assert "max_batch must be" in said("app.py:registry", "--max-batch", "0")
    # Where the script is at fault, its lines are shown.
    for name, error in (("fails", ValueError), ("missing", ImportError), ("reshapes", TypeError)):
        with pytest.raises(error) as raised:
            cli.main(["serve", f"broken.py:{name}"])
        assert "broken.py" in str(raised.getrepr(style="native"))
    (tmp_path / "none").write_text("")
    assert "has no tokens" in said("app.py:registry", "--tokens", "none")


def test_a_problem_that_can_not_be_solved():
    """The process ends, and says why."""
    prob = eo.ODEProblem(lambda u, p, t: -p * u, jnp.array([1.0]), (0.0, 1.0), jnp.array(1.0))
    registry = eo.serve.Registry().add("x", prob, alg=eo.Euler())
    with pytest.raises(ValueError, match="dt"):
        create_app(registry)
