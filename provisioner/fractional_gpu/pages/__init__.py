"""HTML pages with their templates and styles.

The pages load no other files, work without scripts, and are readable on light and dark screens and on paper.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


@cache
def templates(package: str) -> "jinja2.Environment":
    """Return the templates in a package's `templates` folder. They escape all values except `Markup` and `Svg`."""
    import jinja2  # noqa: PLC0415 - 40 ms, and few commands make pages

    loader = jinja2.PackageLoader(package)
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def render(template: str, **values: Any) -> str:  # noqa: ANN401 - what the template needs
    """Render a template of this package, either as a page or as a part that other templates insert unescaped."""
    from markupsafe import Markup  # noqa: PLC0415 - as above

    return Markup(templates(__name__).get_template(template).render(values))  # noqa: S704 - the template escapes
