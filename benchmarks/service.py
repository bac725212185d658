"""The batching service over loopback: requests a second and latencies, with and without batching.

    python benchmarks/service.py [--quick] [--clients 1,16,64,256] [--seconds S] [--rounds N]
        [--requests N] [--ensemblealg ALG] [--max-wait-ms W] [--reltol R] [--abstol A] [--json FILE]
    python benchmarks/service.py --soak 1000000 [--json FILE]
    python benchmarks/service.py --bad 0.01 [--requests 100000] [--json FILE]

The service is `ensembleode serve` in a process of its own, on a free port of loopback. It serves a
neural ODE 2 -> 50 -> 2 (tanh, float32) with 31 saved times on [0, 3], by default at rtol 1e-3 and
atol 1e-6: the one of `cpu_ensembles.py`, table d. A request is one trajectory from its own initial
state, and so is its answer (MessagePack). It is driven from another process, a bare HTTP/1.1 client
over kept connections, so that the client is not what is measured; on a machine with few cores it
still takes its share of them.

- Closed loop: each client sends its next request once the last is answered, for `--seconds` or
  until `--requests`, in several rounds, with batching and without in turns; rows are medians.
  `batch` is the mean number of trajectories of a batch, `wait` and `solve` are the service's own
  means (a request waits for its batch; a batch is solved). `CPU` is the processor time of the
  service for a request, `driver` the share of one core that the driver takes.
- Open loop: requests at random times (a Poisson process), at half of the most that was reached in a
  closed loop. Latencies count from when a request was due, with or without a connection to spare.
- `--no-batching`: the same service, which solves every request by itself.

`--soak` sends as many requests from 64 clients and looks at the memory of the service's process.
`--bad` mixes in requests that are wrong, each in one of many ways: they have to be refused with the
right status, and every answer has to have the same bits as the answer to the same request alone.
"""

import argparse
import asyncio
import collections
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

import msgpack
import numpy as np


APP = """
import equinox as eqx, jax, jax.numpy as jnp
import ensembleode as eo

key = jax.random.key(0)
network = eqx.nn.MLP(2, 2, 50, 1, activation=jnp.tanh, key=key, dtype=jnp.float32)
weights, rest = eqx.partition(network, eqx.is_array)
weights = jax.tree.map(lambda x: 4.0 * x, weights)
prob = eo.ODEProblem(
    lambda u, p, t: eqx.combine(p, rest)(u), jnp.zeros(2, jnp.float32), (0.0, 3.0), weights
)
registry = eo.serve.Registry()
registry.add("neural", prob, saveat=0.1, reltol=RELTOL, abstol=ABSTOL)
"""
PATH = "/v1/problems/neural/solve"
BINARY = "application/x-msgpack"
ROWS = 31
DISTINCT = 1000  # requests that are sent again and again
SOAKING = 64  # clients, of --soak and --bad


#
# The service
#


class Service:
    """`ensembleode serve` in a process of its own, once it is ready."""

    def __init__(self, folder, tolerances, *options):
        app = pathlib.Path(folder) / "app.py"
        reltol, abstol = tolerances
        app.write_text(APP.replace("RELTOL", repr(reltol)).replace("ABSTOL", repr(abstol)))
        self.port = free_port()
        self.log = pathlib.Path(folder) / "log.txt"
        command = [sys.executable, "-c", "from ensembleode.cli import main; main()", "serve"]
        command += [f"{app}:registry", "--port", str(self.port), *options]
        started = time.perf_counter()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            self._await_ready()
        except BaseException:
            self.close()
            raise
        self.seconds_to_start = time.perf_counter() - started

    def _await_ready(self, limit=600.0):
        started = time.perf_counter()
        while time.perf_counter() - started < limit:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get("/readyz")
                return
            time.sleep(0.1)
        sys.exit(f"the service did not start:\n{self.log.read_text()[-4000:]}")

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return answer.read().decode()

    def metrics(self):
        """Sums over the labels, by name; requests by status, too."""
        found = collections.Counter()
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0]] += float(value)
                if name.startswith("ensembleode_requests_total{"):
                    status = name.partition('status="')[2].partition('"')[0]
                    # (Those for /metrics itself are of no problem.)
                    if 'problem="neural"' in name or status == "404":
                        found[f"status {status}"] += float(value)
        return found

    def memory(self):
        """Resident bytes of its processes."""
        import psutil

        main = psutil.Process(self.process.pid)
        every = [main, *main.children(recursive=True)]
        return sum(process.memory_info().rss for process in every)

    def cpu(self):
        """Seconds of processor time that it has used."""
        import psutil

        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def close(self):
        """Its exit code, and how long it took to drain."""
        started = time.perf_counter()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return code, time.perf_counter() - started


