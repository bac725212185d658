"""Programs staged from a field: arrays that it closes over stay separate from the state."""

import jax
import jax.numpy as jnp
import numpy as np

from ensembleode.fields import Inputs, lower, staged
from ensembleode.tracing.program import trace

from .python_printer import run


def test_constants_stay_constants():
    scale = jnp.array([2.0, 3.0, 5.0])
    program, consts = trace(lambda u, p, t: scale * u**2 * p, np.zeros(3), 0.0, 0.0)
    assert len(consts) == 1

    def transposed(consts, cotangent, p, t):
        p, u = p
        return jax.vjp(lambda u: program(consts, u, (p,), t), u)[1](cotangent)[0]

    struct = jax.ShapeDtypeStruct((3,), np.float64)
    jaxpr = staged(program, transposed, state=struct, extra=[struct])
    assert [v.aval.shape for v in jaxpr.constvars] == [(3,)]
    assert [v.aval.shape for v in jaxpr.invars] == [(3,), (), (3,), ()]
    inputs = Inputs((("shared", 0), ("own", 0), ("forward", 0)), np.dtype(float))
    u, cotangent = np.array([1.0, -2.0, 0.5]), np.array([1.0, 10.0, 100.0])
    got = run(lower(jaxpr, inputs), cotangent, np.array([7.0]), np.asarray(scale), u)
    np.testing.assert_allclose(got, 2 * u * 7 * np.asarray(scale) * cotangent)


def test_a_group_for_each_dtype():
    avals = [np.zeros(2), np.zeros(3, np.int32), np.zeros(()), np.zeros(4, np.int32)]
    inputs = Inputs.laid_out(avals, ["own", "own", "own", "shared"])
    assert inputs.places == (("own", 0), ("own", 0), ("own", 2), ("shared", 0))
    assert inputs.storage is None
