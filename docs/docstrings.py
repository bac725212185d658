"""What the reference makes of docstrings."""

import re
from typing import Any

import griffe


EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Fences examples as of doctest, which Markdown would take for quotations of quotations."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
