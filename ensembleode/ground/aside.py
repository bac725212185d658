"""What a record carries with it that JAX does not see."""

from typing import Any

import jax.tree_util as jtu


@jtu.register_pytree_node_class
class Aside:
    """Something that lies in a record for as long as it stays the record that it is: taken apart by
    JAX (returned from `jit`, mapped over), the record is put together without.

    So it may be any object, with arrays or not, whether or not it can be hashed: no program is
    compiled for it, and no tracer in it leaks.

    >>> import jax
    >>> kept = Aside(lambda: 3)
    >>> kept.content(), jax.tree.leaves(kept), jax.tree.map(abs, kept).content
    (3, [], None)
    """

    __slots__ = ("content",)

    def __init__(self, content: Any = None):
        self.content = content

    def tree_flatten(self) -> tuple[tuple, None]:
        return (), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> "Aside":
        del aux, children
        return cls()
