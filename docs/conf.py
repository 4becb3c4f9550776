"""Configuration of the documentation site: `make docs` builds it into docs/_build/html."""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
SOURCE = str(DOCS.parent / "src")
sys.path[:0] = [SOURCE, str(DOCS / "_ext")]
# The notebook runs in a folder and a process of its own: it too must show the package of this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])

import torch_ltc  # noqa: E402

project = "torch_ltc"
author = "The torch_ltc authors"
release = version = torch_ltc.__version__
copyright = author

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "docstrings",
    "reference_tables",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
# Docstrings mark code as Markdown does, by single backticks.
default_role = "code"
smartquotes = False
nitpicky = True
# Python's, PyTorch's and JAX's own names are not part of this site, and their inventories need a network.
nitpick_ignore_regex = [
    ("py:.*", r"(?!torch_ltc\.).*"),
    # Private names and type variables have no entries.
    ("py:class", r".*\._\w+"),
    ("py:(class|obj)", r".*\.(CheckFunction|Error|Function|Item|Kind|P|R|Result)"),
]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
# Anchors of headings are those that Markdown has everywhere else.
myst_heading_anchors = 4

nb_execution_mode = "auto"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_execution_in_temp = True

autosummary_generate = True
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "signature"
# With them the navigation of each page is a copy of every name of the package.
toc_object_entries = False

html_theme = "furo"
html_title = f"torch_ltc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
