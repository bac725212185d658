"""A vector field, from its traced program to what an engine runs of it.

- `lanes/`: for all lanes of a chunk at once, as arrays of JAX whose last axis is the lane.
- `ir.py`: the small language that a field is lowered to; `lowering/`: jaxpr to it, a rule a
    primitive; `scalarise.py`: small programs taken apart into scalars first.
- `equations.py`: which equations of a jaxpr are used, and what they call.
- `staging.py`: what else of a field is lowered, such as its derivatives.

A printer writes the language as source: `engines/julia/source.py` in Julia,
`engines/compiled/field.py` as LLVM IR.
"""

from .lowering import (
    Inputs as Inputs,
    lower as lower,
    UntranslatableError as UntranslatableError,
)
from .staging import parameters_of as parameters_of, staged as staged
