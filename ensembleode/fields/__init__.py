"""From the traced program of a vector field to the code that an engine runs.

- `ir.py`: the small language that a field is lowered to. `walking.py` iterates over its statements
    and expressions. `lowering/` translates a jaxpr to it, with one rule for each primitive;
    `scalarise.py`, with the interpreter of `scalarising/`, takes small programs apart into scalars
    before that.
- `simplifying/`: rewrites primitives that index, pad or accumulate in plainer equations, before
    they are lowered.
- Modules that `scalarising/` and `lowering/` share: `equations.py` (which equations of a jaxpr are
    used, and which jaxprs they call), `movements.py` (primitives that only move data),
    `gather_scatter.py` (the arithmetic of indices), `combining.py` (the operations of reductions
    and scatters), `folding.py` (arithmetic on numbers that are known while tracing), `products.py`
    (the layout of matrix products).
- `staging.py`: traces the programs that are lowered besides the field. `derivatives/`: its
    Jacobian, and the programs that pull cotangents back through it.

To add a primitive: where simpler ones express it, write a function of these in `simplifying/`.
Otherwise it has a rule in `lowering/`, or, if it acts component by component, its name in
`equations.py` and a line in `engines/compiled/field/operations.py`, and for Julia a function in
`julia/src/primitives.jl` where Julia has no such one; `scalarising/rules.py` takes it apart. Its
case is one in `tests/fields/cases.py`.

The language is printed as source by `engines/julia/source.py` (Julia) and by
`engines/compiled/field/printer.py` (LLVM IR).
"""

from .lowering import Inputs as Inputs, lower as lower, UntranslatableError as UntranslatableError
from .staging import parameters_of as parameters_of, staged as staged
