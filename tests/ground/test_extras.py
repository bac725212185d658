"""How to install an extra is said in one place, and what it says works."""

import ast
import pathlib
import re
import tomllib

import ensembleode
from ensembleode.ground import extras


TOP = pathlib.Path(__file__).parents[2]
PACKAGE = pathlib.Path(ensembleode.__file__).parent
EXTRAS = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = [*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md")]
CODE = [path for x in (PACKAGE, TOP / "examples", TOP / "benchmarks") for path in x.rglob("*.py")]
# What pip is told to install with an extra: a name, or a folder.
WHAT = re.compile(r"pip install[^\n']*'?([\w./]+)\[[a-z\d,]+\]")


def what(text):
    """That, in the order of the text, without JAX, which is somebody else's."""
    return [found for found in WHAT.findall(text) if found != "jax"]


OURS = what(extras.command("store"))


def asked_for():
    """The extras that errors and tables of the package ask for."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("installing"):
                (given,) = node.args
                found |= {given.value} if isinstance(given, ast.Constant) else set()
    return found


def test_the_command():
    assert OURS in (["."], ["ensembleode"])
    assert extras.installing("store").startswith(extras.command("store"))
    assert what("`pip install 'ensembleode[a,b]'`, pip install -e '.[c]'") == ["ensembleode", "."]


def test_what_errors_ask_for():
    assert asked_for() == {"dask", "julia", "plot", "sbml", "serve", "store", "track", "train"}
    assert asked_for() < set(EXTRAS)


def test_the_code_says_it_nowhere_else():
    assert len(CODE) > 200
    assert [path for path in CODE if what(path.read_text())] == []


def test_the_pages_say_what_works():
    """One page has the command. Some install from a folder, which works with a clone."""
    for path in PAGES:
        said = what(path.read_text())
        assert set(said) <= {".", "/ensembleode", *OURS}, path
        if path == TOP / "docs" / "index.md":
            assert said == OURS
            assert f"\n{extras.command('plot')}\n" in path.read_text()


def test_every_extra_of_users_is_explained():
    table = (TOP / "docs" / "index.md").read_text().partition("| extra | for |")[2]
    explained = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(explained) == set(EXTRAS) - {"bench", "dev", "docs", "test"}