@contextlib.contextmanager
def service(tolerances, *options):
    with tempfile.TemporaryDirectory() as folder:
        running = Service(folder, tolerances, *options)
        try:
            yield running
        finally:
            code, _ = running.close()
            if code not in (0, -signal.SIGTERM):
                print(f"the service ended with {code}:\n{running.log.read_text()[-4000:]}")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


#
# Requests
#


def array(x, dtype=np.float32):
    x = np.asarray(x, dtype)
    return {"dtype": x.dtype.str, "shape": list(x.shape), "data": x.tobytes()}


def http(body, path=PATH, kind=BINARY):
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
    head += f"Accept: {BINARY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def plain_requests():
    states = np.random.default_rng(0).standard_normal((DISTINCT, 2))
    return [http(msgpack.packb({"u0": array(u0)})) for u0 in states]


def mixed_requests():
    """One or several trajectories, with parameters, time spans and saved times of their own, or
    without; in MessagePack, or in JSON."""
    rng = np.random.default_rng(1)
    every = []
    for i in range(DISTINCT):
        n = int(rng.integers(2, 9)) if i % 5 == 0 else None
        body = {"u0": rng.standard_normal((2,) if n is None else (n, 2)).astype(np.float32)}
        if i % 3 == 0:
            body["tspan"] = np.array([0.0, rng.uniform(0.5, 3.0)], np.float32)
            rows = int(rng.integers(2, ROWS + 1))
            body["saveat"] = np.linspace(0.0, body["tspan"][1], rows, dtype=np.float32)
        if i % 10 == 7:
            body["saveat"] = 0.25
        if i % 4 == 0:
            every.append(http(json.dumps(body, default=np.ndarray.tolist).encode(), kind=JSON))
        else:
            every.append(http(msgpack.packb(body, default=array)))
    return every


JSON = "application/json"


def bad_requests():
    """`(request, status)`."""
    good = array([0.1, 0.2])
    nan = array([0.1, np.nan])
    bodies = [
        ({"u0": array([1.0, 2.0, 3.0])}, 422),
        ({"u0": nan}, 422),
        ({"u0": array([0.1, np.inf])}, 422),
        ({"u0": "numbers"}, 422),
        ({"u0": {**good, "dtype": "|O8"}}, 422),
        ({"u0": {**good, "data": b"short"}}, 422),
        ({"u0": good, "colour": 1}, 422),
        ({"u0": good, "tspan": [0.0]}, 422),
        ({"u0": good, "saveat": -0.1}, 422),
        ({"u0": good, "saveat": array([0.5, 99.0])}, 422),
        ({"u0": good, "p": array([1.0, 2.0])}, 422),
        ({"u0": good, "deadline_ms": -1}, 422),
        ({"u0": array(np.zeros((2000, 2)))}, 413),
    ]
    every = [(http(msgpack.packb(body)), status) for body, status in bodies]
    texts = [b"{", b"[]", b'{"u0": [NaN, 1]}', b'{"u0": [1, 1e999]}', b'{"u0": [1, true]}']
    every += [(http(text, kind=JSON), 422) for text in texts]
    every.append((http(b"\x80", "/v1/problems/nobody/solve"), 404))
    return every


#
# Driving it: in a process of its own
#


