"""Docstrings are Markdown, and autodoc reads reStructuredText.

The first paragraph is handed on as text in which only code in backticks means something; summaries are made of it. What
follows goes into a directive that parses Markdown.
"""

import re
from typing import Any

from docutils import nodes
from docutils.utils import new_document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

# Characters that mean something in reStructuredText; code is left alone.
MEANINGFUL = re.compile(r"(`[^`]*`)|([*|]|(?<=\w)_(?!\w))")


class Markdown(SphinxDirective):
    """Content that is parsed as Markdown inside a reStructuredText page."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the parsed content."""
        document = new_document(self.get_source_info()[0], self.state.document.settings)
        MystParser().parse("\n".join(self.content), document)
        return document.children


def convert(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Rewrite the lines of one docstring."""
    first, _, rest = "\n".join(lines).strip().partition("\n\n")
    lines[:] = MEANINGFUL.sub(lambda match: match[1] or "\\" + match[2], first).splitlines()
    if rest.strip():
        lines += ["", ".. markdown::", "", *(f"   {line}" for line in rest.splitlines()), ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive and the hook."""
    app.add_directive("markdown", Markdown)
    app.connect("autodoc-process-docstring", convert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
