"""Programs made from a field: its Jacobian, and those that pull cotangents back through it.

- `sparsity.py`: which components of a result depend on which components of the state.
    `jacobian.py`, `directions.py`: the Jacobian as a program. `elimination.py`: the order in which
    a sparse matrix is factorised.
- `transposes.py`: programs that pull cotangents back; `residuals.py`: the same in two parts, of
    which one runs forwards; `outer_products.py`: cotangents of parameters as products.
- `forwarding.py`: arrays that are only moved, read where they come from.
"""
