"""Whether a program can be lowered."""

from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util

from ..equations import called, used
from ..plain import RULES as WRITTEN_OUT
from .errors import UntranslatableError
from .passing import RULES


def check(jaxpr: Any, caller: str = "an unknown place") -> None:
    """Refuse primitives that have no rule, also inside of functions; `caller` is the place in the
    user's source for equations that have none of their own."""
    for eqn in used(jaxpr)[0]:
        where = source_info_util.summarize(eqn.source_info) or caller
        inner = called(eqn)
        if inner is not None:
            check(getattr(inner, "jaxpr", inner), where)
            continue
        why = _refused(eqn)
        if why is not None:
            raise UntranslatableError(f"the primitive {eqn.primitive.name}{why}", where)
        for key in ("jaxpr", "cond_jaxpr", "body_jaxpr"):
            if key in eqn.params:
                check(getattr(eqn.params[key], "jaxpr", eqn.params[key]), where)
        for branch in eqn.params.get("branches", ()):
            check(branch.jaxpr, where)


def _refused(eqn: Any) -> str | None:
    """The end of the sentence that says why an equation can't be translated; None if it can."""
    name, params = eqn.primitive.name, eqn.params
    if name not in RULES and name not in WRITTEN_OUT:
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
