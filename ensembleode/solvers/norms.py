"""Norms of the scaled error of a step: how many components become one number."""

import abc
from typing import Any

import equinox as eqx

from .arithmetic import Arithmetic, Components


class AbstractNorm(eqx.Module):
    """What makes one number of the scaled error, component by component: a step is accepted where
    it is at most one. For `solve(..., internalnorm=...)`; SciML's option of that name.

    A subclass writes one method, over the operations of an `Arithmetic`, `xp`, and so runs on every
    engine: as arrays of many trajectories, in generated machine code, or within diffrax. It has
    `+ - * /`, comparisons, and `xp.abs`, `xp.sqrt`, `xp.minimum`, `xp.maximum`, `xp.where`; and
    over all components `xp.mean`, `xp.total` and `xp.largest`, in which NaN remains NaN. It must be
    made of Python numbers.

    >>> import ensembleode as eo
    >>> class MeanNorm(eo.AbstractNorm):
    ...     def __call__(self, xp, values):
    ...         return xp.mean(tuple(xp.abs(x) for x in values))
    >>> prob = eo.ODEProblem(lambda u, p, t: -u, [1.0, 2.0], (0.0, 1.0))
    >>> eo.solve(prob, internalnorm=MeanNorm()).retcode.name
    'Success'
    """

    @abc.abstractmethod
    def __call__(self, xp: Arithmetic, values: Components) -> Any:
        """The norm.

        **Arguments:**

        - `xp`: the operations.
        - `values`: the components; each is one number a trajectory, or an array of several with the
            trajectories last. They can't be told apart (what differs by component are tolerances).

        **Returns:** one number a trajectory, zero or positive; NaN or infinite where a component is
        not finite.
        """

    def squared(self, xp: Arithmetic, values: Components) -> Any:
        """Its square, which is what step-size control looks at: a mean square needs no root.

        **Arguments:** `xp` and `values`, as of the norm.
        """
        norm = self(xp, values)
        return norm * norm


class RMSNorm(AbstractNorm):
    """The root of the mean square, OrdinaryDiffEq's and ours by default: the tolerances are met on
    average over the components.

    Source: Hairer, Norsett and Wanner, "Solving Ordinary Differential Equations I", II.4.
    """

    def __call__(self, xp: Arithmetic, values: Components) -> Any:
        return xp.sqrt(self.squared(xp, values))

    def squared(self, xp: Arithmetic, values: Components) -> Any:
        """The mean square of `values`, by the operations `xp`."""
        return xp.mean(tuple(x * x for x in values))


class MaxNorm(AbstractNorm):
    """The largest component: each of them meets the tolerances. (In Julia,
    `internalnorm = (u, t) -> maximum(abs, u)`.)"""

    def __call__(self, xp: Arithmetic, values: Components) -> Any:
        return xp.largest(tuple(xp.abs(x) for x in values))
