"""Equations written in plainer ones. Of all that indexes, pads, sorts, accumulates or calls, what
is left are elementwise operations, movements, reductions, products, branches, loops, and reading
and writing at computed numbers: [`take`][] and [`put`][].

- `writing.py`: what an equation is in plainer ones; `memory.py`: `take` and `put`.
- `indexing.py`, `axes.py`, `sliding.py`: the rules.

To add a primitive, write its [`rule`][ensembleode.fields.plain.writing.rule] where others can say
what it does, and a case in `tests/fields/test_primitives.py`.
"""

from . import axes as axes, indexing as indexing, sliding as sliding
from .memory import put as put, take as take
from .writing import rule as rule, RULES as RULES, written_out as written_out
