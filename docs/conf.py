"""The site: `make docs` builds it into out/site. Nothing is executed but the cells that show a player, and nothing is fetched."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FunctionType

from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import flashlab  # noqa: E402
from docs._site import pages  # noqa: E402
from simulator.problem import spell_masks  # noqa: E402

project = "flashlab"
author = "flashlab contributors"
version = release = flashlab.__version__
html_show_copyright = False

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinxext.opengraph"]
# a console's prompt and what it prints aren't copied
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div.highlight pre"
ogp_site_name = "flashlab"
ogp_social_cards = {"enable": False}  # drawn by a font that it fetches
ogp_description_length = 160
exclude_patterns = ["_static", "lessons/taken"]  # what is handed out as it is
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"
nb_code_prompt_show = "Predict first; then show what this gives"
nb_code_prompt_hide = "Hide what this gives"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides = [("html", "text/html", 0)]

default_role = "literal"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = "flashlab"
html_theme_options = {
    # grounds on which every colour of the code keeps its contrast
    "light_css_variables": {"color-code-background": "#f3f5f9"},
}
html_favicon = "_static/favicon.svg"
html_static_path = ["_static", "lessons/players"]
html_extra_path = ["_extra"]  # what stands in the place of JupyterLite until `make lite` has built it
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


def parsable(signature: str | None) -> str | None:
    """A signature that Sphinx can parse: defaults that something makes are `...`, those that are functions have names."""
    return signature and re.sub(r"<function (\w+)[^>]*>", r"\1", re.sub(r"<factory>|<[\w.]+ object>", "...", signature))


_PUBLIC = [getattr(flashlab, name) for name in flashlab.__all__]
SPELLED = [x for x in _PUBLIC if isinstance(x, FunctionType) and hasattr(x, "__signature__")]
for _function in SPELLED:
    del _function.__signature__  # it spells masks, and Sphinx looks up each default in the source, which doesn't


def race(app: Sphinx, page: str, *_: object) -> None:
    """Scripts of the pages that show the race."""
    if page in ("race", "index"):
        app.add_css_file("race.css")
        for name in ("race-data.js", "race.js", *(["home.js"] if page == "index" else [])):
            app.add_js_file(name, loading_method="defer")


def setup(app: Sphinx) -> None:
    app.connect("html-page-context", race)
    app.connect("autodoc-before-process-signature", lambda _, obj, bound: spell_masks(obj) if obj in SPELLED else None)
    # `-t few` builds few of the pages of what was measured
    app.connect("config-inited", lambda app, _: pages.write(DOCS, few=app.tags.has("few")))
    app.connect("autodoc-process-signature", lambda *given: (parsable(given[5]), given[6]))
