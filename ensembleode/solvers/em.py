"""The Euler-Maruyama method."""

from typing import ClassVar

import equinox as eqx

from .arithmetic import Number
from .stochastic import SDESolver, StochasticStep, StochasticTerms


class EM(SDESolver):
    """The Euler-Maruyama method, for Itô equations with any noise: strong order 1/2, and 1 if the
    noise is additive; weak order 1.

    - `split`: whether the diffusion is evaluated after the step of the drift, as in
        StochasticDiffEq by default; False is the method of the textbooks.

    Source: Maruyama, "Continuous Markov processes and stochastic equations" (1955); Kloeden and
    Platen, "Numerical Solution of Stochastic Differential Equations" (1992), 10.2.
    """

    order: ClassVar[float] = 0.5
    references: ClassVar[tuple[str, ...]] = ("maruyama1955", "kloeden1992")

    split: bool = eqx.field(default=True, static=True)

    def step(
        self, terms: StochasticTerms, u: Number, t: Number, h: Number, dw: Number, dz: Number
    ) -> StochasticStep:
        """See [`SDESolver`][ensembleode.SDESolver.step]."""
        change = h * terms.f(u, t)
        noise = terms.g(u + change if self.split else u, t)
        return StochasticStep(change + terms.times(noise, dw))
