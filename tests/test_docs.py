"""The documentation is right: its code runs, and no public name is missing.

The site itself, with its links, is built strictly by `.ci/run`.
"""

import ast
import doctest
import functools
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import textwrap
import types

import pytest

import ensembleode as eo


ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
}

# Every block of Python is run. Blocks in these languages are not Python; one without is a command.
OTHER_LANGUAGES = {"", "bash", "julia", "text"}
FENCE = re.compile(r"\s*```+(.*)$")
END = chr(0)
# Arguments of a page's script, with which it takes less time.
ARGUMENTS = {"docs/sweep.md": ["30"]}


#
# The code of the pages
#


class Block:
    """A block of code: its language, the number of its first line, and its lines."""

    def __init__(self, language, start):
        self.language, self.start, self.lines = language, start, []

    @property
    def text(self):
        return textwrap.dedent("\n".join(self.lines))


def blocks_of(text):
    found, is_open = [], False
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence:
            is_open = not is_open
            if is_open:
                found.append(Block(fence[1].strip(), number + 1))
        elif is_open:
            found[-1].lines.append(line)
    assert not is_open, f"the block at line {found[-1].start} is not closed"
    return found


def script_of(blocks):
    """The Python of a page as one script, each line where it is on the page."""
    lines = []
    for block in blocks:
        if block.language == "python":
            lines += [""] * (block.start - 1 - len(lines)) + block.text.split("\n")
            # (Not in processes that the page starts, which import it.)
            lines.append("if __name__ == '__main__': print(chr(0), end='')")
    return "\n".join(lines) + "\n"


def outputs_of(blocks):
    """What each block of Python is said to print: a block of text that follows it, or None."""
    following = [*blocks[1:], None]
    for block, after in zip(blocks, following, strict=True):
        if block.language == "python":
            yield after.text if after is not None and after.language == "text" else None


def run(arguments, directory):
    """Run Python as a user does; but warnings are errors, there are no windows, and XLA compiles
    quickly rather than well."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=directory,
        env={**os.environ, "MPLBACKEND": "Agg", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def differs(expected, got):
    """As in doctest: `...` stands for anything, and white space for white space."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return not doctest.OutputChecker().check_output(expected + "\n", got.rstrip() + "\n", flags)


def check_page(text, directory, arguments=()):
    blocks = blocks_of(text)
    path = directory / "page.py"
    path.write_text(script_of(blocks))
    done = run([path, *arguments], directory)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.split(END)[:-1]
    for expected, got in zip(outputs_of(blocks), printed, strict=True):
        assert expected is None or not differs(expected, got), f"said to print\n{expected}\n{got}"


def has_python(page):
    return any(block.language == "python" for block in blocks_of(page.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name for name, page in PAGES.items() if has_python(page)],
)
def test_code_of_page_runs(name, tmp_path):
    check_page(PAGES[name].read_text(), tmp_path, ARGUMENTS.get(name, ()))


@pytest.mark.parametrize("name", PAGES)
def test_no_code_of_page_is_skipped(name):
    languages = {block.language for block in blocks_of(PAGES[name].read_text())}
    assert languages <= OTHER_LANGUAGES | {"python"}


PAGE = """
```python
x = {value}
```

Indented, as in an admonition:

    ```python
    print(x, 1 / x)
    ```

    ```text
    2 ...
    ```
"""


@pytest.mark.parametrize(
    ("value", "failure"), [(2, None), (3, "said to print"), (0, 'page.py", line 9')]
)
def test_check_of_pages(value, failure, tmp_path):
    page = PAGE.format(value=value)
    if failure is None:
        check_page(page, tmp_path)
    else:
        with pytest.raises(AssertionError, match=failure):
            check_page(page, tmp_path)


#
# Docstrings
#


