"""Whether a program can be lowered."""

from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from ...tracing.evaluation import is_jaxpr
from ..equations import called, used
from ..simplifying import FUNCTIONS, RULES as WRITTEN_OUT
from .errors import UntranslatableError
from .passing import RULES


def check(jaxpr: Any, caller: str = "an unknown place", *, functions: bool = False) -> None:
    """Refuse primitives that have no rule, also inside of functions. `caller` is the place in the
    user's source for equations without one; `functions`: whether `plain.FUNCTIONS` are rules, too.
    """
    for eqn in used(jaxpr)[0]:
        where = source_info_util.summarize(eqn.source_info) or caller
        inner = called(eqn)
        if inner is not None:
            check(getattr(inner, "jaxpr", inner), where, functions=functions)
            continue
        why = _refused(eqn, functions)
        if why is not None:
            raise UntranslatableError(f"the primitive {eqn.primitive.name}{why}", where)
        inside = [eqn.params.get(key) for key in ("jaxpr", "cond_jaxpr", "body_jaxpr")]
        for inner in filter(is_jaxpr, (*inside, *eqn.params.get("branches", ()))):
            check(getattr(inner, "jaxpr", inner), where, functions=functions)


def _refused(eqn: Any, functions: bool) -> str | None:
    """The end of the sentence that says why an equation can't be translated; None if it can."""
    name, params = eqn.primitive.name, eqn.params
    if not any(name in x for x in (RULES, WRITTEN_OUT, FUNCTIONS if functions else ())):
        return ""
    dtypes = [v.aval.dtype for v in (*eqn.invars, *eqn.outvars)]
    for dtype in dtypes:
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            return " on PRNG keys"
        if np.dtype(dtype).kind not in "biuf":
            return f" on {dtype} numbers"
    if name == "round" and params["rounding_method"] not in (0, 1):
        return f" by {params['rounding_method']}"
    if (name == "qr" and params["pivoting"]) or params.get("perturb_singular"):
        option = "pivoting" if name == "qr" else "perturb_singular"
        return f" with {option}=True"
    if name == "bitcast_convert_type" and dtypes[0].itemsize != dtypes[1].itemsize:
        return f" of {dtypes[0]} to {dtypes[1]}"
    return None
