"""The programs of a field's derivatives: its Jacobian, and programs that pull cotangents back.

- `sparsity.py`: which components of a result depend on which components of the state.
    `jacobian.py`, `directions.py`: the Jacobian as a program. `elimination.py`: the order in which
    a sparse matrix is factorised.
- `transposes.py`: programs that pull cotangents back; `residuals.py`: the same in two parts, of
    which one runs forwards; `outer_products.py`: cotangents of parameters as products.
- `forwarding.py`: reads arrays that are only moved at the place that they come from.
"""
