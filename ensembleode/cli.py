"""The command line: one function a command, its parameters the options.

What a command needs is imported within it, so that `--help` is quick.
"""

import sys
from collections.abc import Sequence
from typing import Any, Literal


def julia_install(
    gpu: Literal["none", "AMDGPU", "CUDA", "Metal", "oneAPI"] = "none", all_methods: bool = False
) -> int:
    """Install Julia and the packages that engine="julia" needs, and compile them.

    Args:
        gpu: Also install what runs ensembles on this kind of GPU.
        all_methods: Also install the packages of the methods that are asked for less often.
    """
    from .engines.julia import environment

    try:
        julia = environment.install(None if gpu == "none" else gpu, all_methods=all_methods)
    except environment.JuliaError as error:
        print(f"ensembleode: {error}", file=sys.stderr)
        return 1
    print(f"Installed for {julia.executable}, in the project {julia.project}.")
    return 0


def julia_status(json: bool = False) -> int:
    """Show which Julia engine="julia" runs, and what is wrong with it; fail if it can't run.

    Args:
        json: Print JSON, not a table.
    """
    from .engines.julia import environment

    report = environment.status()
    print(_as_json(report) if json else _julia_table(report))
    return 1 if report["problems"] else 0


def _as_json(report: dict[str, Any]) -> str:
    import json

    return json.dumps(report, indent=2)


def _julia_table(report: dict[str, Any]) -> str:
    """The report with a line, or several, for each thing."""
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
    lines = []
    for name, cell in cells.items():
        values = cell if isinstance(cell, list) else [cell]
        texts = ["none" if value is None else str(value) for value in values] or ["none"]
        lines += [f"{name:<12}{texts[0]}", *(f"{'':<12}{text}" for text in texts[1:])]
    lines.append("")
    for found in report["problems"]:
        lines += [f"problem     {found['problem']}", f"{'':<12}{found['remedy']}"]
    return "\n".join(lines if report["problems"] else [*lines, 'engine="julia" can run.'])


# Commands by their names on the command line; a table within is a command with commands.
COMMANDS: dict[str, Any] = {
    "julia": {
        "_help": 'The Julia that engine="julia" runs.',
        "install": julia_install,
        "status": julia_status,
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, and exit with its code."""
    from jsonargparse import ArgumentParser, auto_cli

    class Parser(ArgumentParser):
        """Takes `--json` for a parameter that is false by default, not `--json=true`."""

        def add_argument(self, *names: Any, **options: Any) -> Any:
            if options.get("type") is bool and options.get("default") is False:
                del options["type"]
                options["action"] = "store_true"
            return super().add_argument(*names, **options)

    given = None if arguments is None else list(arguments)
    sys.exit(auto_cli(COMMANDS, args=given, parser_class=Parser, prog="ensembleode"))
