"""The batching service over loopback: requests a second and latencies, with and without batching.

    python benchmarks/service.py [--quick] [--clients 1,16,64,256] [--seconds S] [--rounds N]
        [--requests N] [--ensemblealg ALG] [--max-wait-ms W] [--reltol R] [--abstol A] [--json FILE]
    python benchmarks/service.py --soak 1000000 [--json FILE]
    python benchmarks/service.py --bad 0.01 [--requests 100000] [--json FILE]

The service is `ensembleode serve` in a process of its own, on a free port of loopback. It serves a
neural ODE 2 -> 50 -> 2 (tanh, float32) with 31 saved times on [0, 3], by default at rtol 1e-3 and
atol 1e-6: the one of `cpu_ensembles.py`, table d. A request is one trajectory from its own initial
state, and so is its answer (MessagePack). A bare HTTP/1.1 client over kept connections, in another
process, sends the requests, so that the client is not what is measured. On a machine with few cores
it still takes its share of them.

- Closed loop: each client sends its next request once the last one is answered, for `--seconds` or
    until `--requests`, in several rounds, with batching and without in turns; rows are medians.
    `batch` is the mean number of trajectories in a batch. `wait` and `solve` are means that the
    service reports: the time that a request waits for its batch, and the time that a batch is
    solved. `CPU` is the processor time of the service for a request, `driver` the share of one core
    that the driver takes.
- Open loop: requests come at random times (a Poisson process), at half of the highest rate of a
    closed loop. Latencies count from the time when a request was due, even if no connection was
    free.
- `--no-batching`: the same service, which solves every request by itself.

`--soak` sends the given number of requests from 64 clients and looks at the memory of the service's
process. `--bad` mixes in wrong requests, each in one of many ways: they have to be refused with the
right status, and every answer has to have the same bits as the answer to the same request alone.
"""

import argparse
import collections
import contextlib
import pathlib
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

import numpy as np
import service_driver
from common.processes import apart
from common.report import header, line, machine, named, show_verdicts, write_json
from service_driver import DISTINCT


ROOT = pathlib.Path(__file__).resolve().parents[1]
APP = """
import sys

sys.path.append(ROOT)
import jax, jax.numpy as jnp
import ensembleode as eo
from benchmarks.common.tasks import network_task

task = network_task(1, "float32", 3.0, scale=4.0)
weights = jax.tree.map(jnp.asarray, task.p)
prob = eo.ODEProblem(task.f, jnp.zeros(2, jnp.float32), (0.0, 3.0), weights)
registry = eo.serve.Registry()
registry.add("neural", prob, saveat=0.1, reltol=RELTOL, abstol=ABSTOL)
"""
SOAKING = 64  # clients, of --soak and --bad
PACKAGES = ("ensembleode", "jax", "fastapi", "uvicorn", "uvloop", "httptools", "msgpack")


#
# The service
#


class Service:
    """`ensembleode serve` in a process of its own, once it is ready."""

    def __init__(self, folder, tolerances, *options):
        app = pathlib.Path(folder) / "app.py"
        reltol, abstol = tolerances
        text = APP.replace("ROOT", repr(str(ROOT)))
        app.write_text(text.replace("RELTOL", repr(reltol)).replace("ABSTOL", repr(abstol)))
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
        for text in self.get("/metrics").splitlines():
            if text and not text.startswith("#"):
                name, _, value = text.rpartition(" ")
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


def driven(running, kind, **task):
    """What a driver found, and what the service says of the same time."""
    before, used = running.metrics(), running.cpu()
    found = apart(service_driver.__file__, [kind, running.port, task])
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
            driven(running, "closed", clients=16, seconds=1.0, most=10_000)
        task = {"seconds": options.seconds / options.rounds, "most": options.requests}
        for clients in options.clients:
            rounds = {True: [], False: []}
            for _ in range(options.rounds):
                for on, running in services.items():
                    rounds[on].append(driven(running, "closed", clients=clients, **task))
            for on, found in rounds.items():
                rows.append({"batching": on, "clients": clients, **medians(found)})
                show_row(rows[-1], first=len(rows) == 1)
        rate = max(row["per_second"] for row in rows) / 2
        task = {"clients": max(options.clients), "seconds": options.seconds / options.rounds}
        rounds = [driven(batching, "open", rate=rate, **task) for _ in range(options.rounds)]
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
        driven(running, "closed", clients=SOAKING, seconds=5.0, most=20_000)
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
        found = driven(running, "closed", clients=SOAKING, seconds=1e6, most=options.soak)
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
            "checked",
            share=options.bad,
            clients=SOAKING,
            seconds=1e6,
            most=options.requests,
        )
    show_row({"batching": True, "clients": SOAKING, **found}, first=True)
    for request, status, body in found["examples"]:
        print(f"  {request} was answered {status}: {body}")
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
        print(f"\n{header(head)}")
    cells = ["on" if row["batching"] else "off", str(row["clients"]), f"{row['per_second']:,.0f}"]
    cells += [f"{1e3 * row[key]:.3g}" for key in ("p50", "p99", "slowest")]
    cells += [f"{row['batch']:.3g}", f"{1e3 * row['wait']:.3g}", f"{1e3 * row['solve']:.3g}"]
    cells += [f"{1e3 * row['cpu']:.3g}", f"{row['driver']:.0%}"]
    cells.append(str(row["sent"] - row["statuses"].get("200", 0)))
    print(line(cells), flush=True)


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
    about = machine(*PACKAGES)
    print(f"{about['cpu']}, {about['cores']} cores; {named(about['versions'])}", flush=True)
    measure = throughput
    if options.soak:
        measure = soak
    elif options.bad is not None:
        measure = checked
    found = {"options": vars(options), **measure(options)}
    show_verdicts(found["verdicts"], ": {:.4g}")
    if options.json:
        write_json(options.json, {"machine": about, **found})


if __name__ == "__main__":
    main()
