"""MkDocs hooks: what the pages take from elsewhere in the repository when the site is built.

A comment on a line of its own stands for it, so that neither can fall out of step:

- `<!-- gallery -->`: every example, with the start of its docstring, its picture and its source;
- `<!-- solvers -->`: a table of them; `<!-- explicit methods -->` and `<!-- implicit methods -->`:
  what each says of itself;
- `<!-- julia methods -->`: the methods that `JuliaAlg` knows.
"""

import ast
import pathlib
import textwrap

import ensembleode
from ensembleode.solvers.base import ODESolver


ROOT = pathlib.Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_) -> str:
    markdown = markdown.replace("<!-- gallery -->", gallery())
    markdown = markdown.replace("<!-- solvers -->", solvers())
    for kind in ("explicit", "implicit"):
        methods = "\n\n".join(map(_documented, _methods(implicit=kind == "implicit")))
        markdown = markdown.replace(f"<!-- {kind} methods -->", methods)
    return markdown.replace("<!-- julia methods -->", julia_methods())


def examples() -> list[pathlib.Path]:
    """Every example, the quickstart first."""
    paths = (ROOT / "examples").glob("*.py")
    return sorted(paths, key=lambda path: (path.stem != "quickstart", path.name))


def gallery() -> str:
    return "\n\n".join(map(_shown, examples()))


def _shown(path: pathlib.Path) -> str:
    title, *paragraphs = _docstring(path).split("\n\n")
    title = " ".join(title.split()).removesuffix(".")
    about = [paragraph for paragraph in paragraphs if not paragraph.startswith(" ")][:1]
    picture = f"images/{path.stem}.png"
    shown = [f"![{title}]({picture})"] if (ROOT / "docs" / picture).exists() else []
    source = textwrap.indent(f"```python\n{path.read_text().strip()}\n```", "    ")
    source = f'??? example "`examples/{path.name}`"\n\n{source}'
    return "\n\n".join([f"## {title}", *about, *shown, source])


def _docstring(path: pathlib.Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(f"{path} has no docstring, which the gallery would show.")
    return text


def _methods(*, implicit: bool) -> list[type]:
    """The solver classes, by order."""
    found = [x for x in vars(ensembleode.solvers).values() if isinstance(x, type)]
    methods = [
        x for x in found if issubclass(x, ODESolver) and isinstance(getattr(x, "order", None), int)
    ]
    chosen = [x for x in methods if x.implicit == implicit]
    return sorted(chosen, key=lambda x: (x.order, x.__name__))


def solvers() -> str:
    """A table of all methods, the default first."""
    methods = [*_methods(implicit=False), *_methods(implicit=True)]
    methods.sort(key=lambda x: x is not ensembleode.Tsit5)
    rows = ["| solver | order | adaptive | engines | |", "|---|---|---|---|---|"]
    for x in methods:
        about = " ".join((x.__doc__ or "").partition("\n\n")[0].split())
        cells = [f"[`{x.__name__}`][ensembleode.{x.__name__}]", str(x.order)]
        cells += ["yes" if x.adaptive else "no", ", ".join(x.engines), about]
        rows.append(f"| {' | '.join(cells)} |")
    own = "[`ExplicitRK`][ensembleode.ExplicitRK]"
    of_tableau = "the tableau's | with an embedded method"
    rows.append(f"| {own} | {of_tableau} | compiled, lanes | An explicit method of your own. |")
    alg = "[`JuliaAlg`][ensembleode.JuliaAlg]"
    of_method = "the method's | the method's"
    about = "Any method of OrdinaryDiffEq that it knows by name."
    return "\n".join([*rows, f"| {alg} | {of_method} | julia | {about} |"])


def _documented(method: type) -> str:
    return f"::: ensembleode.{method.__name__}\n    options: {{ heading_level: 3 }}"


def julia_methods() -> str:
    """A table of the methods by the Julia package that has them."""
    packages = _constant("solvers/julia_alg.py", "PACKAGES")
    on_demand = _constant("engines/julia/environment.py", "METHODS")
    rows = ["| package | methods |", "|---|---|"]
    for package, names in packages.items():
        mark = "\\*" if package in on_demand else ""
        rows.append(f"| {package}{mark} | {', '.join(f'`{name}`' for name in names.split())} |")
    return "\n".join(rows)


def _constant(path: str, name: str):
    """The value of a constant of a module, which is not imported."""
    for node in ast.parse((ROOT / "ensembleode" / path).read_text()).body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} has no {name}.")
