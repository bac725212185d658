"""The error for programs that can't be lowered."""


class UntranslatableError(Exception):
    """A primitive that can't be lowered. The error names it, and its line in the user's source."""

    def __init__(self, what: str, where: str):
        super().__init__(f"{what} (at {where})")
        self.what = what
        self.where = where
