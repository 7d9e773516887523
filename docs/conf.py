"""How Sphinx builds the site: `make docs`.

The pages are Markdown that reads as well on a plain git host, so links are paths. README.md and CONTRIBUTING.md lie
outside this folder: the site shows them as its pages `index` and `contributing`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import fusedreduce

DOCS = Path(__file__).resolve().parent
# Files of the checkout that are pages of the site.
OUTSIDE = {"README.md": "index", "CONTRIBUTING.md": "contributing"}

project = "fusedreduce"
copyright = "the fusedreduce authors"
version = release = fusedreduce.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_static"]

myst_heading_anchors = 6  # links to headings as git hosts name them
default_role = "py:obj"  # docstrings put code in single backticks: a link where it names something, else just code

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
napoleon_use_rtype = False

html_theme = "pydata_sphinx_theme"
html_title = "fusedreduce"
html_sidebars = {"**": ["sidebar-nav-bs"]} | dict.fromkeys(
    ("index", "wires", "genindex", "search"), []
)
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 9,
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_toc_level": 2,
    "pygments_light_style": "github-light",
    "pygments_dark_style": "github-dark",
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}

_OUTSIDE_RESOURCE = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"(?:https?:)?//[^>]*>"
)
_SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns|Yields):")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def relinked(text: str, folder: PurePosixPath, page: PurePosixPath) -> str:
    """`text`, whose links are relative to `folder` of the checkout, with links relative to `page` in docs/.

    A file that is no page of the site, such as a source file, is named in place of the link.
    """

    def link(found: re.Match[str]) -> str:
        picture, label, target, heading = found.groups()
        path = os.path.normpath(folder / target)
        if path in OUTSIDE:
            path = f"docs/{OUTSIDE[path]}.md"
        if not path.startswith("docs/"):
            return f"`{path}`" if label.strip("`") == path else f"{label} (`{path}`)"
        return f"{picture}[{label}]({os.path.relpath(path, page.parent)}{heading or ''})"

    return _LINK.sub(link, text)


def read_from_checkout(app: Sphinx, name: str, content: list[str]) -> None:
    """Shows README.md and CONTRIBUTING.md, with the toctrees of their pages, and mends the links of all pages."""
    page = PurePosixPath("docs", app.env.doc2path(name, base=False))
    if page.suffix != ".md":
        return
    content[0] = relinked(content[0], page.parent, page)
    for file, shown_as in OUTSIDE.items():
        if name == shown_as:
            app.env.note_dependency(str(DOCS.parent / file))
            text = relinked((DOCS.parent / file).read_text(), PurePosixPath(), page)
            _, fence, toctree = content[0].partition("```{toctree}")
            content[0] = f"{text}\n{fence}{toctree}"


def keep_indented_blocks(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Shows blocks that a docstring indents as they are, as Markdown does, unless they are of `Args:` and its like."""
    kept: list[str] = []
    in_section = in_block = False
    for line in lines:
        if line and not line.startswith("    "):
            in_section = _SECTION.fullmatch(line) is not None
            kept += [""] if in_block else []
            in_block = False
        elif line and not in_section and not in_block:
            kept += ["", "::", ""]
            in_block = True
        kept.append(line)
    lines[:] = kept


def refuse_outside_resources(app: Sphinx, error: Exception | None) -> None:
    """The site works without a network: no page loads a script, a style or a picture from elsewhere."""
    for page in Path(app.outdir).rglob("*.html") if error is None else ():
        if found := _OUTSIDE_RESOURCE.search(page.read_text()):
            raise ExtensionError(f"{page} loads from elsewhere: {found[0]}")


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_from_checkout)
    # ahead of napoleon, which is at 500
    app.connect("autodoc-process-docstring", keep_indented_blocks, priority=400)
    app.connect("build-finished", refuse_outside_resources)
