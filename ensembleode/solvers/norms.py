"""Norms, which turn the scaled error of a step, with all its components, into one number."""

import abc

import equinox as eqx

from .arithmetic import Arithmetic, Components, Number


class AbstractNorm(eqx.Module):
    """A norm of the scaled error, which has a value for each component. A step is accepted where
    the norm is at most one. It is for `solve(..., internalnorm=...)`, SciML's option of that name.

    A subclass writes one method over the operations of an `Arithmetic`, `xp`. So it runs on every
    engine: as arrays of many trajectories, in generated machine code, or within diffrax. The
    operations are `+ - * /`, comparisons, `xp.abs`, `xp.sqrt`, `xp.minimum`, `xp.maximum` and
    `xp.where`; and over all components `xp.mean`, `xp.total` and `xp.largest`, in which NaN remains
    NaN. Its fields must be Python numbers.

    >>> import ensembleode as eo
    >>> class MeanNorm(eo.AbstractNorm):
    ...     def __call__(self, xp, values):
    ...         return xp.mean(tuple(xp.abs(x) for x in values))
    >>> prob = eo.ODEProblem(lambda u, p, t: -u, [1.0, 2.0], (0.0, 1.0))
    >>> eo.solve(prob, internalnorm=MeanNorm()).retcode.name
    'Success'
    """

    @abc.abstractmethod
    def __call__(self, xp: Arithmetic, values: Components) -> Number:
        """The norm.

        **Arguments:**

        - `xp`: the operations.
        - `values`: the components; each is one number for each trajectory, or an array of several
            with the trajectories last. Components can't be told apart (tolerances are what differs
            between components).

        **Returns:** one number for each trajectory, zero or positive; NaN or infinite where a
        component is not finite.
        """

    def squared(self, xp: Arithmetic, values: Components) -> Number:
        """The square of the norm, which is what step-size control uses: a mean square needs no
        root.

        **Arguments:** `xp` and `values`: those of the norm.
        """
        norm = self(xp, values)
        return norm * norm


class RMSNorm(AbstractNorm):
    """The root of the mean square; the default, as in OrdinaryDiffEq. The tolerances are met on
    average over the components.

    Source: Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I", II.4.
    """

    def __call__(self, xp: Arithmetic, values: Components) -> Number:
        return xp.sqrt(self.squared(xp, values))

    def squared(self, xp: Arithmetic, values: Components) -> Number:
        """The mean square of `values`, by the operations `xp`."""
        return xp.mean(tuple(x * x for x in values))


class MaxNorm(AbstractNorm):
    """The largest component, so each component meets the tolerances. In Julia, this is
    `internalnorm = (u, t) -> maximum(abs, u)`."""

    def __call__(self, xp: Arithmetic, values: Components) -> Number:
        return xp.largest(tuple(xp.abs(x) for x in values))
