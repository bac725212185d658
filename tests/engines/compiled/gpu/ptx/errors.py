"""The errors of a program, and of its execution."""


class PtxError(RuntimeError):
    """PTX that isn't understood, or does what no kernel may do."""
