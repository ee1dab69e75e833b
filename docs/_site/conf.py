"""Sphinx's configuration. Every warning is an error of the build; nothing is fetched."""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.osutil import relative_uri

from fractional_gpu import __version__

project = "jupyter-fractional-gpu"
author = "the authors of jupyter-fractional-gpu"
version = release = __version__
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["provisioner", "tests", "examples/**/*.md"]
nitpicky = True
html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": True,
    "header_links_before_dropdown": 5,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
copyright = "the authors, under the BSD 3-Clause licence"  # noqa: A001 - Sphinx's name


def setup(app: Sphinx) -> None:
    """Make screenshots links to themselves: a phone shows them too small to read."""
    app.connect("doctree-resolved", link_screenshots)


def link_screenshots(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Put a link to the picture around each PNG file."""
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].endswith(".png"):
            file = app.env.images[image["uri"]][1]
            link = nodes.reference(refuri=relative_uri(app.builder.get_target_uri(page), f"_images/{file}"))
            image.replace_self(link)
            link += image
