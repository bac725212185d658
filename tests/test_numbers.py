"""The table of a trajectory's numbers: a row that is added to it has an effect everywhere."""

import subprocess
import sys
import textwrap

import pytest


# Three rows that no module knows: a bound of steps, a table of times, and what a function `g` of
# the problem closes over. (In a process of its own, as modules read the table once.)
_ADDED = """
    import sys

    import numpy as np

    from ensembleode import numbers

    assert "ensembleode.core.lane" not in sys.modules
    numbers.NUMBERS += [
        numbers.Row(
            "dtmax2", "dtmax2", "bound", None, numbers._check_bound, aliases="widest_step"
        ),
        numbers.Row("stops", "stops", "table"),
        numbers.Row("consts_of_g", "g", "constants"),
    ]

    import jax
    import jax.numpy as jnp
    import pytest

    import ensembleode as eo
    from ensembleode.core.fingerprint import fingerprint
    from ensembleode.engines.compiled.numbers import layout_of, operands_of
    from ensembleode.engines.julia.numbers import read_arrays
    from ensembleode.engines.julia.solving import field_of
    from ensembleode.engines.job import job_for

    def f(u, p, t):
        return -p * u

    def varied(prob, ctx):
        def g(u, p, t):
            return {"noise": jnp.sin(ctx.index * u) * p}

        return eo.remake(
            prob, dtmax2=0.5 / (1 + ctx.index), stops=ctx.index + jnp.array([0.1, 0.2]), g=g
        )

    def job(engine="compiled", prob_func=varied, **options):
        prob = eo.ODEProblem(f, jnp.ones(3, jnp.float32), (0.0, 1.0), 0.5, **options)
        ens = eo.EnsembleProblem(prob, prob_func)
        return job_for(ens, {}, jax.random.key(0), 4, engine, eo.Tsit5())[0]

    def lanes_of(job):
        return jax.tree.map(jnp.asarray, job.trajectories.lanes(np.arange(4), 1))
"""


def in_process_with_rows(source):
    program = textwrap.dedent(_ADDED) + textwrap.dedent(source)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_rows_that_are_added_travel():
    in_process_with_rows(
        """
        # From the options of each trajectory to its numbers,
        plan = job().plan
        assert (plan.batched.dtmax2, plan.batched.stops) == (True, True)
        assert plan.batched.consts_of_g[0] is True and not any(plan.batched.parameters)
        (name, g), = plan.beside
        assert name == "g" and len(plan.batched.consts_of_g) == len(g.jaxpr.constvars)
        (noise,) = jax.tree.leaves(jax.tree.unflatten(g.out_tree, g.out_avals))
        assert noise.shape == (3,)
        lanes = lanes_of(job())
        np.testing.assert_allclose(lanes.dtmax2, 0.5 / np.arange(1, 5), rtol=1e-6)
        assert lanes.stops.shape == (4, 2) and lanes.stops.dtype == jnp.float32

        # the operands of kernels,
        layout, operands = layout_of(plan, lanes), operands_of(plan, lanes, on_gpu=False)
        bound, stops = (layout.numbers[layout.find(x)] for x in ("dtmax2", "stops"))
        assert bound.is_own and (bound.size, stops.size) == (1, 2)
        assert operands[layout.find("stops")].shape == (4, 2)
        of_f, of_g = layout.inputs.places, layout.inputs_of("g").places
        assert len(of_g) == len(plan.batched.consts_of_g) + 1
        assert of_g[-1] == of_f[-1] and not {*of_g[:-1]} & {*of_f}

        # and a request to Julia.
        plan, lanes = job("julia").plan, jax.tree.map(np.asarray, lanes_of(job("julia")))
        arrays = read_arrays(plan, field_of(plan), lanes, 4)
        assert (arrays["dtmax2"].shape, arrays["stops"].shape) == ((4,), (4, 2))

        # Nothing that has no use for them minds.
        for engine in ("compiled", "diffrax"):
            ens = eo.EnsembleProblem(eo.ODEProblem(f, jnp.ones(3), (0.0, 1.0), 0.5), varied)
            sim = eo.solve(ens, trajectories=4, engine=engine, abstol=1e-8, reltol=1e-8)
            np.testing.assert_allclose(sim.u[:, -1], np.exp(-0.5), rtol=1e-5)
        """
    )


def test_rows_that_are_added_are_checked_and_told_apart():
    in_process_with_rows(
        """
        for given, error in ((-1.0, ValueError), ("wide", TypeError)):
            with pytest.raises(error, match="dtmax2 must be a positive, finite step size"):
                job(prob_func=None, dtmax2=given)
        with pytest.raises(TypeError, match="it is called dtmax2"):
            job(widest_step=0.1)
        with pytest.raises(ValueError, match="dtmax2 is given with a fixed step"):
            job(adaptive=False, dt=0.1)
        ens = eo.EnsembleProblem(eo.ODEProblem(f, jnp.ones(3), (0.0, 1.0), 0.5), varied)
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
    )
