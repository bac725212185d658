"""MkDocs hooks: what the pages take from elsewhere in the repository when the site is built.

A comment on a line of its own stands for it, so that neither can fall out of step:

- `<!-- gallery -->`: a card for every example, with its picture and the start of its docstring;
  then their sources;
- `<!-- solvers -->`: a table of them; `<!-- explicit methods -->`, `<!-- implicit methods -->` and
  `<!-- stochastic methods -->`: what each says of itself;
- `<!-- julia methods -->`: the methods that `JuliaAlg` knows;
- `<!-- capabilities -->`: a table of what each engine can do.

Comments that mark what `benchmarks/limits_report.py` writes into a page are left out.
"""

import ast
import pathlib
import re
import textwrap
import tomllib
from html import unescape

import ensembleode
from ensembleode.engines.base.capabilities import cell, ENGINES, FEATURES
from ensembleode.solvers.base import ODESolver
from ensembleode.solvers.stochastic import SDESolver


ROOT = pathlib.Path(__file__).parents[1]


def on_config(config, **_):
    """The version at the foot of pages; and links to the repository, and to edit a page there, if
    pyproject.toml has a `Repository` among its urls, and mkdocs.yml no `repo_url`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config["copyright"] = f"{project['name']} {project['version']}"
    repository = project.get("urls", {}).get("Repository")
    if repository and not config["repo_url"]:
        config["repo_url"], config["repo_name"] = repository, "Repository"
        config["edit_uri"] = "edit/main/docs/"
    return config


def on_page_markdown(markdown: str, **_) -> str:
    markdown = markdown.replace("<!-- gallery -->", gallery())
    markdown = markdown.replace("<!-- solvers -->", solvers())
    of_odes = {x: _methods(implicit=x == "implicit") for x in ("explicit", "implicit")}
    for kind, found in {**of_odes, "stochastic": _stochastic_methods()}.items():
        methods = "\n\n".join(map(_documented, found))
        markdown = markdown.replace(f"<!-- {kind} methods -->", methods)
    markdown = markdown.replace("<!-- capabilities -->", capabilities())
    markdown = re.sub(r"<!-- (limits: [\w ]+|end of limits) -->\n", "", markdown)
    return markdown.replace("<!-- julia methods -->", julia_methods())


FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_page_content(html: str, **_) -> str:
    """Formulas as MathML, which browsers draw without a script."""
    html = FORMULA.sub(_mathml, html)
    if "arithmatex" in html:
        raise ValueError("a formula is left that isn't MathML.")
    return html


def _mathml(formula: re.Match) -> str:
    from latex2mathml.converter import convert  # (tests of the other hooks do without)

    if formula[1] == "span":
        return convert(unescape(formula[2]), display="inline")
    return f'<div class="formula">{convert(unescape(formula[2]), display="block")}</div>'


def examples() -> list[pathlib.Path]:
    """Every example, the quickstart first, and those without a picture last."""
    paths = (ROOT / "examples").glob("*.py")
    return sorted(paths, key=lambda x: (x.stem not in PICTURES, x.stem != "quickstart", x.name))


# What the pictures show, for those who can't see them.
PICTURES = {
    "augmented_ode": """The loss of a plain neural ODE stays at a third, that of an augmented one
        falls to a millionth: its solutions cross. A pendulum, held out, by a neural ODE of second
        order, which swings, and by one of first order, which stands still.""",
    "chemical_langevin": """Twelve cells, in each of which there comes to be much or little of a
        protein. A map of both proteins, with two peaks. Histograms of one: with two peaks, and
        without repression with one, under the curve of the theory.""",
    "chemistry": """Ozone falls within a minute and rises again, in a band that widens. Five
        constants, begun wrong by factors of up to three, over updates: all end where they are
        true.""",
    "digits_neural_ode": """Handwritten digits, with the eight that were taken for others. How the
        features of the images move apart, into a cluster for each digit.""",
    "latent_ode": """The negative ELBO falls, of batches and of series held out. Two series:
        curves drawn from the posterior go through the measurements, and on beyond them.""",
    "multiple_shooting": """The loss of multiple shooting falls to the noise, that of single
        shooting does not. The groups before the fit. The solution after it, through the data.""",
    "neural_cde": """The cross-entropy falls. Two noisy paths that were held out, which it tells
        rightly to turn to the left or to the right.""",
    "neural_ode": """The error falls to the noise. A trajectory that was held out, followed for
        twice as long as there were data. Closed orbits of prey and predators.""",
    "neural_sde": """A series that stays in one of two wells, and changes to the other now and
        then. Drift, diffusion, density and autocorrelation that were learned, and the exact
        ones.""",
    "ode_rnn": """The error of the next value falls. Two series that were held out: the prediction
        jumps at the first observations, and then goes through those that come.""",
    "normalizing_flow": """The negative log-likelihood falls to that of the exact density. The
        density, two moons. Samples, and the curves on which some came from the normal.""",
    "parameter_sweep": """The maxima of z over rho, which branch into bands of chaos. How the
        quantiles of z spread, for values of rho that hardly differ.""",
    "physics_informed": """What the network found for three equations: two bands that sharpen, a
        wave that steepens into a shock, standing waves. Below, the differences from the references,
        all small. The losses over seconds, which begin anew in each window.""",
    "quickstart": """The loss, one curve for all ensemble algorithms. The trajectories before the
        fit, which fan out, and after it, all near 1.""",
    "universal_ode": """The error falls towards that of the noise. The equation that was found, over
        the exact one, for twice as long as there were data.""",
    "uncertainty": """150 epidemics, coloured by their peaks. The median and the quantiles of 5000.
        A histogram of how many are ill at the worst time.""",
}


def gallery() -> str:
    """A card for each example, and then their sources."""
    cards = "\n\n".join(map(_card, examples()))
    sources = "\n\n".join(map(_source, examples()))
    grid = f'<div class="grid cards gallery" markdown>\n\n{cards}\n\n</div>'
    return f"{grid}\n\n## Sources\n\n{sources}"


def _card(path: pathlib.Path) -> str:
    title, about, *_ = _docstring(path).split("\n\n")
    title = " ".join(title.split()).removesuffix(".")
    paragraphs = [f"**[{title}](#{path.stem})**", about]
    notebook = f"{path.stem}.ipynb"
    paragraphs.append(f'[As a notebook](notebooks/{notebook}){{ download="{notebook}" }}')
    if seen := " ".join(PICTURES.get(path.stem, "").split()):
        picture = f"images/{path.stem}.png"
        paragraphs.insert(0, f"[![{seen}]({picture})]({picture})")
    return "-   " + textwrap.indent("\n\n".join(paragraphs), "    ").lstrip()


def _source(path: pathlib.Path) -> str:
    source = textwrap.indent(f"```python\n{path.read_text().strip()}\n```", "    ")
    name = f"`examples/{path.name}`"
    return f'### {name} {{ #{path.stem} }}\n\n??? example "{name}"\n\n{source}'


def _docstring(path: pathlib.Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise ValueError(f"{path} has no docstring, which the gallery would show.")
    return text


def _methods(*, implicit: bool) -> list[type]:
    """The solver classes for ODEs, by order."""
    found = [x for x in vars(ensembleode.solvers).values() if isinstance(x, type)]
    methods = [
        x for x in found if issubclass(x, ODESolver) and isinstance(getattr(x, "order", None), int)
    ]
    chosen = [x for x in methods if x.implicit == implicit and x not in _stochastic_methods()]
    return sorted(chosen, key=lambda x: (x.order, x.__name__))


def _stochastic_methods() -> list[type]:
    """The classes of methods for noise, by strong order, and that for reactions."""
    found = [x for x in vars(ensembleode.solvers).values() if isinstance(x, type)]
    methods = [x for x in found if issubclass(x, SDESolver) and x is not SDESolver]
    return [*sorted(methods, key=lambda x: (x.order, x.__name__)), ensembleode.Direct]


def capabilities() -> str:
    """A table of features by engines."""
    shown = [x for x in FEATURES if x not in SAID_ELSEWHERE]
    rows = [f"| | {' | '.join(ENGINES)} |", f"|---|{'---|' * len(ENGINES)}"]
    rows += [f"| {' | '.join([x, *(cell(x, y) for y in ENGINES)])} |" for x in shown]
    return "\n".join(rows)


# Rows that would say nothing: which solvers an engine has is in the table of solvers, where it runs
# in that of ensemble algorithms.
SAID_ELSEWHERE = {"every solver", "arrays on an accelerator", "steps shared by all", "fixed steps"}


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
    engines = ", ".join(ensembleode.ExplicitRK.engines)
    rows.append(f"| {own} | {of_tableau} | {engines} | An explicit method of your own. |")
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
