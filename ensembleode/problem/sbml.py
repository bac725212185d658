"""Reads the reactions of models in SBML, the Systems Biology Markup Language, by libSBML.

What is read is made of tuples of names and numbers alone, so that a problem can be pickled, and
two readings of a model are equal.

Source: Hucka et al., "The Systems Biology Markup Language (SBML): language specification for Level
3 Version 2 Core" (2018), of which the sections are named below.
"""

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..ground.extras import installing
from .sbml_formulas import Formula, formula_of, has_factor, names_in, Quantities, signed_terms


class ReactionNetwork(NamedTuple):
    """The reactions of a model.

    - `rates`: `rates(u, p, t)`, of each reaction.
    - `changes [reaction]` of each species: what a reaction adds to its amount.
    - `u0`, `p`: the initial amounts, and the parameters and the sizes of compartments, by name.
    """

    rates: "SbmlRates"
    changes: dict[str, np.ndarray]
    u0: dict[str, float]
    p: dict[str, float]


class SbmlRates(eqx.Module):
    """The rates of the reactions of a model.

    - `formulas`: those of the reactions.
    - `rules`: the formulas of quantities that others decide, by name.
    - `concentrations`: those species whose name in a formula is their concentration, with their
        compartments.
    """

    formulas: tuple[Formula, ...] = eqx.field(static=True)
    rules: tuple[tuple[str, Formula], ...] = eqx.field(static=True)
    concentrations: tuple[tuple[str, str], ...] = eqx.field(static=True)

    def __call__(self, u: dict[str, Array], p: dict[str, Array], t: ArrayLike) -> Array:
        values = Quantities({**p, **u}, dict(self.rules), dict(self.concentrations), t)
        dtype = jnp.result_type(*u.values(), *p.values())
        return jnp.stack([jnp.asarray(values.of_formula(x), dtype) for x in self.formulas])


def read_reactions(source: str | os.PathLike) -> ReactionNetwork:
    """The reactions of a model, a file or the text itself; see
    [`JumpProblem.of_sbml`][ensembleode.JumpProblem.of_sbml]."""
    try:
        return _network(_read(source))
    except RecursionError as e:
        raise ValueError("the model has a formula of too many operations within others.") from e


def _network(document: Any) -> ReactionNetwork:
    model = document.getModel()
    if model is None:
        raise ValueError("the SBML document has no model.")
    _check(model)
    rules = _formulas((x.getVariable(), x) for x in model.getListOfRules())
    of_reactions = ((x.getId(), x.getKineticLaw()) for x in model.getListOfReactions())
    laws = _formulas((name, law) for name, law in of_reactions if law is not None)
    every = model.getListOfSpecies()
    concentrations = {x.getId(): x.getCompartment() for x in every if _is_concentration(model, x)}
    numbers = _initial(model, rules, laws, concentrations)
    state = [x.getId() for x in every if x.getId() not in rules]
    formulas, changes = [], []
    for reaction in model.getListOfReactions():
        change = _change(model, reaction, numbers, frozenset(state))
        if reaction.getId() not in laws:
            raise ValueError(f"reaction {reaction.getId()} has no kinetic law.")
        for sign, formula in _directions(reaction, laws[reaction.getId()]):
            formulas.append(formula)
            changes.append({name: sign * x for name, x in change.items()})
    if not formulas:
        raise ValueError("the model has no reactions.")
    if not state:
        raise ValueError("the model has no species whose amounts reactions change.")
    # (In a formula, the name of a reaction is its rate.)
    decided = {**rules, **laws}
    rates = SbmlRates(
        tuple(formulas), tuple(decided.items()), tuple(sorted(concentrations.items()))
    )
    table = {name: np.array([x.get(name, 0.0) for x in changes]) for name in state}
    u0 = {name: numbers[name] for name in state}
    # Without those that are read here alone.
    read = {x.getConversionFactor() for x in (model, *every)} | _references(model).keys()
    read -= {name for x in decided.values() for name in names_in(x)}
    others = numbers.keys() - rules.keys() - set(state) - read
    p = {name: numbers[name] for name in sorted(others)}
    jax.eval_shape(rates, u0, p, 0.0)  # (Finds names without a value.)
    return ReactionNetwork(rates, table, u0, p)


