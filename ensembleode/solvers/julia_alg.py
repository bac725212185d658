"""Any method of OrdinaryDiffEq or StochasticDiffEq by its name in Julia."""

import ast
from typing import Any, ClassVar, NamedTuple

import equinox as eqx

from .base import ODESolver


# The methods, each with the package of OrdinaryDiffEq that has it. Other names are refused.
PACKAGES: dict[str, str] = {
    "OrdinaryDiffEqTsit5": "AutoTsit5 Tsit5",
    "OrdinaryDiffEqVerner": """
        AutoVern6 AutoVern7 AutoVern8 AutoVern9 RKV76IIa Vern6 Vern7 Vern8 Vern9
    """,
    "OrdinaryDiffEqLowOrderRK": """
        Alshina2 Alshina3 Alshina6 Anas5 AutoDP5 BS3 BS5 DP5 Euler FRK65 Heun MSRK5 MSRK6 Midpoint
        OwrenZen3 OwrenZen4 OwrenZen5 PSRK3p5q4 PSRK3p6q5 PSRK4p7q6 RK4 RKM RKO65 Ralston SIR54
        Stepanov5
    """,
    "OrdinaryDiffEqHighOrderRK": "DP8 PFRK87 TanYam7 TsitPap8",
    "OrdinaryDiffEqFeagin": "Feagin10 Feagin12 Feagin14",
    "OrdinaryDiffEqSSPRK": """
        KYK2014DGSSPRK_3S2 KYKSSPRK42 SSPRK104 SSPRK22 SSPRK33 SSPRK43 SSPRK432 SSPRK53 SSPRK54
        SSPRK63 SSPRK73 SSPRK83 SSPRK932
    """,
    "OrdinaryDiffEqStabilizedRK": "ESERK4 ESERK5 RKC ROCK2 ROCK4 SERK2",
    "OrdinaryDiffEqAdamsBashforthMoulton": """
        AB3 AB4 AB5 ABM32 ABM43 ABM54 VCAB3 VCAB4 VCAB5 VCABM VCABM3 VCABM4 VCABM5
    """,
    "OrdinaryDiffEqRosenbrock": """
        GRK4A GRK4T ROS2 ROS3 ROS3P ROS3PR ROS3PRL ROS34PRw ROS34PW1a ROS34PW2 ROS34PW3 Rodas23W
        Rodas3 Rodas3P Rodas4 Rodas42 Rodas4P Rodas4P2 Rodas5 Rodas5P Rodas5Pe Rodas5Pr RosShamp4
        Rosenbrock23 Rosenbrock32 Ros4LStab Scholz4_7 Veldd4 Velds4
    """,
    "OrdinaryDiffEqSDIRK": """
        Cash4 ESDIRK54I8L2SA Hairer4 Hairer42 ImplicitEuler ImplicitMidpoint KenCarp3 KenCarp4
        KenCarp47 KenCarp5 KenCarp58 Kvaerno3 Kvaerno4 Kvaerno5 SDIRK2 SDIRK22 SSPSDIRK2 TRBDF2
        Trapezoid
    """,
    "OrdinaryDiffEqBDF": "ABDF2 FBDF QBDF QBDF1 QBDF2 QNDF QNDF1 QNDF2",
    "OrdinaryDiffEqFIRK": "AdaptiveRadau RadauIIA3 RadauIIA5 RadauIIA9",
    "StochasticDiffEqLowOrder": "EM EulerHeun LambaEM LambaEulerHeun RKMil SimplifiedEM",
    "StochasticDiffEqHighOrder": "SOSRA SOSRA2 SOSRI SOSRI2 SRA1 SRA2 SRA3 SRIW1 SRIW2",
}
_PACKAGE_OF = {name: package for package, names in PACKAGES.items() for name in names.split()}

# Those methods that have no error estimate, and need `dt`. (A test asks Julia about this.)
_WITHOUT_ESTIMATE = """
    AB3 AB4 AB5 ABM32 ABM43 ABM54 Alshina6 Anas5 EM Euler EulerHeun ImplicitMidpoint
    KYK2014DGSSPRK_3S2 KYKSSPRK42 MSRK5 MSRK6 PSRK3p5q4 PSRK3p6q5 PSRK4p7q6 RKM RKO65 SSPRK104
    SSPRK22 SSPRK33 SSPRK53 SSPRK54 SSPRK63 SSPRK73 SSPRK83 SSPSDIRK2 SimplifiedEM
"""
FIXED_STEP = frozenset(_WITHOUT_ESTIMATE.split())


