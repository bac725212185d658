"""From the jaxpr of a vector field to source code in another language.

- `ir.py`: the small language that a field is lowered to.
- `lower.py`: jaxpr to it; a rule a primitive.
- `staging.py`: what else of a field is lowered, such as its derivatives.
- `scalarise.py`: small programs taken apart into scalars first, by the lanes engine's interpreter.

A printer writes it as source: `engines/julia/source.py` in Julia, `engines/compiled/field.py` as
LLVM IR.
"""

from .lower import Inputs as Inputs, lower as lower, UntranslatableError as UntranslatableError
from .staging import parameters_of as parameters_of, staged as staged
