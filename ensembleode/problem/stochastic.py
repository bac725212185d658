"""Problems with noise, and the noise that they may be given."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from ..ground.state_tree import with_real_numbers
from ..tracing.program import is_tracer
from .problem import ODEProblem
from .unknown_options import refuse_unknown


class WienerProcess(eqx.Module):
    """The noise of an [`SDEProblem`][ensembleode.SDEProblem]: a Wiener process of standard
    components.

    **Arguments:**

    - `scalar`: whether one component drives all components of the state.
    - `factor`: a matrix `[m, m]`, by which the increments of the `m` independent components are
        multiplied: with `factor @ factor.T` as the matrix of their correlations, the components of
        the noise are correlated (`jnp.linalg.cholesky` finds a factor). It may be traced, and be
        another one for each trajectory.

    **Raises:** `ValueError` for a `factor` that is no square matrix, or one of a scalar noise.
    """

    scalar: bool = eqx.field(static=True)
    factor: Inexact[Array, "m m"] | None

    def __init__(self, *, scalar: bool = False, factor: PyTree = None, **_unknown: Any):
        refuse_unknown("WienerProcess", _unknown, ("scalar", "factor"))
        self.scalar = bool(scalar)
        self.factor = None if factor is None else jnp.asarray(with_real_numbers(factor))
        if factor is None:
            return
        shape = np.shape(factor)
        if len(shape) != 2 or shape[0] != shape[1]:
            raise ValueError(f"factor must be a square matrix [m, m], got the shape {shape}.")
        if self.scalar:
            raise ValueError("scalar=True is one component, which has no factor: drop one of them.")


class NoiseGrid(eqx.Module):
    """A path of the noise that is known at some times, and linear between these.

    A solve with the noise of another one, whose steps were saved (`save_everystep=True,
    save_noise=True`), makes the same steps: `eo.NoiseGrid(sol.t, sol.W)`, with `sol.Z` for the
    methods that use it. With other steps it follows the same path, more coarsely or more finely.

    **Arguments:**

    - `t [grid]`: the times, increasing; they must cover the time span.
    - `W [grid, *noise]`: the path at these times, in the shape of the noise: that of the state for
        diagonal noise, `[m]` for a matrix of noises, `[]` for a scalar one.
    - `Z [grid, *noise]`: the path of the second process that methods of order 1.5 use (`SRA1`,
        `SOSRA`, `SRIW1`, `SOSRI`); needed for these.

    **Raises:** `ValueError` for arrays of other shapes, or times that don't increase.
    """

    t: Inexact[Array, " grid"]
    W: Inexact[Array, "grid ..."]
    Z: Inexact[Array, "grid ..."] | None

    def __init__(self, t: PyTree, W: PyTree, Z: Any = None):
        self.t, self.W = (jnp.asarray(with_real_numbers(x)) for x in (t, W))
        self.Z = None if Z is None else jnp.asarray(with_real_numbers(Z))
        if self.t.ndim != 1 or len(self.t) < 2:
            raise ValueError(
                f"t of NoiseGrid must be two or more times, got the shape {self.t.shape}."
            )
        for name, x in (("W", self.W), ("Z", self.Z)):
            if x is not None and (not x.ndim or len(x) != len(self.t)):
                raise ValueError(
                    f"{name} of NoiseGrid must be [grid, ...] with the {len(self.t)} times of t, "
                    f"got the shape {x.shape}."
                )
        if self.Z is not None and self.Z.shape != self.W.shape:
            raise ValueError(
                f"Z of NoiseGrid must have the shape of W, {self.W.shape}, got {self.Z.shape}."
            )
        if not is_tracer(self.t) and not bool(np.all(np.diff(np.asarray(self.t)) > 0)):
            raise ValueError("t of NoiseGrid must increase; of a solve, cut it at its length.")


class SDEProblem(ODEProblem):
    r"""The stochastic problem $du = f(u, p, t)\,dt + g(u, p, t)\,dW$, $u(t_0) = u_0$.

    It has all that an [`ODEProblem`][ensembleode.ODEProblem] has, and is solved by `solve` alone or
    in an [`EnsembleProblem`][ensembleode.EnsembleProblem]. The noise of a trajectory is a function
    of its key (`ctx.key` of a `prob_func`), the number of the step, and the component. So each
    trajectory has a path of its own, which is the same on every ensemble algorithm, for any number
    of trajectories and batches; another `seed` (or `key`) of `solve` gives other paths.

    With `dt`, steps have that size. Without, the methods of order 3/2 choose them by `abstol` and
    `reltol`, among the halves of halves of the time span, whose noise is a function of the key and
    of the piece of time; so tolerances don't change the path. (Such steps don't end at `tstops` and
    at events that are found by their condition, which need a `dt`.)

    **Arguments:**

    - `f`: the drift `f(u, p, t)`.
    - `g`: the diffusion `g(u, p, t)`, in the dtype of `u`. By default, noise is diagonal: `g`
        returns what `f` does, and each component has its own noise.
    - `u0`, `tspan`, `p`, `integrand`, `options`: those of an `ODEProblem`. Time runs forwards.
        The integral of an `integrand` is computed by the trapezoidal rule over the steps.
    - `noise_rate_prototype`: an array `[*state, m]` (for a pytree, of such arrays), such as zeros.
        Then `g` returns such a matrix, which the `m` noises are multiplied by.
    - `noise`: a [`WienerProcess`][ensembleode.WienerProcess], for a scalar noise or correlated
        noises; or a [`NoiseGrid`][ensembleode.NoiseGrid], a given path.

    **Raises:** the errors of `ODEProblem`; `TypeError` for a `g` that can't be called, and for a
    `noise` that is neither; `ValueError` for a `noise_rate_prototype` with scalar noise.

    >>> import ensembleode as eo
    >>> prob = eo.SDEProblem(lambda u, p, t: -u, lambda u, p, t: p, 1.0, (0.0, 1.0), 0.1)
    >>> sim = eo.solve(eo.EnsembleProblem(prob), eo.SRA1(), trajectories=1000, dt=0.01)
    >>> abs(float(sim.u[:, -1].mean()) - 0.368) < 0.02
    True
    """

    g: Callable
    noise_rate_prototype: PyTree
    noise: WienerProcess | NoiseGrid | None

    parts: ClassVar[tuple[str, ...]] = (*ODEProblem.parts, "g", "noise_rate_prototype", "noise")

    def __init__(
        self,
        f: Callable,
        g: Callable,
        u0: PyTree,
        tspan: tuple[Any, Any],
        p: PyTree = None,
        *,
        noise_rate_prototype: PyTree = None,
        noise: WienerProcess | NoiseGrid | None = None,
        integrand: Callable | None = None,
        _order: tuple[str, ...] | None = None,
        **options: Any,
    ):
        if not callable(g):
            raise TypeError(
                f"g must be a function g(u, p, t), got {g!r}. Its place is the second: "
                "SDEProblem(f, g, u0, tspan, p)."
            )
        if not isinstance(noise, WienerProcess | NoiseGrid | None):
            raise TypeError(f"noise must be an eo.WienerProcess or an eo.NoiseGrid, got {noise!r}.")
        if noise_rate_prototype is not None and getattr(noise, "scalar", False):
            raise ValueError(
                "noise_rate_prototype is for several noises, and noise is a scalar one: drop one "
                "of the two."
            )
        super().__init__(f, u0, tspan, p, integrand=integrand, _order=_order, **options)
        self.g = g
        self.noise_rate_prototype = noise_rate_prototype
        self.noise = noise
