"""Formulas of models in SBML: numbers, or tuples of a name and operands, which JAX computes.

Source: Hucka et al. (2018; see `sbml.py`), sections 3.4.6 and 3.4.7.
"""

import copy
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import gammaln
from jax.typing import ArrayLike


# A number; or a name (of an operation, or "name" and that of a quantity) and operands.
Formula = float | tuple


class Quantities:
    """The values of names in formulas.

    - `numbers`: amounts, sizes and parameters.
    - `rules`: the formulas of names that others decide, which come first. Of species, these are
        what their name is in formulas.
    - `concentrations`: the species whose name is their concentration, with their compartments.
    """

    def __init__(
        self,
        numbers: Mapping,
        rules: Mapping,
        concentrations: Mapping,
        t: ArrayLike,
        constant: Callable[[float], Any] = float,
    ):
        self._numbers, self._rules, self._concentrations = numbers, rules, concentrations
        self._t, self._constant = t, constant
        self._found: dict[str, Any] = {}
        self._begun: list[str] = []

    def amount(self, name: str) -> Any:
        """The amount of a species, and the value of any other name."""
        if name not in self._rules:
            return self._numbers[name]
        value = self.value(name)
        compartment = self._concentrations.get(name)
        return value if compartment is None else value * self.value(compartment)

    def value(self, name: str) -> ArrayLike:
        """What a name is in a formula."""
        if name not in self._found:
            if name in self._begun:
                raise ValueError(f"the rules for {', '.join(self._begun)} go in a circle.")
            self._begun.append(name)
            self._found[name] = self._computed(name)
            self._begun.pop()
        return self._found[name]

    def _computed(self, name: str) -> ArrayLike:
        if name in self._rules:
            return self.of_formula(self._rules[name])
        if name not in self._numbers:
            raise ValueError(f"the model has a formula with {name}, which has no value.")
        compartment = self._concentrations.get(name)
        amount = self._numbers[name]
        return amount if compartment is None else amount / self.value(compartment)

    def of_formula(self, formula: Formula) -> ArrayLike:
        if not isinstance(formula, tuple):
            return self._constant(formula)
        name, *operands = formula
        if name == "name":
            return self.value(operands[0])
        if name == "time":
            return self._t
        if name == "piecewise":
            return self._piecewise(operands)
        return OPERATIONS[name](*(self.of_formula(x) for x in operands))

    def _piecewise(self, operands: Sequence[Formula]) -> ArrayLike:
        """The first value whose condition holds. (As a branch, since the derivative of another
        value may be infinite.)"""
        if len(operands) < 2:
            return self.of_formula(operands[0]) if operands else self._constant(math.nan)
        condition = _truth(self.of_formula(operands[1]))

        def value() -> ArrayLike:
            return self._for_branch().of_formula(operands[0])

        def otherwise() -> ArrayLike:
            return self._for_branch()._piecewise(operands[2:])

        if isinstance(condition, bool | np.bool_):
            return value() if condition else otherwise()
        dtype = jnp.result_type(*map(jax.eval_shape, (value, otherwise)))
        branches = (lambda fn=fn: jnp.asarray(fn(), dtype) for fn in (value, otherwise))
        return jax.lax.cond(condition, *branches)

    def _for_branch(self) -> "Quantities":
        """The same quantities, for a branch: what is computed there is not known elsewhere."""
        copied = copy.copy(self)
        copied._found, copied._begun = dict(self._found), list(self._begun)
        return copied


def signed_terms(formula: Formula) -> list[tuple[int, Formula]]:
    """The terms that a formula is the sum of, each with the sign with which it is added."""
    name, *operands = formula if isinstance(formula, tuple) else ("",)
    if name == "plus" or name == "minus":
        terms = [signed_terms(x) for x in operands]
        if name == "minus":
            terms[-1] = [(-sign, x) for sign, x in terms[-1]]
        return [*itertools.chain(*terms)]
    if name == "divide":
        return [(sign, ("divide", x, operands[1])) for sign, x in signed_terms(operands[0])]
    if name == "times":
        for i, factor in enumerate(operands):
            terms = signed_terms(factor)
            if any(sign < 0 for sign, _ in terms):
                others = operands[:i], operands[i + 1 :]
                return [(sign, ("times", *others[0], x, *others[1])) for sign, x in terms]
    return [(1, formula)]


def has_factor(formula: Formula, name: str) -> bool:
    """Whether a formula is zero where this quantity is, as a product with it."""
    of, *operands = formula if isinstance(formula, tuple) else ("",)
    if of == "name":
        return operands[0] == name
    if of in ("plus", "minus"):
        return all(has_factor(x, name) for x in operands)
    if of == "times":
        return any(has_factor(x, name) for x in operands)
    if of == "power":
        is_positive = isinstance(operands[1], float) and operands[1] > 0
        return is_positive and has_factor(operands[0], name)
    return of == "divide" and has_factor(operands[0], name)


def names_in(formula: Formula) -> set[str]:
    """The names of quantities in a formula."""
    of, *operands = formula if isinstance(formula, tuple) else ("",)
    return {operands[0]} if of == "name" else set().union(*map(names_in, operands))


