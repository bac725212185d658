"""Objects in a pytree that JAX does not see."""

from typing import Any

import jax.tree_util as jtu


@jtu.register_pytree_node_class
class HiddenObject:
    """An object of any kind in a pytree. It is lost when JAX takes the pytree apart and rebuilds it
    (because it is returned from `jit`, or mapped over).

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
