"""Sphinx's configuration. Every warning is an error of the build; nothing is fetched."""

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
