"""What the reference makes of docstrings."""

import re
from typing import Any

import griffe


EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Fences examples as of doctest, which Markdown would take for quotations of quotations; and
    takes no method of both clients of a service for one that is awaited."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of every module, class, function and attribute."""
        if isinstance(obj, griffe.Function) and any(
            str(d.value) == "_both" for d in obj.decorators
        ):
            obj.labels.discard("async")
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
