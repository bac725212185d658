"""The Euler-Heun method."""

from typing import ClassVar

from .arithmetic import Number
from .stochastic import SDESolver, StochasticStep, StochasticTerms


class EulerHeun(SDESolver):
    """The Euler-Heun method, for **Stratonovich** equations with any noise: strong order 1/2, and 1
    if the noise is commutative (scalar, diagonal or additive).

    Source: Kloeden and Platen, "Numerical Solution of Stochastic Differential Equations" (1992),
    as in StochasticDiffEq.
    """

    order: ClassVar[float] = 0.5
    stages: ClassVar[int | None] = 2
    interpretation: ClassVar[str] = "Stratonovich"
    references: ClassVar[tuple[str, ...]] = ("kloeden1992",)

    def step(
        self, terms: StochasticTerms, u: Number, t: Number, h: Number, dw: Number, dz: Number
    ) -> StochasticStep:
        """See [`SDESolver`][ensembleode.SDESolver.step]."""
        f, g, times = terms
        k, noise = f(u, t), g(u, t)
        end = u + h * k + times(noise, dw)
        mean = 0.5 * (noise + g(end, t + h))
        return StochasticStep(h * 0.5 * (k + f(end, t + h)) + times(mean, dw))
