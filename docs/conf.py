# SPDX-License-Identifier: Apache-2.0
"""The site: `python -m sphinx -W --keep-going -b html docs docs/_build/html`.

Nothing is fetched while it is built.
"""

import sys
from pathlib import Path

import normpre_optax

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "normpre_optax"
author = "the normpre_optax authors"
project_copyright = "the normpre_optax authors"
version = release = normpre_optax.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "myst_nb",
    "public_names",
    "pages",
]
exclude_patterns = ["_build", "_ext", "_static", "**.ipynb_checkpoints"]
default_role = "code"  # some docstrings have single backticks
smartquotes = False  # "--flag" stays as it is
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"normpre_optax {release}"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# Code on the pages is run by tests/test_docs.py, notebooks by the build.
nb_execution_mode = "force"
nb_execution_timeout = -1  # a loaded machine is no error
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False
