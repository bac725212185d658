"""MkDocs hooks: a notebook of every example, made from its script, to download from the gallery.

They have no outputs, unless `EXECUTE_NOTEBOOKS=1` is in the environment. Then each is executed,
with the arguments of `tests/test_examples.py` for a short run, and one that fails ends the build.
"""

import ast
import os
import pathlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor


ROOT = pathlib.Path(__file__).parents[1]
ARGUMENTS = """# The arguments{short}, as on the command line of the script (--help shows all):
import sys

__file__ = "{name}"
sys.argv = {arguments}"""


def on_files(files, config):
    import nbformat
    from mkdocs.structure.files import File

    paths = sorted((ROOT / "examples").glob("*.py"))
    made = executed(paths) if os.environ.get("EXECUTE_NOTEBOOKS") else map(notebook, paths)
    for path, x in zip(paths, made, strict=True):
        name, text = f"notebooks/{path.stem}.ipynb", nbformat.writes(x)
        files.append(File.generated(config, name, content=text))
    return files


def cells_of(path: pathlib.Path, arguments: list[str]) -> list[tuple[str, str]]:
    """The script in parts, as Markdown or code: the docstring, functions and classes, the main part
    with its arguments before it, and what is between these."""
    source = path.read_text()
    lines, cells, end, joined = source.splitlines(), [], 0, False
    for node in ast.parse(source).body:
        # (With the comments before it.)
        code, end = "\n".join(lines[end : node.end_lineno]).strip("\n"), node.end_lineno
        apart = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)
        if not cells:
            title, _, text = ast.literal_eval(code).partition("\n")
            cells.append(("markdown", f"# {title.rstrip('.')}\n{text}".strip()))
        elif joined and not apart:
            gap = "\n" * (1 + (not lines[node.lineno - 2].strip()))
            cells[-1] = "code", cells[-1][1] + gap + code
        else:
            if isinstance(node, ast.If):
                given = [path.name, *arguments]
                short = " of a short run" * bool(arguments)
                said = ARGUMENTS.format(short=short, name=path.name, arguments=given)
                cells.append(("code", said))
            cells.append(("code", code))
        joined = not apart and len(cells) > 1
    return cells


def notebook(path: pathlib.Path, arguments: list[str] = ()):
    """The script as a notebook, as nbformat has it."""
    from nbformat import v4

    new = {"markdown": v4.new_markdown_cell, "code": v4.new_code_cell}
    cells = [new[kind](text) for kind, text in cells_of(path, arguments)]
    for i, cell in enumerate(cells):
        cell.id = f"cell-{i}"  # (the same in each build)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "title": path.stem})


def execute(made) -> None:
    """Fill in the outputs. **Raises:** `RuntimeError` where a cell fails."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(made, timeout=600, resources={"metadata": {"path": folder}})
        try:
            client.execute()
        except Exception as e:
            raise RuntimeError(f"the notebook of {made.metadata.title}.py fails: {e}") from e
    for cell in made.cells:  # without progress bars
        if cell.get("outputs"):
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]


def executed(paths: list[pathlib.Path]) -> list:
    """Notebooks of short runs; those that can't run here, for want of Julia, are not executed."""
    runs = short_runs()
    made = [notebook(path, runs.get(path.name, ())) for path in paths]
    ready = [x for path, x in zip(paths, made, strict=True) if path.name in runs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(execute, ready))
    return made


def short_runs() -> dict[str, list[str]]:
    """The arguments of each example for a short run, with pictures."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.test_examples import CASES
    finally:
        sys.path.remove(str(ROOT))
    runs = {}
    for case in CASES:
        marks = getattr(case, "marks", ())
        if any(mark.name == "skipif" and mark.args[0] for mark in marks):
            continue
        name, arguments, _ = getattr(case, "values", case)
        runs.setdefault(name, [x for x in arguments if x != "--no-plot"])
    return runs