class Connection(asyncio.Protocol):
    """One request at a time over one connection, which is kept.

    `answered(connection, status, body)` is called with each answer, `lost(connection)` when it is
    closed with a request underway.
    """

    def __init__(self, answered, lost):
        self.answered, self.lost, self.due = answered, lost, None
        self._buffer, self._whole, self._head = bytearray(), 0, 0

    def connection_made(self, transport):
        self.transport = transport
        socket_of = transport.get_extra_info("socket")
        socket_of.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request, due):
        self.due = due
        self.transport.write(request)

    def data_received(self, data):
        self._buffer += data
        if not self._whole:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            self._head, self._whole = end + 4, end + 4 + int(length)
        if len(self._buffer) < self._whole:
            return
        status, body = int(self._buffer[9:12]), bytes(self._buffer[self._head : self._whole])
        del self._buffer[: self._whole]
        self._whole, self.due_of_answer, self.due = 0, self.due, None
        self.answered(self, status, body)

    def connection_lost(self, error):
        if self.due is not None:
            self.lost(self)


class Driver:
    """Sends requests and counts what comes back."""

    def __init__(self, port, requests):
        self.port, self.requests, self.sent = port, requests, 0
        self.latencies, self.statuses, self.lost = [], collections.Counter(), 0

    async def connect(self, count):
        loop, found = asyncio.get_running_loop(), []
        for _ in range(count):
            made = loop.create_connection(
                lambda: Connection(self.answered, self.was_lost), "127.0.0.1", self.port
            )
            found.append((await made)[1])
        return found

    def next_request(self):
        self.sent += 1
        return self.requests[self.sent % len(self.requests)]

    def answered(self, connection, status, body):
        self.latencies.append(time.perf_counter() - connection.due_of_answer)
        self.statuses[status] += 1
        self.go_on(connection)

    def was_lost(self, connection):
        self.lost += 1
        self.go_on(None)

    def go_on(self, connection):
        raise NotImplementedError

    def found(self, seconds):
        latencies = np.sort(np.array(self.latencies)) if self.latencies else np.array([np.nan])
        return {
            "requests": len(self.latencies),
            "per_second": len(self.latencies) / seconds,
            "p50": float(np.quantile(latencies, 0.5)),
            "p99": float(np.quantile(latencies, 0.99)),
            "slowest": float(latencies[-1]),
            "statuses": dict(self.statuses),
            "sent": self.sent,
            "lost": self.lost,
        }


class Closed(Driver):
    """Each client sends again once it has an answer."""

    async def drive(self, clients, seconds, most):
        connections = await self.connect(clients)
        self.most, self.left = most, clients
        self.ended = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self.until = started + seconds
        for connection in connections:
            connection.send(self.next_request(), time.perf_counter())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended, seconds + 60)
        took = time.perf_counter() - started
        for connection in connections:
            connection.transport.close()
        return self.found(took)

    def go_on(self, connection):
        now = time.perf_counter()
        if connection is not None and now < self.until and self.sent < self.most:
            connection.send(self.next_request(), now)
            return
        self.left -= 1
        if not self.left and not self.ended.done():
            self.ended.set_result(None)


class Open(Driver):
    """Requests at random times, by whatever connection is free."""

    async def drive(self, clients, seconds, rate):
        self.free = await self.connect(clients)
        every, self.waiting = list(self.free), collections.deque()
        await asyncio.sleep(0.3)  # until the service has accepted them, too
        gaps = np.random.default_rng(2).exponential(1 / rate, int(2 * rate * seconds) + 10)
        started = time.perf_counter()
        for at in started + np.cumsum(gaps):
            if at > started + seconds:
                break
            early = at - time.perf_counter()
            if early > 0:
                await asyncio.sleep(early)
            # (It is late by how coarse the timers of this process are, not by the service.)
            now = time.perf_counter()
            if self.free:
                self.free.pop().send(self.next_request(), now)
            else:
                self.waiting.append(now)
        drained = time.perf_counter() + 60
        while len(self.free) < len(every) - self.lost and time.perf_counter() < drained:
            await asyncio.sleep(0.001)
        took = time.perf_counter() - started
        for connection in every:
            connection.transport.close()
        return {**self.found(took), "rate": rate}

    def go_on(self, connection):
        if connection is None:
            return
        if self.waiting:
            connection.send(self.next_request(), self.waiting.popleft())
        else:
            self.free.append(connection)


