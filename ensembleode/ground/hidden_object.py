"""Objects that a record carries along, and that JAX does not see."""

from typing import Any

import jax.tree_util as jtu


@jtu.register_pytree_node_class
class HiddenObject:
    """An object of any kind that stays in a record as long as the record is not rebuilt. When JAX
    takes the record apart (because it is returned from `jit`, or mapped over), the record is put
    together without the object.

    >>> import jax
    >>> kept = HiddenObject(lambda: 3)
    >>> kept.content(), jax.tree.leaves(kept), jax.tree.map(abs, kept).content
    (3, [], None)
    """

    __slots__ = ("content",)

    def __init__(self, content: Any = None):
        self.content = content

    def tree_flatten(self) -> tuple[tuple, None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "HiddenObject":
        return cls()
