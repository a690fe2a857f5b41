"""A griffe extension (mkdocs.yml): our docstrings put no empty line between their sections.

`Returns:` follows the last of `Args:` at once, and a parser of docstrings takes it for text.
"""

import re
from typing import Any

from griffe import Extension, Object

# Headings at the margin of the docstring, where text would not end in a colon.
HEADING = re.compile(r"(?<!\n)\n(?=(?:Args|Attributes|Returns|Raises|Source):)")


class DocstringSections(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = HEADING.sub("\n\n", obj.docstring.value)
