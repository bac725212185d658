"""The Milstein method without derivatives."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp

from .arithmetic import Number
from .stochastic import SDESolver, StochasticStep, StochasticTerms


class RKMil(SDESolver):
    """The Milstein method whose derivative of the diffusion is a difference, for diagonal or scalar
    noise: strong order 1.

    - `interpretation`: `"Ito"`, the default, or `"Stratonovich"`.

    **Raises:** `ValueError` for another interpretation.

    Source: Kloeden and Platen, "Numerical Solution of Stochastic Differential Equations" (1992),
    11.1.
    """

    order: ClassVar[float] = 1.0
    noises: ClassVar[tuple[str, ...]] = ("diagonal", "scalar")
    references: ClassVar[tuple[str, ...]] = ("kloeden1992",)

    interpretation: str = eqx.field(default="Ito", static=True)  # pyright: ignore

    def __check_init__(self):
        if self.interpretation not in ("Ito", "Stratonovich"):
            raise ValueError(
                f"interpretation must be 'Ito' or 'Stratonovich', got {self.interpretation!r}."
            )

    def step(
        self, terms: StochasticTerms, u: Number, t: Number, h: Number, dw: Number, dz: Number
    ) -> StochasticStep:
        """See [`SDESolver`][ensembleode.SDESolver.step]."""
        f, g, times = terms
        is_ito = self.interpretation == "Ito"
        root, change, noise = jnp.sqrt(h), h * f(u, t), g(u, t)
        beside = u + (change if is_ito else 0.0) + root * noise
        slope = (g(beside, t) - noise) / root
        square = dw * dw - h if is_ito else dw * dw
        return StochasticStep(change + times(noise, dw) + times(slope, 0.5 * square))
