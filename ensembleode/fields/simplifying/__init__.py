"""Rules that rewrite equations in plainer ones.

They replace the primitives that index, pad, sort, accumulate, factorise or call. What is left are
elementwise operations, movements, reductions, products, branches, loops, and reading and writing at
computed numbers ([`take`][] and [`put`][]).

- `writing.py`: applies the rules. `memory.py`: `take` and `put`.
- `indexing.py`, `axes.py`, `sliding.py`, `matrices.py`, `bits.py`: the rules.
- `functions.py`: rules of functions such as the incomplete gamma function, which not every target
    language has.

To add a primitive that others can express, write its
[`rule`][ensembleode.fields.simplifying.writing.rule], and a case in
`tests/fields/cases.py`.
"""

from . import (
    axes as axes,
    bits as bits,
    functions as functions,
    indexing as indexing,
    matrices as matrices,
    sliding as sliding,
)
from .memory import put as put, take as take
from .writing import (
    APART as APART,
    FUNCTIONS as FUNCTIONS,
    rule as rule,
    RULES as RULES,
    written_out as written_out,
)