#
# Documents
#


# What changes the meaning of a model, and is read; and what doesn't.
_KNOWN_PACKAGES = {"comp", "l3v2extendedmath", "fbc", "groups", "layout", "render"}


def _read(source: str | os.PathLike) -> Any:
    try:
        import libsbml
    except ImportError as e:
        raise ImportError(f"SBML is read by libSBML: {installing('sbml')}.") from e
    text = os.fspath(source).lstrip("\ufeff")
    is_text = isinstance(source, str) and text.lstrip().startswith("<")
    if not is_text and not os.path.exists(text):
        raise FileNotFoundError(f"there is no file {text[:200]} with a model in SBML.")
    document = (libsbml.readSBMLFromString if is_text else libsbml.readSBMLFromFile)(text)
    _raise_errors(document, libsbml)
    document.setConsistencyChecks(libsbml.LIBSBML_CAT_UNITS_CONSISTENCY, False)
    document.setConsistencyChecks(libsbml.LIBSBML_CAT_MODELING_PRACTICE, False)
    document.checkConsistency()
    _raise_errors(document, libsbml)
    plugins = [document.getPlugin(i).getPackageName() for i in range(document.getNumPlugins())]
    if others := {x for x in plugins if document.getPackageRequired(x)} - _KNOWN_PACKAGES:
        raise ValueError(
            f"the model needs the package {', '.join(others)} of SBML, which isn't read."
        )
    # Models are put in the place of submodels, functions are written out, and parameters of a
    # reaction get names of their own. (Sections 4.3 and 4.11.5.)
    flatten = ["flatten comp"] if "comp" in plugins else []
    for name in (*flatten, "promoteLocalParameters", "expandFunctionDefinitions"):
        properties = libsbml.ConversionProperties()
        properties.addOption(name, True)
        if document.convert(properties) != libsbml.LIBSBML_OPERATION_SUCCESS:
            _raise_errors(document, libsbml)
            raise ValueError(f"the SBML can't be read: libSBML can't convert it ({name}).")
    return document


def _raise_errors(document: Any, libsbml: Any) -> None:
    errors = [document.getError(i) for i in range(document.getNumErrors())]
    bad = [x for x in errors if x.getSeverity() >= libsbml.LIBSBML_SEV_ERROR]
    if bad:
        raise ValueError(f"the SBML can't be read: {bad[0].getMessage().strip()}")


def _check(model: Any) -> None:
    """**Raises:** `ValueError` for what is more than reactions."""
    found = [
        (model.getNumEvents(), "events"),
        (model.getNumConstraints(), "constraints"),
        (sum(x.isRate() for x in model.getListOfRules()), "rate rules"),
        (sum(x.isAlgebraic() for x in model.getListOfRules()), "algebraic rules"),
        (sum(x.getFast() for x in model.getListOfReactions()), "fast reactions"),
        (sum(_has_own_units(x) for x in model.getListOfReactions()), "laws with their own units"),
    ]
    for count, what in found:
        if count:
            raise ValueError(
                f"the model has {what} ({count}); of SBML, reactions, assignment rules and initial "
                "assignments are read. Remove them from it, or write them in JAX, as callbacks or "
                "in f."
            )


def _has_own_units(reaction: Any) -> bool:
    """(Level 1, and version 1 of level 2.)"""
    law = reaction.getKineticLaw()
    return law is not None and (law.isSetTimeUnits() or law.isSetSubstanceUnits())


def _is_concentration(model: Any, species: Any) -> bool:
    """Whether the name of a species in a formula is its concentration (section 4.6.5)."""
    compartment = model.getCompartment(species.getCompartment())
    # (NaN where the model doesn't say.)
    has_size = compartment is None or compartment.getSpatialDimensionsAsDouble() != 0
    return has_size and not species.getHasOnlySubstanceUnits()


def _references(model: Any) -> dict[str, Any]:
    """The reactants and products that have a name of their own, which is their stoichiometry."""
    reactions = model.getListOfReactions()
    every = ((*x.getListOfReactants(), *x.getListOfProducts()) for x in reactions)
    return {x.getId(): x for side in every for x in side if x.getId()}