class Checked(Closed):
    """Compares every answer with that of the same request alone; some requests are bad."""

    def __init__(self, port, requests, bad, share):
        super().__init__(port, requests)
        self.bad, self.share, self.alone = bad, share, {}
        self.rng = np.random.default_rng(3)
        self.wrong, self.refused, self.examples = 0, 0, []

    async def ask_alone(self):
        """The answers to each request when there is no other."""
        loop = asyncio.get_running_loop()
        answers = asyncio.Queue()

        def answered(_, status, body):
            answers.put_nowait((status, body))

        _, connection = await loop.create_connection(
            lambda: Connection(answered, lambda _: answers.put_nowait((0, b"lost"))),
            "127.0.0.1",
            self.port,
        )
        for i, request in enumerate(self.requests):
            connection.send(request, 0.0)
            status, body = await answers.get()
            if status != 200:
                sys.exit(f"request {i}, alone, was answered {status}: {body[:300]!r}")
            self.alone[i] = numbers_of(body)
        connection.transport.close()

    def next_request(self):
        self.sent += 1
        self.drawn = int(self.rng.integers(len(self.requests)))
        if self.rng.random() < self.share:
            self.drawn = -1 - int(self.rng.integers(len(self.bad)))
            return self.bad[-1 - self.drawn][0]
        return self.requests[self.drawn]

    async def drive(self, clients, seconds, most):
        await self.ask_alone()
        found = await super().drive(clients, seconds, most)
        counts = {"wrong": self.wrong, "refused": self.refused, "examples": self.examples}
        return {**found, **counts, "unanswered": self.sent - len(self.latencies)}

    def answered(self, connection, status, body):
        drawn = connection.asked
        if drawn >= 0:
            right = status == 200 and numbers_of(body) == self.alone[drawn]
        else:
            right = status == self.bad[-1 - drawn][1]
            self.refused += right
        if not right:
            self.wrong += 1
            if len(self.examples) < 5:
                self.examples.append([drawn, status, repr(body[:200])])
        super().answered(connection, status, body)

    async def connect(self, count):
        found = await super().connect(count)
        for connection in found:
            connection.send = self._remembering(connection, connection.send)
        return found

    def _remembering(self, connection, send):
        def remembering(request, due):
            connection.asked = self.drawn
            send(request, due)

        return remembering


def numbers_of(body):
    """What must be the same, bit for bit: everything but the times it took."""
    answer = msgpack.unpackb(body)
    answer.pop("seconds", None)
    return answer


def work(task):
    kind, port = task.pop("kind"), task.pop("port")
    if kind == "checked":
        driver = Checked(port, mixed_requests(), bad_requests(), task.pop("share"))
    else:
        driver = {"closed": Closed, "open": Open}[kind](port, plain_requests())
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run
    started, used = time.perf_counter(), time.process_time()
    found = run(driver.drive(**task))
    found["driver"] = (time.process_time() - used) / (time.perf_counter() - started)
    print(json.dumps(found))


