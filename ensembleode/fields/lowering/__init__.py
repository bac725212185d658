"""From a jaxpr to the small language of `ir.py`, with one rule for each primitive.

- `lower.py`: a whole function; `checking.py`: whether every primitive has a rule.
- `passing.py`: one pass over the jaxpr, which collects statements; `values.py`: the values that it
    computes with.
- `elementwise.py`, `movement.py`, `memory.py`, `reductions.py`, `products.py`,
    `control_flow.py`: the rules.

To add a primitive that others can't express (see `simplifying/`), write its
[`rule`][ensembleode.fields.lowering.passing.rule] (or, where it acts element by element, add its
name to `equations.ELEMENTWISE` and to the engines, see `fields/__init__.py`), and a case in
`tests/fields/cases.py`.
"""

from .errors import UntranslatableError as UntranslatableError
from .lower import Inputs as Inputs, lower as lower
