"""What can't be lowered."""


class UntranslatableError(Exception):
    """A primitive that has no rule here: its name, and where in the user's source it comes from."""

    def __init__(self, what: str, where: str):
        super().__init__(f"{what} (at {where})")
        self.what = what
        self.where = where
