"""Tables in Markdown, descriptions of the machine, and JSON files."""

import importlib.metadata
import json
import os
import pathlib
import platform


PEERS = ("ensembleode", "jax", "diffrax", "equinox", "numpy", "gradsolve", "warp-lang")
PEERS += ("heyoka", "scipy", "numba")


def line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def header(columns, left=1):
    """The header of a table whose first columns are words, and the others numbers."""
    return f"{line(columns)}\n|{':---|' * left}{'---:|' * (len(columns) - left)}"


def show_verdicts(verdicts, form):
    """Print lines of `(what, measured, bound, held)`."""
    print()
    for what, measured, bound, held in verdicts:
        verdict = "met" if held else "**MISSED**"
        print(f"- {what}{form.format(measured)}, wanted {bound}: {verdict}")


def write_json(path, found):
    pathlib.Path(path).write_text(json.dumps(found, indent=1))


def cpu():
    info = pathlib.Path("/proc/cpuinfo")
    names = info.read_text().splitlines() if info.exists() else []
    names = [x.partition(":")[2].strip() for x in names if x.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions(*names):
    """The versions of Python, and of those of the packages that are installed."""
    found = {"Python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def named(versions):
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def machine(*names):
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "versions": versions(*names),
    }


def kind_of_machine():
    """The kind of machine, in brief, for measurements that don't depend on the processor."""
    about = named(versions("jax"))
    return f"{platform.machine()}, {os.cpu_count()} cores, {about}"