def formula_of(node: Any) -> Formula:
    """The formula of a libSBML tree."""
    import libsbml

    if node.isNumber():
        return float(node.getValue())
    kind = node.getType()
    constants = {
        libsbml.AST_CONSTANT_E: math.e,
        libsbml.AST_CONSTANT_PI: math.pi,
        libsbml.AST_CONSTANT_TRUE: 1.0,
        libsbml.AST_CONSTANT_FALSE: 0.0,
        libsbml.AST_NAME_AVOGADRO: 6.02214179e23,
    }
    if kind in constants:
        return constants[kind]
    if kind == libsbml.AST_NAME:
        return ("name", node.getName())
    if kind == libsbml.AST_NAME_TIME:
        return ("time",)
    operands = [formula_of(node.getChild(i)) for i in range(node.getNumChildren())]
    name = _names().get(kind)
    if name is None:
        raise ValueError(f"the model has a formula with {node.getName()!r}, which isn't read.")
    return (name, *operands)


@functools.cache
def _names() -> dict[int, str]:
    """The operations by the types of the nodes of libSBML's trees."""
    import libsbml

    groups = ("AST_", "AST_FUNCTION_", "AST_LOGICAL_", "AST_RELATIONAL_")
    names = (
        (group + name.upper(), name) for group in groups for name in (*OPERATIONS, "piecewise")
    )
    return {getattr(libsbml, x): name for x, name in names if hasattr(libsbml, x)}


#
# Operations
#


def _divided(x: ArrayLike, y: ArrayLike) -> ArrayLike:
    return float(np.divide(x, y)) if isinstance(x, float) and isinstance(y, float) else x / y


def _power(x: ArrayLike, y: ArrayLike) -> ArrayLike:
    """(With a whole number as a product, so that it has a derivative at zero.)"""
    if isinstance(y, float) and y.is_integer() and abs(y) < 64:
        return x ** int(y)
    return jnp.power(x, y)


def _quotient(x: ArrayLike, y: ArrayLike) -> Array:
    return jnp.trunc(x / y)


def _factorial(x: ArrayLike) -> ArrayLike:
    if isinstance(x, float):
        return float(math.factorial(int(x))) if x.is_integer() else math.gamma(x + 1)
    return jnp.exp(gammaln(x + 1))


def _log(*operands: Any) -> Array:
    """Of a base, ten by default."""
    *base, x = operands
    return jnp.log(x) / jnp.log(base[0] if base else 10.0)


def _root(*operands: Any) -> Array:
    *degree, x = operands
    return jnp.sqrt(x) if not degree or degree[0] == 2.0 else jnp.power(x, 1 / degree[0])


def _in_pairs(relation: Callable) -> Callable:
    """The relation of all operands, each to the next."""
    return lambda *xs: _all(relation(x, y) for x, y in itertools.pairwise(xs))


def _all(conditions: Iterable) -> ArrayLike:
    return functools.reduce(operator.and_, (_truth(x) for x in conditions), np.bool_(True))


def _any(conditions: Iterable) -> ArrayLike:
    return functools.reduce(operator.or_, (_truth(x) for x in conditions), np.bool_(False))


def _odd(conditions: Iterable) -> ArrayLike:
    return functools.reduce(operator.xor, (_truth(x) for x in conditions), np.bool_(False))


def _truth(x: Any) -> Any:
    return x if getattr(x, "dtype", None) == np.dtype(bool) else x != 0


def _reciprocal(fn: Callable) -> Callable:
    return lambda x: 1 / fn(x)


def _of_reciprocal(fn: Callable) -> Callable:
    return lambda x: fn(1 / x)


OPERATIONS: dict[str, Callable] = {
    "plus": lambda *xs: functools.reduce(operator.add, xs, 0.0),
    "minus": lambda x, *y: x - y[0] if y else -x,
    "times": lambda *xs: functools.reduce(operator.mul, xs, 1.0),
    "divide": _divided,
    "power": _power,
    "root": _root,
    "abs": jnp.abs,
    "exp": jnp.exp,
    "ln": jnp.log,
    "log": _log,
    "ceiling": jnp.ceil,
    "floor": jnp.floor,
    "factorial": _factorial,
    "max": lambda *xs: functools.reduce(jnp.maximum, xs),
    "min": lambda *xs: functools.reduce(jnp.minimum, xs),
    "quotient": _quotient,
    "rem": lambda x, y: x - y * _quotient(x, y),
    "eq": _in_pairs(operator.eq),
    "neq": operator.ne,
    "gt": _in_pairs(operator.gt),
    "lt": _in_pairs(operator.lt),
    "geq": _in_pairs(operator.ge),
    "leq": _in_pairs(operator.le),
    "and": lambda *xs: _all(xs),
    "or": lambda *xs: _any(xs),
    "xor": lambda *xs: _odd(xs),
    "not": lambda x: ~_truth(jnp.asarray(x)),
    "implies": lambda x, y: ~_truth(jnp.asarray(x)) | _truth(y),
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "tanh": jnp.tanh,
    "arcsin": jnp.arcsin,
    "arccos": jnp.arccos,
    "arctan": jnp.arctan,
    "arcsinh": jnp.arcsinh,
    "arccosh": jnp.arccosh,
    "arctanh": jnp.arctanh,
    "sec": _reciprocal(jnp.cos),
    "csc": _reciprocal(jnp.sin),
    "cot": _reciprocal(jnp.tan),
    "sech": _reciprocal(jnp.cosh),
    "csch": _reciprocal(jnp.sinh),
    "coth": _reciprocal(jnp.tanh),
    "arcsec": _of_reciprocal(jnp.arccos),
    "arccsc": _of_reciprocal(jnp.arcsin),
    "arccot": _of_reciprocal(jnp.arctan),
    "arcsech": _of_reciprocal(jnp.arccosh),
    "arccsch": _of_reciprocal(jnp.arcsinh),
    "arccoth": _of_reciprocal(jnp.arctanh),
}