def driven(running, **task):
    """What a driver found, and what the service says of the same time."""
    before, used = running.metrics(), running.cpu()
    command = [sys.executable, __file__, "--worker", json.dumps({"port": running.port, **task})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    found["cpu"] = (running.cpu() - used) / max(1, found["sent"])
    change = running.metrics()
    change.subtract(before)
    found["counted"] = {k: v for k, v in change.items() if k.startswith("status ") and v}
    for name, key in (
        ("batch_size", "batch"),
        ("wait_seconds", "wait"),
        ("solve_seconds", "solve"),
    ):
        count = change[f"ensembleode_{name}_count"]
        found[key] = change[f"ensembleode_{name}_sum"] / count if count else float("nan")
    return found


#
# What is measured
#


def throughput(options):
    """Rows with and without batching, and at half of the load. The two services take turns, as the
    speed of a machine that is shared with others changes from one second to the next."""
    rows = []
    with (
        service(options.tolerances, *options.serving) as batching,
        service(options.tolerances, *options.serving, "--no-batching") as alone,
    ):
        services = {True: batching, False: alone}
        for running in services.values():
            driven(running, kind="closed", clients=16, seconds=1.0, most=10_000)
        task = {"seconds": options.seconds / options.rounds, "most": options.requests}
        for clients in options.clients:
            rounds = {True: [], False: []}
            for _ in range(options.rounds):
                for on, running in services.items():
                    rounds[on].append(driven(running, kind="closed", clients=clients, **task))
            for on, found in rounds.items():
                rows.append({"batching": on, "clients": clients, **medians(found)})
                show_row(rows[-1], first=len(rows) == 1)
        rate = max(row["per_second"] for row in rows) / 2
        task = {"clients": max(options.clients), "seconds": options.seconds / options.rounds}
        rounds = [driven(batching, kind="open", rate=rate, **task) for _ in range(options.rounds)]
        half = {"batching": True, "clients": "open", **medians(rounds)}
        show_row(half)
        memory, starting = batching.memory(), batching.seconds_to_start
    print(f"(started in {starting:.1f} s; {memory / 2**20:.0f} MiB at the end)", flush=True)
    return {"rows": rows, "half": half, "verdicts": throughput_verdicts(options, rows, half)}


def medians(rounds):
    """Of what was measured; sums of what was counted. `rates` are those of all rounds."""
    counted = ("requests", "sent", "lost")
    found = {key: sum(x[key] for x in rounds) for key in counted}
    found["statuses"] = dict(
        sum((collections.Counter(x["statuses"]) for x in rounds), collections.Counter())
    )
    for key in ("per_second", "p50", "p99", "slowest", "driver", "cpu", "batch", "wait", "solve"):
        found[key] = statistics.median(x[key] for x in rounds)
    return {**found, "rates": [x["per_second"] for x in rounds]}


def throughput_verdicts(options, rows, half):
    lines = []
    rates = {(row["batching"], row["clients"]): row["rates"] for row in rows}
    for clients in (n for n in options.clients if n == 64):
        pairs = zip(rates[True, clients], rates[False, clients], strict=True)
        ratio = statistics.median(on / off for on, off in pairs)
        what = f"{clients} clients: requests a second, over those without batching (median)"
        lines.append([what, ratio, "at least 10x", ratio >= 10])
    bound = options.max_wait_ms / 1e3 + 3 * half["solve"]
    what = f"p99 at half of the most, ms (max-wait {options.max_wait_ms:g} + 3 x solve)"
    lines.append([what, 1e3 * half["p99"], f"at most {1e3 * bound:.3g}", half["p99"] <= bound])
    failed = sum(row["sent"] - row["statuses"].get("200", 0) for row in [*rows, half])
    lines.append(["requests without an answer of 200", failed, "none", failed == 0])
    return lines


def soak(options):
    """The memory of the service, as requests are counted."""
    with service(options.tolerances, *options.serving) as running:
        driven(running, kind="closed", clients=SOAKING, seconds=5.0, most=20_000)
        samples, ended = [], threading.Event()
        started = time.perf_counter()

        def watch():
            while not ended.wait(options.every):
                with contextlib.suppress(Exception):
                    counted = running.metrics()["ensembleode_requests_total"]
                    samples.append((time.perf_counter() - started, counted, running.memory()))
                    print(f"{counted:12,.0f} requests {samples[-1][2] / 2**20:10.1f} MiB")
                    sys.stdout.flush()

        watcher = threading.Thread(target=watch)
        watcher.start()
        found = driven(running, kind="closed", clients=SOAKING, seconds=1e6, most=options.soak)
        ended.set()
        watcher.join()
        samples.append((time.perf_counter() - started, found["requests"], running.memory()))
    show_row({"batching": True, "clients": SOAKING, **found}, first=True)
    lines = [["requests lost", found["lost"], "none", found["lost"] == 0]]
    failed = found["sent"] - found["statuses"].get("200", 0)
    lines.append(["requests without an answer of 200", failed, "none", failed == 0])
    # What is allocated in the first fifth is the working set of the allocators.
    times, _, memory = (np.array(x) for x in zip(*samples, strict=True))
    settled = memory[times >= 0.2 * times[-1]]
    growth = (settled[-3:].mean() - settled[:3].mean()) / 2**20
    bound = max(16.0, 0.02 * settled[0] / 2**20)
    what = "MiB that memory grows by, from a fifth of the time on"
    lines.append([what, float(growth), f"at most {bound:.3g}", bool(growth <= bound)])
    return {"row": found, "samples": samples, "verdicts": lines}


def checked(options):
    with service(options.tolerances, *options.serving) as running:
        found = driven(
            running,
            kind="checked",
            share=options.bad,
            clients=SOAKING,
            seconds=1e6,
            most=options.requests,
        )
    show_row({"batching": True, "clients": SOAKING, **found}, first=True)
    for drawn, status, body in found["examples"]:
        print(f"  request {drawn} was answered {status}: {body}")
    asked = found["sent"]
    lines = [
        ["answers that are not those alone, or not refused as they should be", found["wrong"]],
        ["requests without an answer", found["unanswered"]],
        ["server errors", sum(n for status, n in found["statuses"].items() if status >= "500")],
    ]
    lines = [[what, count, "none", count == 0] for what, count in lines]
    lines.append(["bad requests refused", found["refused"], "some", found["refused"] > 0])
    counted = sum(found["counted"].values()) - DISTINCT
    lines.append(
        ["requests that the service counts, of those sent", counted / asked, "1", counted == asked]
    )
    return {"row": found, "verdicts": lines}


#
# Printing
#


def show_row(row, first=False):
    if first:
        head = ["batching", "clients", "requests/s", "p50, ms", "p99, ms", "slowest, ms"]
        head += ["batch", "wait, ms", "solve, ms", "CPU, ms", "driver", "not 200"]
        print(f"\n| {' | '.join(head)} |\n|:---|{'---:|' * (len(head) - 1)}")
    cells = ["on" if row["batching"] else "off", str(row["clients"]), f"{row['per_second']:,.0f}"]
    cells += [f"{1e3 * row[key]:.3g}" for key in ("p50", "p99", "slowest")]
    cells += [f"{row['batch']:.3g}", f"{1e3 * row['wait']:.3g}", f"{1e3 * row['solve']:.3g}"]
    cells += [f"{1e3 * row['cpu']:.3g}", f"{row['driver']:.0%}"]
    cells.append(str(row["sent"] - row["statuses"].get("200", 0)))
    print(f"| {' | '.join(cells)} |", flush=True)


def show_verdicts(lines):
    print()
    for what, measured, bound, held in lines:
        print(f"- {what}: {measured:.4g}, wanted {bound}: {'met' if held else '**MISSED**'}")


def machine():
    info = pathlib.Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    found = {"Python": platform.python_version()}
    for name in ("ensembleode", "jax", "fastapi", "uvicorn", "uvloop", "httptools", "msgpack"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": found,
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="five seconds each")
    parser.add_argument("--clients", default="1,16,64,256", help="such as 1,64")
    parser.add_argument("--seconds", type=float, help="of each row; by default 10")
    parser.add_argument("--rounds", type=int, default=5, help="that a row is measured in")
    parser.add_argument("--requests", type=int, default=100_000, help="at most, of each row")
    parser.add_argument("--ensemblealg", help="as of `ensembleode serve`")
    parser.add_argument("--max-batch", type=int, help="as of `ensembleode serve`")
    parser.add_argument("--max-wait-ms", type=float, default=5.0, help="as of `ensembleode serve`")
    parser.add_argument("--reltol", type=float, default=1e-3, help="of the neural ODE")
    parser.add_argument("--abstol", type=float, default=1e-6, help="of the neural ODE")
    parser.add_argument("--soak", type=int, metavar="N", help="send N requests, watch the memory")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between looks (--soak)")
    parser.add_argument("--bad", type=float, metavar="SHARE", help="of requests that are wrong")
    parser.add_argument("--json", metavar="FILE", help="write everything measured")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seconds = options.seconds or (5.0 if options.quick else 10.0)
    options.clients = [int(n) for n in options.clients.split(",")]
    options.tolerances = options.reltol, options.abstol
    options.serving = ["--max-wait-ms", str(options.max_wait_ms)]
    for name in ("ensemblealg", "max_batch"):
        value = getattr(options, name)
        options.serving += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return options


def main():
    options = parse()
    if options.worker:
        work(json.loads(options.worker))
        return
    about = machine()
    named = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    print(f"{about['cpu']}, {about['cores']} cores; {named}", flush=True)
    measure = throughput
    if options.soak:
        measure = soak
    elif options.bad is not None:
        measure = checked
    found = {"options": vars(options), **measure(options)}
    show_verdicts(found["verdicts"])
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"machine": about, **found}, indent=1))


if __name__ == "__main__":
    main()
