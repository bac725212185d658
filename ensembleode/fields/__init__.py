"""A vector field, from its traced program to what an engine runs of it.

- `lanes/`: for all lanes of a chunk at once, as arrays of JAX whose last axis is the lane.
- `ir.py`: the small language that a field is lowered to, and `walking.py`, through what is written
    in it; `lowering/`: jaxpr to it, a rule a primitive; `scalarise.py`: small programs taken apart
    into scalars first.
- `plain/`: what indexes, pads or accumulates written in plainer equations, before it is lowered.
- What both share: `equations.py`, which equations are used and what they call; `movements.py`,
    what only moves data; `gather_scatter.py`, the arithmetic of indices; `combining.py`, by what
    numbers are reduced and scattered; `folding.py`, arithmetic on what is known; `products.py`.
- `sparsity.py`: which components of a result depend on which of the state.
- `staging.py`: what else of a field is lowered, such as its derivatives.

A printer writes the language as source: `engines/julia/source.py` in Julia,
`engines/compiled/field.py` as LLVM IR.
"""

from .lowering import Inputs as Inputs, lower as lower, UntranslatableError as UntranslatableError
from .staging import parameters_of as parameters_of, staged as staged
