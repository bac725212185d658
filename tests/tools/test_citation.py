"""The works to cite for a solve."""

import re

import diffrax
import jax.numpy as jnp
import pytest

import ensembleode as eo
from ensembleode.solvers import base
from ensembleode.solvers.auto import AutoSwitch

from ..marks import slow_unless


PROB = eo.ODEProblem(lambda u, p, t: -u, jnp.ones(2), (0.0, 1.0))
NOISY = eo.SDEProblem(PROB.f, lambda u, p, t: jnp.full_like(u, 0.1), PROB.u0, PROB.tspan)
REACTIONS = eo.JumpProblem(lambda u, p, t: u, [[-1, 0], [0, -1]], [1, 1], PROB.tspan)


def keys(text):
    return re.findall(r"^@\w+{(\w+),$", text, re.MULTILINE)


def everywhere(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from everywhere(sub)


# Of a method of Julia: tests/engines/julia/test_solves.py. (Of a user's tableau, or of their own
# stochastic method, it is theirs.)
SOLVERS = [
    cls
    for cls in everywhere(base.ODESolver)
    if getattr(eo, cls.__name__, None) is cls
    and cls not in (eo.JuliaAlg, eo.ExplicitRK, eo.SDESolver)
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "solver",
    [slow_unless(cls in (eo.Tsit5, eo.Vern9, eo.RK4, eo.KenCarp4), cls) for cls in SOLVERS],
    ids=lambda cls: cls.__name__,
)
def test_every_solver_has_its_source(solver):
    if issubclass(solver, AutoSwitch):
        text = eo.citation(eo.solve(PROB, solver(eo.Rodas5P())))
        assert f"% The solver {solver.__name__}(Rodas5P)\n" in text
        assert {*solver.references, "steinebach2023"} < set(keys(text))
    else:
        noisy = NOISY if issubclass(solver, eo.SDESolver) else PROB
        prob = REACTIONS if solver is eo.Direct else noisy
        text = eo.citation(eo.solve(prob, solver(), dt=0.25, adaptive=False))
        assert f"% The solver {solver.__name__}\n" in text
    assert "no reference is on record" not in text
    assert {"ensembleode", "jax", "rackauckas2017"} < set(keys(text))
    assert len(keys(text)) == len(set(keys(text)))


@pytest.mark.slow
def test_the_engine_and_the_adjoint():
    ens = eo.EnsembleProblem(PROB)
    sim = eo.solve(ens, trajectories=2)
    assert keys(eo.citation(sim))[3:] == [
        "tsitouras2011",
        "hairer1993",
        "gustafsson1991",
        "hager2000",
        "stumm2010",
    ]
    assert eo.citation(sim[0]) == eo.citation(sim)
    backsolve = eo.solve(ens, trajectories=2, engine="diffrax", sensealg=eo.BacksolveAdjoint())
    assert keys(eo.citation(backsolve))[3:] == ["tsitouras2011", "kidger2021", "chen2018"]
    gauss = eo.solve(PROB, eo.Vern7(), sensealg=eo.GaussAdjoint())
    assert keys(eo.citation(gauss))[3:] == [
        "verner2010",
        "hairer1993",
        "gustafsson1991",
        "chen2018",
        "norcliffe2023",
    ]


@pytest.mark.slow
def test_a_solver_of_diffrax_that_is_not_ours():
    sol = eo.solve(PROB, diffrax.ReversibleHeun(), dt=0.25, adaptive=False)
    assert "% The solver ReversibleHeun: no reference is on record here" in eo.citation(sol)


@pytest.mark.slow
def test_it_is_bibtex():
    text = eo.citation(eo.solve(PROB, eo.Kvaerno5()))
    entries = text.split("\n@")[1:]
    assert len(entries) == len(keys(text))
    for entry in entries:
        assert entry.count("{") == entry.count("}")
        for field in ("author", "title", "year"):
            assert re.search(rf"^  {field} = {{.+}},$", entry, re.MULTILINE)


def test_errors():
    with pytest.raises(TypeError, match="got ODEProblem"):
        eo.citation(PROB)
