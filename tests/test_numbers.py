"""The table of a trajectory's numbers: a row that is added to it has an effect everywhere."""

import subprocess
import sys
import textwrap

import pytest


# Three rows that no module knows: a bound of steps, a table of times, and what a function `g` of
# the problem closes over. (In a process of its own, as modules read the table once.)
_PROGRAM = """
    import sys

    import numpy as np

    from ensembleode.problem import number_table as numbers

    assert "ensembleode.plan.trajectory_numbers" not in sys.modules
    numbers.NUMBERS += [
        numbers.NumberRow(
            "dtmax2", "dtmax2", "bound", None, numbers._check_bound, aliases="widest_step"
        ),
        numbers.NumberRow("stops", "stops", "table"),
        numbers.NumberRow("consts_of_g", "g", "constants"),
    ]

    import jax
    import jax.numpy as jnp
    import pytest

    import ensembleode as eo
    from ensembleode.running.fingerprint import fingerprint
    from ensembleode.engines.job import job_for

    def f(u, p, t):
        return -p * u

    def varied(prob, ctx):
        def g(u, p, t):
            return {"noise": jnp.sin(ctx.index * u) * p}

        return eo.remake(
            prob, dtmax2=0.5 / (1 + ctx.index), stops=ctx.index + jnp.array([0.1, 0.2]), g=g
        )

    def job(prob_func=varied, **options):
        prob = eo.ODEProblem(f, jnp.ones(3, jnp.float32), (0.0, 1.0), 0.5, **options)
        ens = eo.EnsembleProblem(prob, prob_func)
        return job_for(ens, {}, jax.random.key(0), 4, "compiled", eo.Tsit5())[0]

    for given, error in ((-1.0, ValueError), ("wide", TypeError)):
        with pytest.raises(error, match="dtmax2 must be a positive, finite step size"):
            job(prob_func=None, dtmax2=given)
    with pytest.raises(TypeError, match="it is called dtmax2"):
        job(widest_step=0.1)
    with pytest.raises(ValueError, match="dtmax2 is given with a fixed step"):
        job(adaptive=False, dt=0.1)
    ens = eo.EnsembleProblem(eo.ODEProblem(f, jnp.ones(3), (0.0, 1.0), 0.5), varied)
    for engine in ("compiled", "diffrax"):  # which have no use for them
        sim = eo.solve(ens, trajectories=4, engine=engine, abstol=1e-6, reltol=1e-6)
        np.testing.assert_allclose(sim.u[:, -1], np.exp(-0.5), rtol=1e-5)
    with pytest.raises(ValueError, match="so dtmax2 must be the same for all"):
        eo.solve(ens, eo.Tsit5(), eo.EnsembleColumns(), trajectories=4)

    def digests(**options):
        return fingerprint(job(prob_func=None, **options))

    def differing(**options):
        a, b = digests(), digests(**options)
        return {name for name in {*a, *b} if a.get(name) != b.get(name)}

    assert differing(dtmax2=0.1) == {"#dtmax2", "#which of them prob_func changes"}
    assert "#stops" in differing(stops=jnp.array([0.1]))
    assert "#g" in differing(g=lambda u, p, t: jnp.sin(u))
"""


@pytest.mark.slow
def test_rows_that_are_added_are_checked_and_told_apart():
    program = textwrap.dedent(_PROGRAM)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
