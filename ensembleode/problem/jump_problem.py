"""Problems of reactions that happen at random times."""

import os
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Inexact, PyTree

from ..ground.state_tree import as_state, with_real_numbers
from .problem import ODEProblem
from .sbml import read_reactions
from .stochastic import SDEProblem


class JumpProblem(ODEProblem):
    r"""Reactions that happen at random times, each with a rate (its propensity): the jump process
    of a well-stirred chemical system, an epidemic, a queue.

    It is solved by [`eo.Direct()`][ensembleode.Direct], exactly, alone or in an
    [`EnsembleProblem`][ensembleode.EnsembleProblem]; `prob_func`, `remake`, stores, summaries and
    plots are those of ODEs. Each trajectory has random numbers of its own, which are the same on
    every ensemble algorithm; another `seed` of `solve` gives others. There are no derivatives. Time
    runs forwards.

    **Arguments:**

    - `rates`: `rates(u, p, t) -> [reaction]`, the propensities, written in JAX. They change only
        with the state, and where affects change `p`, not with `t`.
    - `changes`: what each reaction adds to the state, `[reaction, *state]` (for a pytree, of such
        arrays).
    - `u0`: the initial state; whole numbers become real ones.
    - `tspan`, `p`, `options`: those of an `ODEProblem`. Callbacks act at saved times, at `tstops`
        and, with `dt`, at every multiple of it.

    A trajectory of more than 2^31 reactions (in float32, 8,388,608), or with a rate that is
    negative or NaN, ends with NaN, as `Unstable`.

    **Raises:** the errors of `ODEProblem`; `ValueError` for `changes` of another shape.

    >>> import ensembleode as eo, jax.numpy as jnp
    >>> prob = eo.JumpProblem(lambda u, p, t: p * u, [[-1.0]], [100], (0.0, 1.0), 0.5)  # decay
    >>> sim = eo.solve(eo.EnsembleProblem(prob), trajectories=2000)
    >>> abs(float(sim.u[:, -1].mean()) - 100 * 0.6065) < 0.5
    True
    """

    rates: Callable
    changes: PyTree[Inexact[Array, "reaction ..."]]

    parts: ClassVar[tuple[str, ...]] = ("rates", "changes", "u0", "tspan", "p")

    def __init__(
        self,
        rates: Callable,
        changes: PyTree,
        u0: PyTree,
        tspan: tuple[Any, Any],
        p: PyTree = None,
        *,
        _order: tuple[str, ...] | None = None,
        **options: Any,
    ):
        if not callable(rates):
            raise TypeError(f"rates must be a function rates(u, p, t), got {rates!r}.")
        u0 = with_real_numbers(u0)
        changes = as_state(with_real_numbers(changes))
        shapes = [np.shape(x)[1:] for x in jax.tree.leaves(changes)]
        counts = {np.shape(x)[:1] for x in jax.tree.leaves(changes)}
        wanted = [np.shape(x) for x in jax.tree.leaves(as_state(u0))]
        if shapes != wanted or len(counts) != 1:
            given = jax.tree.map(np.shape, changes)
            raise ValueError(
                "changes must be [reaction, *state], what each reaction adds to the state; it has "
                f"the shape {given}, and u0 {jax.tree.map(np.shape, as_state(u0))}."
            )
        super().__init__(MeanRate(rates, changes), u0, tspan, p, _order=_order, **options)
        self.rates = rates
        self.changes = changes

    @classmethod
    def of_reactions(
        cls,
        reactants: Any,
        products: Any,
        u0: PyTree,
        tspan: tuple[Any, Any],
        k: Any,
        **options: Any,
    ) -> "JumpProblem":
        """The problem of elementary reactions, by the law of mass action.

        **Arguments:** `reactants`, `products [reaction, species]`: how many of each species a
        reaction takes and makes, whole numbers. `k [reaction]`: the constants of the reactions, of
        which the propensity is the product with the number of ways to choose the reactants; they
        are the problem's `p`.

        **Raises:** `ValueError` for arrays of other shapes, and numbers that aren't whole.

        >>> import ensembleode as eo
        >>> dimerisation = eo.JumpProblem.of_reactions(
        ...     [[2, 0], [0, 1]], [[0, 1], [2, 0]], [100, 0], (0.0, 10.0), [0.001, 0.01]
        ... )
        >>> eo.solve(dimerisation).u[-1] @ jnp.array([1.0, 2.0])
        Array(100., dtype=float32)
        """
        taken, made = np.asarray(reactants), np.asarray(products)
        if taken.ndim != 2 or taken.shape != made.shape:
            raise ValueError(
                "reactants and products must be [reaction, species], both of one shape; got "
                f"{taken.shape} and {made.shape}."
            )
        for name, x in (("reactants", taken), ("products", made)):
            if (x < 0).any() or (x != np.round(x)).any():
                raise ValueError(f"{name} must be whole numbers, zero or more, got {x.tolist()}.")
        if np.shape(k) != (len(taken),):
            raise ValueError(
                f"k has the shape {np.shape(k)}; there are {len(taken)} reactions, each with one "
                "constant."
            )
        taken = tuple(map(tuple, taken.astype(int).tolist()))
        u0 = jnp.asarray(with_real_numbers(u0))
        changes = (made - np.asarray(taken)).astype(u0.dtype)
        return cls(MassAction(taken), changes, u0, tspan, jnp.asarray(k, u0.dtype), **options)

    @classmethod
    def of_sbml(
        cls, model: str | os.PathLike, tspan: tuple[Any, Any], **options: Any
    ) -> "JumpProblem":
        """The problem of a model in SBML. It needs libSBML, by the extra `sbml`.

        The state is a dictionary of the amounts of species, in the model's units of substance: for
        a `JumpProblem` these have to be molecules, for its `ode()` they may be any. The parameters
        `p` are a dictionary of the model's parameters and of the sizes of its compartments; a
        parameter `k` of the reaction `r` alone is `r_k`. What the model computes at its start
        (initial assignments, amounts of concentrations) is computed at reading, at the time 0, and
        doesn't change with `p`; nor do stoichiometries and conversion factors. Compartments without
        a size have the size 1.

        Reactions are in the order of the model. A reversible one becomes two, if its law is a
        difference of which each part stops when what it takes is used up, as `f * A - b * B`; the
        rate of another one is its law, and where that is negative, a trajectory is `Unstable`.

        **Arguments:** `model`: the path of a file, or the text itself. `tspan`, `options`: those
        of a `JumpProblem`.

        **Raises:** `ImportError` without libSBML; `FileNotFoundError`; `ValueError` for what can't
        be read, and names it: what is no valid SBML, events, rate rules and algebraic rules, fast
        reactions, stoichiometries that change, units of a law of its own.

        >>> import ensembleode as eo
        >>> prob = eo.JumpProblem.of_sbml("decay.xml", (0.0, 2.0))  # doctest: +SKIP
        >>> prob.u0, prob.p  # doctest: +SKIP
        ({'A': Array(100., dtype=float32)}, {'cell': Array(1., ...), 'decay_k': Array(0.5, ...)})
        """
        found = read_reactions(model)
        u0 = {name: jnp.asarray(x, float) for name, x in found.u0.items()}
        p = {name: jnp.asarray(x, float) for name, x in found.p.items()}
        return cls(found.rates, found.changes, u0, tspan, p, **options)

    def ode(self) -> ODEProblem:
        """The reaction rate equations: the limit of many molecules, an
        [`ODEProblem`][ensembleode.ODEProblem] with the same start, parameters and options."""
        about = self.u0, self.tspan, self.p
        return ODEProblem(self.f, *about, _order=self._order, **self.options)

    def langevin(self) -> SDEProblem:
        """The chemical Langevin equation, with a noise for each reaction: an
        [`SDEProblem`][ensembleode.SDEProblem], which is near this problem where reactions are many.

        Source: Gillespie, "The chemical Langevin equation", J. Chem. Phys. 113 (2000).
        """
        prototype = jax.tree.map(lambda x: np.moveaxis(np.zeros(x.shape), 0, -1), self.changes)
        about = self.u0, self.tspan, self.p
        noise = ReactionNoise(self.rates, self.changes)
        return SDEProblem(
            self.f, noise, *about,
            noise_rate_prototype=prototype, _order=self._order, **self.options,
        )  # fmt: skip


