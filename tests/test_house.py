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


def imported(name: str, path: pathlib.Path, for_types: bool = False) -> set[str]:
    """The modules of the package that this one imports, in functions too; and those that it needs
    `for_types` alone."""
    found = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    tree = ast.parse(path.read_text())
    types_alone = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        if node in types_alone and not for_types:
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


# From the ground up: what a room imports is in a room on a floor below, or in the same room. A room
# is a folder, with those in it that have no floor of their own, or a module at the top.
FLOORS = (
    {"tracing"},
    {"ground"},
    {"fields"},
    {"fields/derivatives"},
    {"solvers"},
    {"problem", "engines/compiled/llvm"},
    {"solution", "engines/compiled/algebra", "engines/compiled/xla"},
    {"plan", "analysis"},
    {"jumps", "engines/base", "engines/compiled/field"},
    {"trajectories", "engines/derivatives"},
    {"running", "engines/diffrax", "engines/compiled/steps"},
    {"store", "executors/distributed", "engines/julia", "engines/compiled/loop"},
    {"engines/compiled/reverse", "julia"},
    {"engines/compiled"},
    {"engines/columns"},
    {"engines"},
    {"executors"},
    {"solving"},
    {"steady", "tools"},
    {"planning", "training"},
    {"cli"},
    {"serve"},
)
HEIGHT = {room: i for i, floor in enumerate(FLOORS) for room in floor}
# What is short for a function upstairs, which it asks for when it is called.
SHORT_FOR = {
    "ensembleode.analysis.summary": {"ensembleode.solving"},
    "ensembleode.problem.ensemble": {"ensembleode.executors.distributed.local"},
    "ensembleode.solution.solution": {"ensembleode.analysis.plotting"},
}


def room(name: str) -> str:
    path = MODULES[name].relative_to(ROOT)
    folders = [str(x) for x in path.parents]
    return next((x for x in folders if x in HEIGHT), path.stem)


def test_floors():
    """Nothing looks upstairs, not even for a type."""
    rooms = {name: room(name) for name in MODULES if name != ROOT.name}
    assert set(rooms.values()) == set(HEIGHT)
    looks_up = {
        (name, other)
        for name, own in rooms.items()
        for other in imported(name, MODULES[name], for_types=True) - SHORT_FOR.get(name, set())
        if rooms[other] != own and HEIGHT[rooms[other]] >= HEIGHT[own]
    }
    assert not looks_up


def test_sizes_of_folders():
    """A folder can be read at a glance. (In `solvers/`, each method is a file.)"""
    folders = [x for x in (ROOT, *ROOT.rglob("*")) if (x / "__init__.py").exists()]
    sizes = {str(x.relative_to(ROOT)): len(list(x.glob("*.py"))) for x in folders}
    assert len(sizes) > 30
    assert sizes.pop(".") <= 5
    sizes.pop("solvers")
    assert max(sizes.values()) <= 22


def test_the_tree():
    """CONTRIBUTING.md shows every room."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text().partition("## The tree")[2]
    shown = re.findall(r"^    (\S+) {2}", text.partition("\n## ")[0], re.MULTILINE)
    assert {x.rstrip("/").removesuffix(".py") for x in shown} == {*HEIGHT, "__init__"}


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


def classes():
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node


# A method, and the class of diffrax's solver that runs it. (The list may only become shorter.)
TWINS = {"ImplicitEuler", "KenCarp3", "KenCarp4", "KenCarp5", "Kvaerno3", "Kvaerno4", "Kvaerno5"}
VAGUE = {"one", "at", "of", "along", "within", "over", "each"}


def test_a_name_is_one_class():
    """With an underscore before it or without."""
    names = [node.name.lstrip("_") for node in classes()]
    assert len(names) > 400
    assert {x for x in names if names.count(x) > 1} == TWINS


def test_functions_say_what_they_return_or_do():
    blocks = [*(ast.parse(path.read_text()) for path in MODULES.values()), *classes()]
    names = [x.name.lstrip("_") for block in blocks for x in block.body if hasattr(x, "args")]
    assert len(names) > 3000
    assert not VAGUE & set(names)


def test_return_codes_are_compared_in_one_place():
    """By the predicates of `ground/retcode.py`."""
    compares = [
        (name, node.lineno)
        for name, path in MODULES.items()
        if name != "ensembleode.ground.retcode"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and "ReturnCode." in ast.unparse(node)
    ]
    assert compares == []
