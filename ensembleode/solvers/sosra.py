"""The method SOSRA, with a large region of stability."""

from typing import ClassVar

from .stochastic import SRA, SRATableau


class SOSRA(SRA):
    """A method for additive noise, of strong order 1.5, whose three stages are chosen for
    stability.

    Source: Rackauckas and Nie, "Stability-optimized high order methods and stiffness detection for
    pathwise stiff stochastic differential equations" (IEEE HPEC, 2020).
    """

    coefficients: ClassVar[SRATableau] = SRATableau(
        a0=((0.6923962376159507,), (-3.1609142252828395, 4.1609142252828395)),
        b0=((1.3371632704399763,), (1.442371048468624, 1.8632741501139225)),
        alpha=(0.2889874966892885, 0.6859880440839937, 0.025024459226717772),
        beta1=(-16.792534242221663, 17.514995785380226, 0.27753845684143835),
        beta2=(0.4237535769069274, 0.6010381474428539, -1.0247917243497813),
        c0=(0, 0.6923962376159507, 1),
        c1=(0, 0.041248171110700504, 1),
    )
    references: ClassVar[tuple[str, ...]] = ("rackauckas2020",)
