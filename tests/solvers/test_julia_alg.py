"""Methods of Julia by name: the text is parsed, and never run."""

import pytest

import ensembleode as eo
from ensembleode.solvers.julia_alg import Val


def test_methods_and_their_arguments():
    alg = eo.JuliaAlg("AutoTsit5(Rosenbrock23())")
    assert alg.description == (
        "AutoTsit5",
        "OrdinaryDiffEqTsit5",
        (("Rosenbrock23", "OrdinaryDiffEqRosenbrock", (), ()),),
        (),
    )
    assert eo.JuliaAlg("Rodas5P") == eo.JuliaAlg("Rodas5P") != eo.JuliaAlg("Rodas4P")
    alg = eo.JuliaAlg("QNDF(kappa=(-0.2, 1, 0), max_order=Val(3), stald_rrcut=0.1)")
    name, package, arguments, options = alg.description
    assert (name, package, arguments) == ("QNDF", "OrdinaryDiffEqBDF", ())
    assert options == (("kappa", (-0.2, 1, 0)), ("max_order", Val(3)), ("stald_rrcut", 0.1))
    assert eo.JuliaAlg("Vern7(lazy=false)").description[-1] == (("lazy", False),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run(`rm`)", "takes one method as it is called"),
        ("Tsit6()", "knows no method 'Tsit6'"),
        ("Base.exit()", "knows no method 'Base.exit'"),
        ("Tsit5(); exit()", "takes one method"),
        ("Tsit5(eval('1'))", "knows no method 'eval'"),
        ("Tsit5(x)", "can't take 'x' as an argument"),
        ("Tsit5('text')", "can't take"),
        ("Tsit5(**x)", "is no option"),
        ("Tsit5(('text', 1))", "can't take"),
        ("Tsit5(())", "can't take"),
        ("Tsit5(Val('text'))", "can't take"),
        ("Tsit5(Val(Val(1)))", "knows no method 'Val'"),
        ("Tsit5(", "takes one method"),
        ("", "takes one method"),
    ],
)
def test_nothing_else_is_let_through(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("*", r"\*")):
        eo.JuliaAlg(text)


def test_it_runs_on_julia_only():
    prob = eo.ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
    with pytest.raises(ValueError, match="can't run JuliaAlg: it runs on julia"):
        eo.solve(prob, eo.JuliaAlg("Tsit5"), engine="compiled")