def _formulas(parts: Iterable[tuple[str, Any]]) -> dict[str, Formula]:
    """The formulas of parts of a model, which have these names. (Parts without a formula have no
    effect.)"""
    return {name: formula_of(x.getMath()) for name, x in parts if x.isSetMath()}


def _initial(
    model: Any, rules: Mapping, reactions: Mapping, concentrations: Mapping
) -> dict[str, float]:
    """The numbers at the start by name: sizes, parameters, stoichiometries, amounts."""
    given: dict[str, float] = {}
    for x in model.getListOfCompartments():
        given[x.getId()] = x.getSize() if x.isSetSize() else 1.0
    for x in model.getListOfParameters():
        given[x.getId()] = x.getValue() if x.isSetValue() else math.nan
    assigned = _formulas((x.getSymbol(), x) for x in model.getListOfInitialAssignments())
    given |= {name: _stoichiometry(x) for name, x in _references(model).items()}
    decided = {**rules, **assigned}
    for x in model.getListOfSpecies():
        name = x.getId()
        if name in decided:
            continue
        if x.isSetInitialConcentration():
            # (That is a formula, as the size may be one.)
            decided[name] = x.getInitialConcentration()
            if name not in concentrations:
                decided[name] = ("times", decided[name], ("name", x.getCompartment()))
        else:
            given[name] = x.getInitialAmount() if x.isSetInitialAmount() else math.nan
    # (A rule or an assignment for a species says what its name is in formulas.)
    values = Quantities(given, {**decided, **reactions}, concentrations, 0.0, np.float64)
    with np.errstate(all="ignore"):
        found = {name: float(values.amount(name)) for name in sorted({*given, *decided})}
    unknown = sorted(name for name, x in found.items() if math.isnan(x))
    if unknown:
        raise ValueError(f"the model has no value at the start for {', '.join(unknown)}.")
    return found


#
# Reactions
#


def _change(model: Any, reaction: Any, numbers: Mapping, state: frozenset) -> dict[str, float]:
    """What a reaction adds to the amounts of species (section 4.11)."""
    change: dict[str, float] = {}
    sides = (-1, reaction.getListOfReactants()), (1, reaction.getListOfProducts())
    for sign, references in sides:
        for x in references:
            name, species = x.getSpecies(), model.getSpecies(x.getSpecies())
            if model.getRuleByVariable(x.getId()) is not None or x.isSetStoichiometryMath():
                raise ValueError(
                    f"reaction {reaction.getId()} has a stoichiometry that a formula decides (of "
                    f"{name}); what a reaction adds has to be numbers."
                )
            if species.getBoundaryCondition() or species.getConstant() or name not in state:
                continue
            by_name = species.getConversionFactor() or model.getConversionFactor()
            factor = numbers[by_name] if by_name else 1.0
            count = numbers[x.getId()] if x.getId() else _stoichiometry(x)
            change[name] = change.get(name, 0.0) + sign * count * factor
    return change


def _stoichiometry(reference: Any) -> float:
    """That of a reactant or a product, as far as the model gives it."""
    if not reference.isSetStoichiometry():
        return 1.0
    return reference.getStoichiometry() / reference.getDenominator()


def _directions(reaction: Any, formula: Formula) -> list[tuple[int, Formula]]:
    """The rate of a reaction with this law; or, where it goes both ways, those of its two
    directions, each with its sign."""
    sides = {1: reaction.getListOfReactants(), -1: reaction.getListOfProducts()}
    takes = {sign: {x.getSpecies() for x in side} for sign, side in sides.items()}

    def is_direction(sign: int, term: Formula) -> bool:
        """Whether it stops when what it takes is used up, and doesn't when what it makes is."""
        others = takes[-sign] - takes[sign]
        stops = all(has_factor(term, x) for x in takes[sign])
        return stops and not any(has_factor(term, x) for x in others)

    terms = signed_terms(formula)
    if not (reaction.getReversible() and all(is_direction(*x) for x in terms)):
        return [(1, formula)]
    ways = [(way, [x for sign, x in terms if sign == way]) for way in (1, -1)]
    return [(way, ("plus", *parts)) for way, parts in ways if parts]