class MassAction(eqx.Module):
    """The propensities of elementary reactions, of which each takes these numbers of species."""

    reactants: tuple[tuple[int, ...], ...] = eqx.field(static=True)

    def __call__(self, u: PyTree, k: Any, t: Array) -> Array:
        ways = []
        for i, row in enumerate(self.reactants):
            way = k[i]
            for species, count in enumerate(row):
                for j in range(count):
                    way = way * (u[species] - j) * (1 / (j + 1))
            ways.append(way)
        return jnp.stack(ways)


class MeanRate(eqx.Module):
    """The mean change of the state in a unit of time."""

    rates: Callable
    changes: PyTree

    def __call__(self, u: PyTree, p: PyTree, t: Any) -> PyTree:
        rates = self.rates(u, p, t)
        return jax.tree.map(lambda x, y: _summed(rates, x).astype(y.dtype), self.changes, u)


class ReactionNoise(eqx.Module):
    """The standard deviations of the changes by each reaction, `[*state, reaction]`."""

    rates: Callable
    changes: PyTree

    def __call__(self, u: PyTree, p: PyTree, t: Array) -> Array:
        roots = jnp.sqrt(jnp.maximum(self.rates(u, p, t), 0.0))

        def of_leaf(x: Array) -> Array:
            x = jnp.moveaxis(x.astype(roots.dtype), 0, -1)
            return x * roots.reshape(*[1] * (x.ndim - 1), -1)

        return jax.tree.map(of_leaf, self.changes)


def _summed(rates: Any, changes: Any) -> Any:
    if np.shape(rates) != changes.shape[:1]:
        raise ValueError(
            f"rates must return an array of the shape {changes.shape[:1]}, a rate for each of the "
            f"reactions in changes; it returned the shape {np.shape(rates)}."
        )
    weights = rates.reshape(-1, *[1] * (changes.ndim - 1))
    return jnp.sum(weights * changes.astype(rates.dtype), axis=0)