def run_examples(modules, directory):
    """The examples in the docstrings of modules, in an interpreter of its own."""
    program = (
        # (`import a.b as b` finds what `a` calls b, maybe a function.)
        "import doctest, importlib; "
        f"found = [doctest.testmod(importlib.import_module(name)) for name in {modules}]; "
        "raise SystemExit(sum(result.failed for result in found))"
    )
    done = run(["-c", program], directory)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_examples_in_docstrings(tmp_path):
    paths = [path for path in (ROOT / "ensembleode").rglob("*.py") if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    assert "ensembleode.problem.problem" in names
    run_examples([name.removesuffix(".__init__") for name in names], tmp_path)


def test_check_of_examples_in_docstrings(tmp_path):
    for name, result in (("right", 2), ("wrong", 3)):
        (tmp_path / f"{name}.py").write_text(f'"""\n>>> 1 + 1\n{result}\n"""\n')
    run_examples(["right"], tmp_path)
    with pytest.raises(AssertionError, match="Expected"):
        run_examples(["right", "wrong"], tmp_path)


def public(module):
    names = [name for name in dir(module) if not name.startswith("_")]
    found = {f"{module.__name__}.{name}": getattr(module, name) for name in names}
    return {name: x for name, x in found.items() if not isinstance(x, types.ModuleType)}


PUBLIC = public(eo) | public(eo.analysis) | public(eo.planning)
METHODS = {
    f"{name}.{attribute}": value
    for name, thing in PUBLIC.items()
    if inspect.isclass(thing)
    for attribute, value in vars(thing).items()
    if not attribute.startswith("_") and inspect.isfunction(value)
}


def docstring(thing):
    """The one it has itself, neither inherited nor made up by dataclasses."""
    doc = thing.__doc__ or ""
    return "" if doc.startswith(f"{thing.__name__}(") else doc


def documented(thing):
    """All code in its docstring, and in the docstrings that this refers to."""
    doc = docstring(thing)
    linked = [(PUBLIC | METHODS).get(name) for name in re.findall(r"\]\[([\w.]+)\]", doc)]
    docs = [doc, *(docstring(other) for other in linked if other is not None)]
    return " ".join(code for doc in docs for code in re.findall(r"`[^`]+`", doc))


@pytest.mark.parametrize("name", PUBLIC | METHODS)
def test_docstring(name):
    thing = (PUBLIC | METHODS)[name]
    assert docstring(thing)
    if inspect.isclass(thing) and issubclass(thing, BaseException | int):
        return  # made by ensembleode, not called by users
    code = documented(thing)
    parameters = [x for x in inspect.signature(thing).parameters if not x.startswith("_")]
    missing = {x for x in parameters if not re.search(rf"\b{x}\b", code)} - {"self", "sim"}
    assert not missing, f"the docstring leaves out {missing}"


@pytest.mark.parametrize("name", PUBLIC)
def test_is_in_reference(name):
    assert any(pkgutil.resolve_name(other) is PUBLIC[name] for other in in_reference())


@functools.cache
def in_reference():
    """What the pages of the reference show."""
    pages = [page.read_text() for page in (DOCS / "reference").glob("*.md")]
    filled = [hooks().on_page_markdown(page) for page in pages]
    return {found for page in filled for found in re.findall(r"^::: (\S+)", page, re.M)}


#
# What hooks fill in
#


def hooks(name="hooks"):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [path.name for path in (ROOT / "examples").glob("*.py")])
def test_gallery_has_example(name):
    page = hooks().on_page_markdown((DOCS / "gallery.md").read_text())
    source = (ROOT / "examples" / name).read_text()
    assert f"`examples/{name}`" in page
    assert textwrap.indent(source, "    ").strip() in page
    # The pictures that examples draw are not tracked: a copy of each is.
    stem = name.removesuffix(".py")
    if "savefig" in source:
        assert re.search(rf"\[!\[[A-Z0-9][^\]]{{40,}}\]\(images/{stem}.png\)\]", page)
    # (A text may not start with what is left of a formula.)
    assert re.search(rf"\(#{stem}\)\*\*\n\n    [A-Z]", page)


def pages_of(section):
    """The pages of a section of the site, without its index."""
    # (Other sections begin at the same depth; YAML alone doesn't know the tags of extensions.)
    nav = (ROOT / "mkdocs.yml").read_text().split(f"\n  - {section}:\n")[1]
    names = re.findall(r"^      - .*?(\S+\.md)$", re.split(r"\n {0,2}\S", nav)[0], re.M)
    return [name for name in names if name != "guides/index.md"]


@pytest.mark.parametrize("name", [*pages_of("Guides"), *pages_of("Training")])
def test_guide_has_a_picture(name):
    """With a text for those who don't see it."""
    page = DOCS / name
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text())
    assert pictures
    for text, path in pictures:
        assert len(text) > 40
        assert (page.parent / path).exists()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda x: x.stem)
def test_notebook_is_the_script(path):
    (_, title), *cells = hooks("notebooks").cells_of(path, ["--fast"])
    code = [text for kind, text in cells if kind == "code"]
    assert len(code) == len(cells)
    said = [text for text in code if text.startswith("# The arguments")]
    assert len(said) == ("argparse" in path.read_text())
    for text in said:
        assert f"sys.argv = {[path.name, '--fast']!r}" in text
        code.remove(text)

    def statements(text):
        return [ast.dump(node) for node in ast.parse(text).body]

    script = path.read_text()
    assert statements(script)[1:] == statements("\n".join(code))
    assert title.startswith("# ")
    assert "\n\n" in title


EXAMPLE = '''"""An example.

Of what.
"""

import sys


def main():
    print(sys.argv[1:])
    if "--fail" in sys.argv:
        sys.exit("it failed")


if __name__ == "__main__":
    main()
'''


def test_notebook_is_executed(tmp_path):
    """And one that fails ends the build."""
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    module = hooks("notebooks")
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    made = module.notebook(path, ["--fast"])
    module.execute(made)
    nbformat.validate(made)
    assert made.cells[-1].outputs[0].text == "['--fast']\n"
    with pytest.raises(RuntimeError, match=r"example\.py fails: (?s:.*)it failed"):
        module.execute(module.notebook(path, ["--fail"]))


def test_repository_is_that_of_the_project(tmp_path, monkeypatch):
    """And there is none where the project has none."""
    module = hooks()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    project = '[project]\nname = "a"\nversion = "1.2"\n'
    (tmp_path / "pyproject.toml").write_text(project)
    assert module.on_config({"repo_url": None}) == {"repo_url": None, "copyright": "a 1.2"}
    urls = '[project.urls]\nRepository = "https://example.org/a"\n'
    (tmp_path / "pyproject.toml").write_text(project + urls)
    config = module.on_config({"repo_url": None})
    assert config["repo_url"] == "https://example.org/a"
    assert config["edit_uri"] == "edit/main/docs/"
    assert module.on_config({"repo_url": "https://example.org/b"})["repo_url"].endswith("b")


@pytest.mark.slow
def test_hooks_fill_in_every_comment():
    for page in DOCS.rglob("*.md"):
        assert "<!--" not in hooks().on_page_markdown(page.read_text()), page


def test_examples_in_docstrings_are_shown_as_code():
    griffe = pytest.importorskip("griffe")
    shown = griffe.Function("f", docstring=griffe.Docstring("It is.\n\n>>> 1 + 1\n2\n\nMore."))
    hooks("docstrings").Examples().on_instance(obj=shown)
    assert shown.docstring.value == "It is.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
