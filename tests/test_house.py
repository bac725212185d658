"""The structure of the package: which module may import which, and where CONTRIBUTING.md says
things are."""

import ast
import graphlib
import pathlib
import re

import ensembleode


ROOT = pathlib.Path(ensembleode.__file__).parent
MODULES = {
    ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}


def imported(name: str, path: pathlib.Path) -> set[str]:
    """The modules of the package that this one imports, in functions too."""
    found = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level or node in for_types:
            continue
        source = package[: len(package) - node.level + 1]
        source = ".".join(source + ([node.module] if node.module else []))
        for alias in node.names:
            whole = f"{source}.{alias.name}"
            found.add(whole if whole in MODULES else source)
    # (A package comes before its modules, which may import from one another.)
    return found - {name, ROOT.name}


def test_imports_have_no_circle():
    """Lazy ones included."""
    graph = {name: imported(name, path) for name, path in MODULES.items() if name != ROOT.name}
    assert len(graph) > 150
    list(graphlib.TopologicalSorter(graph).static_order())


# From the ground up: what a floor imports is on a floor below, or on its own.
FLOORS = (
    {"tracing"},
    {"ground"},
    {"solvers", "fields"},
    {"numbers", "aliases", "options", "sensitivity", "dense", "initialization", "events", "stats"},
    {"callbacks", "corrections", "ode_function", "saving_callback"},
    {"problem", "solution", "solution_text", "ensemble"},
    {"core"},
    {"engines"},
    {"executors", "julia"},
    {"analysis", "store", "stiffness"},
    {"solving", "steady"},
    {"tools"},
    {"planning", "training"},
    {"cli"},
    {"serve"},
)
# What is short for a function upstairs, which it asks for when it is called.
SHORT_FOR = {
    "ensembleode.analysis.summary": {"ensembleode.solving"},
    "ensembleode.ensemble": {"ensembleode.executors.distributed.local"},
    "ensembleode.solution": {"ensembleode.analysis.labelled", "ensembleode.analysis.plotting"},
}


def test_floors():
    """Nothing looks upstairs."""
    height = {part: i for i, floor in enumerate(FLOORS) for part in floor}
    parts = {name: name.split(".")[1] for name in MODULES if name != ROOT.name}
    assert set(parts.values()) == set(height)
    looks_up = {
        (name, other)
        for name in parts
        for other in imported(name, MODULES[name]) - SHORT_FOR.get(name, set())
        if height[other.split(".")[1]] > height[parts[name]]
    }
    assert not looks_up


def test_where_things_are():
    """What the table in CONTRIBUTING.md names is there: seen from the top, from the package, or
    from a folder that the row names."""
    top = pathlib.Path(__file__).parents[1]
    table = (top / "CONTRIBUTING.md").read_text().partition("## Where things are")[2]
    rows = re.findall(r"^\|.*\|(.*)\|$", table.partition("\n## ")[0], re.MULTILINE)
    assert len(rows) > 40
    for row in rows:
        names = re.findall(r"`([\w/]+(?:/|\.\w+))`", row)
        found = {base / name for base in (top, ROOT) for name in names if (base / name).exists()}
        bases = [top, ROOT, *(x if x.is_dir() else x.parent for x in found)]
        missing = [x for x in names if not any((base / x).exists() for base in bases)]
        assert not missing, row
