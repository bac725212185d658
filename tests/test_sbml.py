"""Models in SBML: what is read of them, and what is refused by name."""

import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ensembleode as eo
from ensembleode.problem.sbml_formulas import formula_of, OPERATIONS, Quantities


libsbml = pytest.importorskip("libsbml")

SPAN = (0.0, 2.0)


def math_of(formula):
    """The MathML of a formula in infix."""
    tree = libsbml.parseL3Formula(formula)
    assert tree is not None, libsbml.getLastParseL3Error()
    return libsbml.writeMathMLToString(tree).split("\n", 1)[1]


def species(name, amount=None, *, of="cell", amounts=True, fixed=False, more=""):
    start = "" if amount is None else f'initialAmount="{amount}"'
    return (
        f'<species id="{name}" compartment="{of}" {start} constant="false" {more} '
        f'hasOnlySubstanceUnits="{str(amounts).lower()}" boundaryCondition="{str(fixed).lower()}"/>'
    )


def reaction(name, law, takes=(), makes=(), *, both_ways=False, local=()):
    """`takes`, `makes`: names of species, or with their stoichiometry."""

    def side(kind, parts):
        parts = [x if isinstance(x, tuple) else (x, 1) for x in parts]
        every = "".join(
            f'<speciesReference species="{x}" stoichiometry="{n}" constant="true"/>'
            for x, n in parts
        )
        return f"<listOf{kind}>{every}</listOf{kind}>" if parts else ""

    values = "".join(f'<localParameter id="{k}" value="{v}"/>' for k, v in dict(local).items())
    values = f"<listOfLocalParameters>{values}</listOfLocalParameters>" if values else ""
    law = f"<kineticLaw>{math_of(law)}{values}</kineticLaw>" if law else ""
    return (
        f'<reaction id="{name}" reversible="{str(both_ways).lower()}" fast="false">'
        f"{side('Reactants', takes)}{side('Products', makes)}{law}</reaction>"
    )


def model(*reactions, species=(), sizes=None, parameters=None, rules=(), assigned=(), **more):
    """The text of a model. `rules`, `assigned`: pairs of a name and a formula; `more`: further
    parts, as their text."""
    sizes, parameters = sizes or {"cell": 1.0}, parameters or {}
    rules = [f'<assignmentRule variable="{x}">{math_of(y)}</assignmentRule>' for x, y in rules]
    assigned = [
        f'<initialAssignment symbol="{x}">{math_of(y)}</initialAssignment>' for x, y in assigned
    ]
    free = {x for x in parameters if any(f'variable="{x}"' in rule for rule in rules)}
    parts = {
        "FunctionDefinitions": more.get("functions", ()),
        "Compartments": [
            f'<compartment id="{x}" size="{y}" spatialDimensions="3" constant="true"/>'
            for x, y in sizes.items()
        ],
        "Species": species,
        "Parameters": [
            f'<parameter id="{x}" value="{y}" constant="{str(x not in free).lower()}"/>'
            for x, y in parameters.items()
        ],
        "InitialAssignments": assigned,
        "Rules": [*rules, *more.get("rules_as_they_are", ())],
        "Reactions": reactions,
        "Events": more.get("events", ()),
    }
    lists = "".join(f"<listOf{x}>{''.join(y)}</listOf{x}>" for x, y in parts.items() if y)
    return (
        '<sbml xmlns="http://www.sbml.org/sbml/level3/version1/core" level="3" version="1">'
        f"<model id='whole' >{lists}</model></sbml>"
    )


def slopes(prob, u):
    return jax.tree.map(float, prob.f(jax.tree.map(jnp.asarray, u), prob.p, 0.0))


def test_decay_by_amounts_and_by_concentrations():
    text = model(
        reaction("by_amount", "k * A", ["A"]),
        reaction("by_concentration", "k * B * cell", ["B"]),
        species=[species("A", 100), species("B", 40, amounts=False)],
        sizes={"cell": 4.0},
        parameters={"k": 0.5},
    )
    prob = eo.JumpProblem.of_sbml(text, SPAN)
    assert jax.tree.map(float, prob.u0) == {"A": 100.0, "B": 40.0}
    assert jax.tree.map(float, prob.p) == {"cell": 4.0, "k": 0.5}
    sol = eo.solve(prob.ode(), saveat=0.5, abstol=1e-10, reltol=1e-10)
    for name, start in (("A", 100.0), ("B", 40.0)):
        np.testing.assert_allclose(sol.u[name], start * np.exp(-0.5 * sol.t), rtol=1e-8)

    def end(k):
        changed = eo.remake(prob.ode(), p={**prob.p, "k": k})
        return eo.solve(changed, abstol=1e-10, reltol=1e-10).u["A"][-1]

    np.testing.assert_allclose(jax.grad(end)(0.5), -2 * 100 * math.exp(-1), rtol=1e-7)


