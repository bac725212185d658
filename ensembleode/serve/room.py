"""Limits of memory: counts how many bytes are held, by which object, and for which owner."""

from collections import Counter
from typing import Any


class MemoryRoom:
    """Counts the bytes that bodies, answers or connections hold, up to `most` in all and
    `most_of_one` for each owner. An object that is the only one may be larger."""

    def __init__(self, most: int, most_of_one: int):
        self.most, self.most_of_one = most, most_of_one
        self._held: dict[Any, tuple[str, int]] = {}
        self._of: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._of.total()

    def bytes_of(self, key: Any) -> int:
        """The bytes that the object `key` holds."""
        return self._held.get(key, ("", 0))[1]

    def has(self, key: Any, owner: str, size: int) -> bool:
        """Whether the object `key` may hold `size` bytes in all."""
        before = self.bytes_of(key)
        limits = (self.total, self.most), (self._of[owner], self.most_of_one)
        return all(held <= before or held - before + size <= most for held, most in limits)

    def put(self, key: Any, owner: str, size: int) -> None:
        """Count the object `key` as holding `size` bytes, until it is dropped."""
        self.drop(key)
        self._held[key] = owner, size
        self._of[owner] += size

    def drop(self, key: Any) -> None:
        owner, size = self._held.pop(key, ("", 0))
        self._of[owner] -= size
