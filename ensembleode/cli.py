"""The command line: a function for each command, whose parameters are the options.

The imports of a command are inside its function, so that `--help` is quick.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Literal

from .ground.logs import failed
from .training.commands import train


def julia_install(
    gpu: Literal["none", "AMDGPU", "CUDA", "Metal", "oneAPI"] = "none", all_methods: bool = False
) -> int:
    """Install Julia and the packages that engine="julia" needs, and compile them.

    Args:
        gpu: Also install the package that runs ensembles on this kind of GPU.
        all_methods: Also install the packages of the methods that are rarely used.
    """
    from ensembleode.engines.julia import environment, installing

    try:
        julia = installing.install(None if gpu == "none" else gpu, all_methods=all_methods)
    except environment.JuliaError as error:
        return failed(error)
    print(f"Installed for {julia.executable}, in the project {julia.project}.")
    return 0


def julia_status(json: bool = False) -> int:
    """Show which Julia engine="julia" runs, and what is wrong with it; fails if it can't run.

    Args:
        json: Print JSON instead of a table.
    """
    from ensembleode.engines.julia import environment

    report = environment.status()
    print(_as_json(report) if json else _julia_table(report))
    return 1 if report["problems"] else 0


def _julia_table(report: dict[str, Any]) -> str:
    how = f"{report['executable']}, by {report['how']}" if report["how"] else None
    cells = {
        "Python": report["python"],
        "juliacall": report["juliacall"],
        "juliapkg": f"{report['juliapkg']}{', offline' if report['offline'] else ''}",
        "Julia": report["julia"],
        "executable": how,
        "project": report["project"],
        "packages": [f"{name} {version}" for name, version in report["packages"].items()],
        "for GPUs": [f"{name} {version}" for name, version in report["gpu"].items()],
        "threads": report["threads"],
    }
    return _table(cells, report["problems"], 'engine="julia" can run.')


def plan_measure(
    make_loss: str,
    *,
    sizes: str,
    iterations: float | None = None,
    cores: str | None = None,
    repeats: int = 5,
    time_limit: float = 600.0,
    as_kind: str | None = None,
    count: int = 1,
    json: bool = False,
) -> int:
    """Time an iteration over several sizes, each in a process of its own.

    Args:
        make_loss: A function, as "script.py:make_loss". make_loss(items) returns a function without
            arguments that does one iteration.
        sizes: Numbers of items, such as 1024,4096.
        iterations: The number of iterations to time together; by default as many as take half a
            second.
        cores: Numbers of CPU cores to try, such as 1,2; by default what JAX computes on.
        repeats: How often they are timed; the median counts.
        time_limit: The time limit of each process, in seconds.
        as_kind: Print the measurement as a kind of a fleet file with this name.
        count: The number of instances of that kind.
        json: Print JSON instead of a table.
    """
    from ensembleode.planning import Kind, measure, PlanError
    from ensembleode.planning.checks import whole_number

    def numbers(text: str, what: str) -> list[int]:
        # The text is "1024,4096" or, from a configuration file, "[1024, 4096]".
        return [whole_number(part, what) for part in text.strip("[] ").split(",")]

    try:
        if as_kind is not None:
            if json or (cores is not None and "," in cores):
                raise PlanError("--as-kind is for one number of cores, and without --json.")
            Kind(as_kind, count, 1.0, 1, 1)  # refuses wrong values before anything is measured
        found = measure(
            make_loss,
            numbers(sizes, "sizes"),
            iterations=None if iterations is None else whole_number(iterations, "iterations"),
            cores=None if cores is None else numbers(cores, "cores"),
            repeats=repeats,
            time_limit=time_limit,
            progress=sys.stderr.isatty(),
        )
        if as_kind is not None:
            import yaml

            print(found, file=sys.stderr)
            kind = found.kind(as_kind, count).as_dict()
            print(yaml.safe_dump([kind], sort_keys=False), end="")
        else:
            print(_as_json(found.as_dict()) if json else found)
    except PlanError as error:
        return failed(error)
    return 0 if any(row.status == "ok" for row in found.rows) else 1


def plan_estimate(
    *,
    items: float,
    iterations: float,
    fleet: str,
    items_per_job: float | None = None,
    json: bool = False,
) -> int:
    """Estimate how long a run takes on a fleet.

    Args:
        items: The number of items, such as 1e8.
        iterations: The number of iterations over all items.
        fleet: A YAML file with a list of kinds of instances.
        items_per_job: Estimate independent jobs of this many items, instead of one run that all
            share.
        json: Print JSON instead of tables.
    """
    from ensembleode.planning import estimate, PlanError, read_fleet

    try:
        found = estimate(items, iterations, read_fleet(fleet), items_per_job=items_per_job)
    except PlanError as error:
        return failed(error)
    print(_as_json(found.as_dict()) if json else found)
    return 0


def doctor(json: bool = False) -> int:
    """Show which parts of this installation work, and what to do about those that don't.

    Args:
        json: Print JSON instead of a table.
    """
    from ensembleode.tools import doctor as diagnosis

    report = diagnosis.report()
    print(_as_json(report) if json else _doctor_table(report))
    return 0


def _doctor_table(report: dict[str, Any]) -> str:
    from ensembleode.ground.extras import installing

    threads, julia = report["threads"], report["julia"]
    cells = {
        "versions": [f"{name} {version}" for name, version in report["versions"].items()],
        "devices": report["devices"],
        "threads": f"{threads['devices']} CPU devices for {threads['cores']} cores",
        "precision": (
            "float64 (x64 is on)" if report["x64"] else "float32 (JAX_ENABLE_X64=1 for float64)"
        ),
        "extras": [
            f"{name}: {extra['for']}, "
            + (f"not installed ({installing(name)})" if extra["missing"] else "there")
            for name, extra in report["extras"].items()
        ],
        "Julia": julia["version"] or f"can't run: {julia['problem']}",
        "GPU": report["gpu"],
    }
    return _table(cells, report["problems"], "No problem was found.")


def bench(trajectories: int = 10_000, repeats: int = 3, json: bool = False) -> int:
    """Time an ensemble of Lorenz equations on each ensemble algorithm that runs here.

    Args:
        trajectories: The number of trajectories.
        repeats: How often each is timed; the fastest counts.
        json: Print JSON instead of a table.
    """
    from ensembleode.problem.options import check_count
    from ensembleode.tools import bench as timing

    try:
        check_count("trajectories", trajectories)
        check_count("repeats", repeats)
    except ValueError as error:
        return failed(error)
    rows = timing.rows(trajectories, repeats)
    print(_as_json({"rows": rows}) if json else timing.table(rows))
    return 0


def serve(
    registry: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ensemblealg: str | None = None,
    max_batch: int = 4096,
    max_wait_ms: float = 5.0,
    queue: int = 16384,
    tokens: str | None = None,
    cors: list[str] | None = None,
    hosts: list[str] | None = None,
    store: str | None = None,
    drain_seconds: float = 30.0,
    no_batching: bool = False,
    batch_seconds: float = 60.0,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
) -> int:
    """Solve the problems of a registry for others, over HTTP, many requests at a time.

    Args:
        registry: A Registry, or a function that makes one, as "app.py:registry".
        host: The address to listen at; by default only this computer can reach it.
        port: The port to listen at.
        ensemblealg: The ensemble algorithm for batches, such as EnsembleThreads or
            "EnsembleThreads(4)"; by default that of `solve`.
        max_batch: The largest number of trajectories of a batch.
        max_wait_ms: The longest time that the first request of a batch waits for others, in
            milliseconds.
        queue: How many trajectories may wait.
        tokens: A file of bearer tokens, one in each line; by default the variable
            ENSEMBLEODE_TOKENS.
        cors: An origin whose pages may use the service; several as [A,B].
        hosts: The host names that the service answers to, as [A,B], such as that of a proxy in
            front of it; by default any, except that without tokens on this computer alone, only
            this computer's names.
        store: A folder for durable ensembles.
        drain_seconds: The time for finishing accepted requests when the service is told to end.
        no_batching: Solve every request on its own.
        batch_seconds: The longest time of a batch; after that its problem is considered to hang.
        log_level: The lowest level that is logged.
    """
    options = locals() | {"cors": cors or (), "batching": not no_batching}
    del options["no_batching"]
    from ensembleode.serve import commands

    return commands.run_serve(**options)


def _as_json(report: dict[str, Any]) -> str:
    import json

    return json.dumps(report, indent=2)


def _table(cells: dict[str, Any], problems: list[dict[str, str]], otherwise: str) -> str:
    """One or several lines for each cell, followed by the problems, or by `otherwise` if there are
    none."""
    lines = []
    for name, cell in cells.items():
        values = cell if isinstance(cell, list) else [cell]
        first, *rest = ["none" if value is None else str(value) for value in values] or ["none"]
        lines += [f"{name:<12}{first}", *(f"{'':<12}{text}" for text in rest)]
    lines.append("")
    for found in problems:
        lines += [f"{'problem':<12}{found['problem']}", f"{'':<12}{found['remedy']}"]
    return "\n".join(lines if problems else [*lines, otherwise])


# The commands by their names on the command line; an inner dict is a command with subcommands.
COMMANDS: dict[str, Any] = {
    "doctor": doctor,
    "train": train,
    "bench": bench,
    "serve": serve,
    "julia": {
        "_help": 'The Julia that engine="julia" runs.',
        "install": julia_install,
        "status": julia_status,
    },
    "plan": {
        "_help": "What a big run will cost.",
        "measure": plan_measure,
        "estimate": plan_estimate,
    },
}


_ABOUT = "Solve and train on ensembles of differential equations, in JAX."
_MORE = """\
for example:
  ensembleode doctor                        what of this installation runs
  ensembleode train model.py:problem --epochs 100 --output best.eqx
  ensembleode serve app.py:registry --port 8000

documentation: the folder docs/ of the source (getting-started.md, training/index.md, serving.md);
in Python, help(ensembleode.solve)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and exit with its code."""
    import argparse
    from importlib.metadata import version

    from jsonargparse import ArgumentParser, auto_cli, DefaultHelpFormatter

    class Parser(ArgumentParser):
        """Accepts `--json` for a parameter that is false by default, instead of `--json=true`; and
        `--items-per-job` for `--items_per_job`."""

        def add_argument(self, *names: Any, **options: Any) -> Any:
            if options.get("type") is bool and options.get("default") is False:
                del options["type"]
                options["action"] = "store_true"
            dashed = [x.replace("_", "-") for x in names if x.startswith("--") and "_" in x]
            return super().add_argument(*names, *dashed, **options)

    class Formatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
        """Keeps the lines of examples as they are."""

    try:
        code = auto_cli(
            COMMANDS,
            args=None if arguments is None else list(arguments),
            parser_class=Parser,
            prog="ensembleode",
            description=_ABOUT,
            epilog=_MORE,
            version=version("ensembleode"),
            formatter_class=Formatter,
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads on (`| head`). Python would try to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)
