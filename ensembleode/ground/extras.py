"""How the extras of this package are installed.

A release on PyPI changes this module, and the section "Install" of `docs/index.md` and `README.md`;
`tests/ground/test_extras.py` compares them.
"""

# What pip installs: as long as there is no release on PyPI, the clone in whose folder it is run.
_WHAT, _WHERE = "-e '.[{}]'", " in the clone of ensembleode"


def command(extra: str) -> str:
    """The command that installs an extra, such as `"store"`."""
    return f"pip install {_WHAT.format(extra)}"


def installing(extra: str) -> str:
    """The command, and where it is run: for an error or a table."""
    return command(extra) + _WHERE