def test_dimerisation_is_that_of_a_list_of_reactions():
    text = model(
        reaction("join", "k1 * A * (A - 1) / 2", [("A", 2)], ["B"]),
        reaction("part", "k2 * B", ["B"], [("A", 2)]),
        species=[species("A", 40), species("B", 0)],
        parameters={"k1": 0.5, "k2": 0.25},
    )
    read = eo.EnsembleProblem(eo.JumpProblem.of_sbml(text, SPAN))
    listed = eo.EnsembleProblem(
        eo.JumpProblem.of_reactions(
            [[2, 0], [0, 1]], [[0, 1], [2, 0]], [40.0, 0.0], SPAN, [0.5, 0.25]
        )
    )
    found, expected = (eo.solve(x, trajectories=200, saveat=0.1).u for x in (read, listed))
    np.testing.assert_array_equal(np.stack([found["A"], found["B"]], -1), expected)


LAWS = ["f * A - b * B", "cell * (f * A - b * B)", "-(b * B - f * A)", "(f * A - b * B) / cell"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("law", LAWS)
def test_both_directions_of_a_reversible_reaction(law):
    """As of independent molecules, each of which goes from A to B and back."""
    text = model(
        reaction("turn", law, ["A"], ["B"], both_ways=True),
        species=[species("A", 50), species("B", 0)],
        parameters={"f": 1.0, "b": 0.5},
    )
    prob = eo.JumpProblem.of_sbml(text, SPAN)
    assert prob.changes["A"].tolist() == [-1.0, 1.0]
    sim = eo.solve(eo.EnsembleProblem(prob), trajectories=4000)
    stays = (0.5 + math.exp(-1.5 * 2)) / 1.5
    np.testing.assert_allclose(sim.u["A"][:, -1].mean(), 50 * stays, rtol=0.02)
    np.testing.assert_allclose(sim.u["A"][:, -1].var(), 50 * stays * (1 - stays), rtol=0.1)
    mean = eo.solve(prob.ode(), abstol=1e-9, reltol=1e-9).u["A"][-1]
    np.testing.assert_allclose(mean, 50 * stays, rtol=1e-7)


FUNCTION = (
    f'<functionDefinition id="half">{math_of("lambda(s, m, s / (m + s))")}</functionDefinition>'
)


def test_all_that_is_read():
    """The slopes of a model with all of it, by hand."""
    text = model(
        reaction("first", "v * half(A, m) * boost", ["A"], [("B", 2)], local={"v": 3.0}),
        reaction("second", "v * B / cell * first", ["B", "fuel"], ["out"], local={"v": 0.5}),
        species=[
            species("A", amounts=False),
            species("B", 4, more='conversionFactor="scale"'),
            species("fuel", 7, fixed=True),
            species("out", 0, of="medium", amounts=False),
        ],
        sizes={"cell": 2.0, "medium": 10.0},
        parameters={"m": 1.5, "boost": 0.0, "scale": 100.0, "from_m": 0.0},
        rules=[("boost", "1 + out + from_m * 0.1")],
        assigned=[("from_m", "2 * m"), ("A", "from_m + 1")],
        functions=[FUNCTION],
    )
    prob = eo.JumpProblem.of_sbml(text, SPAN)
    start = {"A": 8.0, "B": 4.0, "fuel": 7.0, "out": 0.0}
    assert jax.tree.map(float, prob.u0) == start
    p = {"cell": 2.0, "medium": 10.0, "m": 1.5, "from_m": 3.0}  # (Not what only `changes` have.)
    assert jax.tree.map(float, prob.p) == {**p, "first_v": 3.0, "second_v": 0.5}
    for a, b, out in ((8.0, 4.0, 0.0), (1.0, 0.3, 5.0)):
        found = slopes(prob, {"A": a, "B": b, "fuel": 7.0, "out": out})
        boost = 1 + out / 10 + 0.3
        first = 3 * (a / 2) / (1.5 + a / 2) * boost
        second = 0.5 * b / 2 * first
        expected = {"A": -first, "B": 100 * (2 * first - second), "fuel": 0.0, "out": second}
        assert found == pytest.approx(expected, rel=1e-12)


X, Y = 0.7, 2.5
FORMULAS = {
    "x + y + 1": X + Y + 1,
    "plus()": 0.0,
    "x - y": X - Y,
    "-x": -X,
    "x * y * 2": X * Y * 2,
    "x / y": X / Y,
    "x ^ 3": X**3,
    "pow(x, y)": X**Y,
    "sqrt(x)": math.sqrt(X),
    "root(3, y)": Y ** (1 / 3),
    "abs(-x)": X,
    "exp(x)": math.exp(X),
    "ln(x)": math.log(X),
    "log10(y)": math.log10(Y),
    "log(2, y)": math.log2(Y),
    "ceil(y)": 3.0,
    "floor(-y)": -3.0,
    "factorial(4)": 24.0,
    "factorial(y - 0.5)": 2.0,
    "factorial(y)": math.gamma(Y + 1),
    "max(x, y, 1)": Y,
    "min(x, y, 1)": X,
    "quotient(-y, x)": -3.0,
    "rem(y, x)": math.fmod(Y, X),
    "2 / 3": 2 / 3,
    "1e-3 * 1.5e2": 0.15,
    "pi * exponentiale": math.pi * math.e,
    "avogadro / 1e23": 6.02214179,
    "piecewise(1, x > y, 2, y > x, 3)": 2.0,
    "piecewise(1, x > y)": math.nan,
    "piecewise(1, x < 1 < y, 0)": 1.0,
    "piecewise(1, x >= 0.7 && y <= 2.5, 0)": 1.0,
    "piecewise(1, x == y || x != y, 0)": 1.0,
    "piecewise(1, xor(true, x > 0), 0)": 0.0,
    "piecewise(1, !(x > y), 0)": 1.0,
    "piecewise(1, implies(x > 0, y < 0), 0)": 0.0,
    "sin(x) + cos(x) + tan(x)": math.sin(X) + math.cos(X) + math.tan(X),
    "sinh(x) + cosh(x) + tanh(x)": math.sinh(X) + math.cosh(X) + math.tanh(X),
    "asin(x) + acos(x) + atan(x)": math.asin(X) + math.acos(X) + math.atan(X),
    "arcsinh(x) + arccosh(y) + arctanh(x)": math.asinh(X) + math.acosh(Y) + math.atanh(X),
    "sec(x) + csc(x) + cot(x)": 1 / math.cos(X) + 1 / math.sin(X) + 1 / math.tan(X),
    "sech(x) + csch(x) + coth(x)": 1 / math.cosh(X) + 1 / math.sinh(X) + 1 / math.tanh(X),
    "arcsec(y) + arccsc(y) + arccot(y)": math.acos(1 / Y) + math.asin(1 / Y) + math.atan(1 / Y),
    "arcsech(x) + arccsch(y) + arccoth(y)": (
        math.acosh(1 / X) + math.asinh(1 / Y) + math.atanh(1 / Y)
    ),
}  # fmt: skip


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("traced", [False, True])
def test_formulas(formula, traced):
    tree = formula_of(libsbml.parseL3Formula(formula))

    def value(x, y):
        return Quantities({"x": x, "y": y}, {}, {}, 0.0).of_formula(tree)

    found = jax.jit(value)(X, Y) if traced else value(X, Y)
    np.testing.assert_allclose(found, FORMULAS[formula], rtol=1e-12)


def test_every_operation_is_tested():
    def names(tree):
        return (
            {tree[0], *(x for y in tree[1:] for x in names(y))}
            if isinstance(tree, tuple)
            else set()
        )

    used = set().union(*(names(formula_of(libsbml.parseL3Formula(x))) for x in FORMULAS))
    assert OPERATIONS.keys() <= used


LEVEL_1 = """<sbml xmlns="http://www.sbml.org/sbml/level1" level="1" version="2"><model name="m">
<listOfUnitDefinitions><unitDefinition name="minute"><listOfUnits>
<unit kind="second"/></listOfUnits></unitDefinition></listOfUnitDefinitions>
<listOfCompartments><compartment name="cell" volume="2"/></listOfCompartments>
<listOfSpecies><species name="A" compartment="cell" initialAmount="6"/></listOfSpecies>
<listOfParameters><parameter name="k" value="0.5"/></listOfParameters>
<listOfReactions><reaction name="r" reversible="false"><listOfReactants>
<speciesReference species="A" stoichiometry="{}" denominator="{}"/></listOfReactants>
<kineticLaw formula="k * A * cell" {}/></reaction></listOfReactions></model></sbml>"""
LEVEL_2 = """<sbml xmlns="http://www.sbml.org/sbml/level2/version4" level="2" version="4"><model>
<listOfCompartments><compartment id="cell" size="2"/></listOfCompartments>
<listOfSpecies><species id="A" compartment="cell" initialAmount="6"/></listOfSpecies>
<listOfParameters><parameter id="k" value="0.5" constant="false"/></listOfParameters>
<listOfReactions><reaction id="r"><listOfReactants>
<speciesReference species="A">{}</speciesReference></listOfReactants>
<kineticLaw>{}</kineticLaw></reaction></listOfReactions></model></sbml>"""


def test_fractions_of_level_1():
    prob = eo.JumpProblem.of_sbml(LEVEL_1.format(2, 3, ""), SPAN)
    assert slopes(prob, {"A": 6.0}) == pytest.approx({"A": -2 / 3 * 0.5 * 6})


def test_defaults_of_level_2():
    """Concentrations of a compartment with volume; reactions that are reversible, unless they say
    otherwise, and of which a law with a minus is no two directions."""
    law = math_of("k * A * (1 + cell - A)")
    prob = eo.JumpProblem.of_sbml(LEVEL_2.format("", law), SPAN)
    assert prob.changes["A"].tolist() == [-1.0]
    assert slopes(prob, {"A": 4.0}) == pytest.approx({"A": -0.5 * 2 * (3 - 2)})


def test_a_compartment_that_does_not_say_its_dimensions_has_a_volume():
    text = model(
        reaction("r", "k * A", ["A"]),
        species=[species("A", 3, amounts=False)],
        sizes={"cell": 2.0},
        parameters={"k": 2.0},
    ).replace('spatialDimensions="3"', "")
    assert slopes(eo.JumpProblem.of_sbml(text, SPAN), {"A": 3.0}) == {"A": -3.0}


def test_a_law_that_divides_by_what_is_zero_at_the_start():
    text = model(
        reaction("r", "piecewise(k * A / B, B > 0, sqrt(A - 4) * 0 + k)", ["A"], ["B"]),
        species=[species("A", 10), species("B", 0)],
        parameters={"k": 2.0},
        assigned=[("k", "piecewise(1 / 0, 1 < 0, 2)")],
    )
    prob = eo.JumpProblem.of_sbml(text, SPAN)
    assert slopes(prob, {"A": 10.0, "B": 0.0}) == {"A": -2.0, "B": 2.0}
    assert slopes(prob, {"A": 10.0, "B": 4.0}) == {"A": -5.0, "B": 5.0}

    def slope(b):
        return prob.f({"A": jnp.array(3.0), "B": b}, prob.p, 0.0)["B"]

    # (The value that isn't taken has no derivative.)
    np.testing.assert_allclose(jax.grad(slope)(jnp.array(2.0)), -2.0 * 3 / 4)


EVENT = (
    '<event id="e" useValuesFromTriggerTime="true"><trigger initialValue="true" '
    f'persistent="true">{math_of("A > 1")}</trigger></event>'
)
A_DECAYS = {"species": [species("A", 10)], "parameters": {"k": 1.0}}
REFUSED = {
    r"events \(1\)": model(reaction("r", "k * A", ["A"]), events=[EVENT], **A_DECAYS),
    r"rate rules \(1\)": model(
        reaction("r", "k * A", ["A"]),
        rules_as_they_are=[f'<rateRule variable="k">{math_of("A")}</rateRule>'],
        **A_DECAYS,
    ).replace('id="k" value="1.0" constant="true"', 'id="k" value="1.0" constant="false"'),
    r"algebraic rules \(1\)": model(
        reaction("r", "k * A", ["A"]),
        rules_as_they_are=[f"<algebraicRule>{math_of('A - k')}</algebraicRule>"],
        **A_DECAYS,
    ).replace('id="k" value="1.0" constant="true"', 'id="k" value="1.0" constant="false"'),
    r"fast reactions \(1\)": model(
        reaction("r", "k * A", ["A"]).replace('fast="false"', 'fast="true"'), **A_DECAYS
    ),
    "'delay'": model(reaction("r", "delay(A, 1)", ["A"]), **A_DECAYS),
    "r has no kinetic law": model(reaction("r", None, ["A"]), **A_DECAYS),
    "no reactions": model(**A_DECAYS),
    "no value at the start for A": model(reaction("r", "A", ["A"]), species=[species("A")]),
    "circular dependencies": model(
        reaction("r", "k * a", ["A"]),
        species=[species("A", 10)],
        parameters={"k": 1.0, "a": 0.0, "b": 0.0},
        rules=[("a", "b + 1"), ("b", "a + 1")],
    ),
    "can't be read": "<sbml>",
    "no species": model(
        reaction("r", "k", ["A"]),
        species=[species("A", fixed=True)],
        parameters={"k": 1.0},
        rules=[("A", "2 * k")],
    ),
    "must be the identifier of an existing": model(reaction("r", "k * B", ["B"]), **A_DECAYS),
    r"stoichiometry that a formula decides \(of A\)": LEVEL_2.format(
        f"<stoichiometryMath>{math_of('k')}</stoichiometryMath>", math_of("k * A")
    ),
    r"laws with their own units \(1\)": LEVEL_1.format(1, 1, 'timeUnits="minute"'),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_is_named(what):
    with pytest.raises(ValueError, match=what):
        eo.JumpProblem.of_sbml(REFUSED[what], SPAN)


def test_a_file_that_is_pickled_and_read_again(tmp_path):
    path = tmp_path / "model.xml"
    with pytest.raises(FileNotFoundError, match=r"model\.xml"):
        eo.JumpProblem.of_sbml(path, SPAN)
    text = model(reaction("r", "k * A", ["A"]), **A_DECAYS)
    path.write_text(f'<?xml version="1.0" encoding="UTF-8"?>{text}')
    first, second = (eo.JumpProblem.of_sbml(x, SPAN) for x in (path, str(path)))
    copied = pickle.loads(pickle.dumps(first))
    assert first.rates == second.rates == copied.rates
    expected, *others = (
        eo.solve(eo.EnsembleProblem(x), trajectories=20, saveat=0.5).u["A"]
        for x in (first, second, copied)
    )
    for found in others:
        np.testing.assert_array_equal(found, expected)


def test_rates_that_read_the_time_are_those_of_the_rate_equations_alone():
    prob = eo.JumpProblem.of_sbml(model(reaction("r", "k * A * time", ["A"]), **A_DECAYS), SPAN)
    end = eo.solve(prob.ode(), abstol=1e-10, reltol=1e-10).u["A"][-1]
    np.testing.assert_allclose(end, 10 * math.exp(-2.0), rtol=1e-8)
    with pytest.raises(ValueError, match="depend on the time t"):
        eo.solve(prob)


def test_submodels_are_put_in_their_place():
    comp = "http://www.sbml.org/sbml/level3/version1/comp/version1"
    whole = model(reaction("r", "k * A", ["A"]), **A_DECAYS)
    inner = whole[whole.index("<model") : whole.index("</sbml>")]
    inner = inner.replace("<model id='whole' ", "<comp:modelDefinition id='part' ")
    inner = inner.replace("</model>", "</comp:modelDefinition>")
    text = (
        f'<sbml xmlns="http://www.sbml.org/sbml/level3/version1/core" xmlns:comp="{comp}" '
        'comp:required="true" level="3" version="1"><model id="m"><comp:listOfSubmodels>'
        '<comp:submodel comp:id="one" comp:modelRef="part"/>'
        '<comp:submodel comp:id="two" comp:modelRef="part"/></comp:listOfSubmodels></model>'
        f"<comp:listOfModelDefinitions>{inner}</comp:listOfModelDefinitions></sbml>"
    )
    prob = eo.JumpProblem.of_sbml(text, SPAN)
    assert jax.tree.map(float, prob.u0) == {"one__A": 10.0, "two__A": 10.0}
    assert jnp.shape(prob.changes["one__A"]) == (2,)


def test_without_libsbml(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "libsbml", None)
    with pytest.raises(ImportError, match=r"pip install .*\[sbml\]"):
        eo.JumpProblem.of_sbml(REFUSED["no reactions"], SPAN)