class JuliaMethod(NamedTuple):
    """A method that is requested of Julia, with its arguments, which are numbers, tuples of
    numbers, `Val`, or methods."""

    name: str
    package: str
    arguments: tuple = ()
    options: tuple[tuple[str, Any], ...] = ()


class Val(NamedTuple):
    """A number that Julia compiles for, such as the `max_order` of `QNDF`."""

    value: int | float


def described(name: str) -> JuliaMethod:
    """A method without arguments."""
    return JuliaMethod(name, _PACKAGE_OF[name])


# Those methods for noise of any kind whose strong order is 1/2.
OF_EULER = frozenset({"EM", "EulerHeun", "LambaEM", "LambaEulerHeun", "SimplifiedEM"})


def is_stochastic(method: JuliaMethod) -> bool:
    """Whether a method is for equations with noise."""
    return method.package.startswith("StochasticDiffEq")


def draws(method: JuliaMethod) -> int:
    """How many processes a method for equations with noise draws: one, or a second one, too."""
    return 2 if method.package == "StochasticDiffEqHighOrder" else 1


class JuliaAlg(ODESolver):
    """A method of OrdinaryDiffEq, or of StochasticDiffEq for an
    [`SDEProblem`][ensembleode.SDEProblem], by its name in Julia, for `engine="julia"`.

    - `text`: the method as it is written in Julia, such as `"Rodas5P()"`,
        `"AutoTsit5(Rosenbrock23())"` or `"QNDF(max_order=Val(3))"`: a known name, whose arguments
        are numbers, `true` or `false`, tuples of numbers, `Val(...)`, or methods.

    The text is parsed and never run; anything but known methods is refused. Jacobians come from
    JAX.

    **Raises:** `ValueError` for any other text.
    """

    engines: ClassVar[tuple[str, ...]] = ("julia",)
    # To be cited in addition to the references in its documentation in Julia.
    references: ClassVar[tuple[str, ...]] = ("rackauckas2017",)

    text: str = eqx.field(static=True)

    def __check_init__(self):
        if not isinstance(self.text, str):
            raise TypeError(
                "JuliaAlg takes the method as it is called in Julia, such as 'Rodas5P()', got "
                f"{self.text!r}."
            )
        _ = self.description  # raises for a text that isn't understood

    @property
    def fixed_step(self) -> bool:
        """Whether it has no error estimate, and so needs `dt`."""
        return self.description.name in FIXED_STEP

    @property
    def description(self) -> JuliaMethod:
        """The request to Julia."""
        text = self.text.strip()
        if text.isidentifier():
            text += "()"
        try:
            call = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError):
            call = None
        if not isinstance(call, ast.Call):
            raise ValueError(
                f"JuliaAlg takes one method as it is called in Julia, such as 'Rodas5P()', got "
                f"{self.text!r}."
            )
        return self._method(call)

    def _method(self, call: ast.Call) -> JuliaMethod:
        name = call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)
        if name not in _PACKAGE_OF:
            raise ValueError(
                f"JuliaAlg knows no method {name!r} (in {self.text!r}). It knows "
                f"{', '.join(sorted(_PACKAGE_OF))}."
            )
        options = tuple((k.arg, self._argument(k.value)) for k in call.keywords if k.arg)
        if len(options) < len(call.keywords):
            raise ValueError(f"JuliaAlg can't read {self.text!r}: ** is no option.")
        return JuliaMethod(name, _PACKAGE_OF[name], tuple(map(self._argument, call.args)), options)

    def _argument(self, node: ast.expr) -> Any:
        match node:
            case ast.Call(ast.Name("Val"), [ast.Constant() | ast.Name() as of], []):
                return Val(self._argument(of))
            case ast.Call():
                return self._method(node)
            case ast.Name("true" | "false"):
                return node.id == "true"
        try:
            value = ast.literal_eval(node)
        except ValueError:
            value = None
        numbers = value if isinstance(value, tuple) else (value,)
        if not numbers or not all(isinstance(x, int | float) for x in numbers):
            raise ValueError(
                f"JuliaAlg can't take {ast.unparse(node)!r} as an argument (in {self.text!r}): "
                "it takes numbers, true and false, tuples of numbers, Val(...), and methods."
            )
        return value


def among(method: JuliaMethod) -> set[JuliaMethod]:
    """A method and the methods among its arguments."""
    every = (*method.arguments, *(x for _, x in method.options))
    return {method}.union(*(among(x) for x in every if isinstance(x, JuliaMethod)))
