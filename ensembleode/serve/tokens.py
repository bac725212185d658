"""Bearer tokens, which say whose requests are answered."""

import hashlib
import hmac
import os
from collections.abc import Iterable


VARIABLE = "ENSEMBLEODE_TOKENS"


class TokensError(ValueError):
    """There are no tokens where some were expected."""


class Tokens:
    """The valid tokens. A token is compared with all of them, as digests, so that the time that
    this takes reveals nothing."""

    def __init__(self, tokens: Iterable[str]):
        self._digests = [_digest(x) for x in tokens]
        if not self._digests:
            raise TokensError("tokens is empty: give one at least, or None to let everybody in.")

    def __len__(self) -> int:
        return len(set(self._digests))

    def owner(self, authorization: str | None) -> str | None:
        """The owner, given by the token's digest, of an `Authorization` header with one of these
        tokens; else None."""
        kind, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        found = sum(hmac.compare_digest(given, digest) for digest in self._digests)
        return given.hex()[:32] if found and kind.lower() == "bearer" else None


def read(path: str | os.PathLike | None) -> Tokens | None:
    """The tokens in a file, one a line (`#` begins a comment); without a file, those in the
    variable `ENSEMBLEODE_TOKENS`, separated by white space or commas, or None if that isn't set.
    Raises `TokensError` where there are none."""
    if path is not None:
        with open(path, encoding="utf-8") as file:
            tokens = [x for line in file if (x := line.partition("#")[0].strip())]
        where = f"the file {os.fspath(path)!r}"
    else:
        text = os.environ.get(VARIABLE)
        if text is None:
            return None
        tokens = text.replace(",", " ").split()
        where = f"the environment variable {VARIABLE}"
    if not tokens:
        raise TokensError(f"{where} has no tokens; put one in, or drop it to let everybody in.")
    return Tokens(tokens)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
