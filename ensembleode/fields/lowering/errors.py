"""The error for programs that can't be lowered."""


class UntranslatableError(Exception):
    """A primitive has no rule here. The error names it, and the line of the user's source it comes
    from."""

    def __init__(self, what: str, where: str):
        super().__init__(f"{what} (at {where})")
        self.what = what
        self.where = where
