"""What is wrong with a program, or with what it does."""


class PtxError(RuntimeError):
    """PTX that isn't understood, or does what no kernel may do."""
