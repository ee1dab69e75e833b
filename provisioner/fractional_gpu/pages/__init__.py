"""HTML pages, with their templates and styles: they load nothing, need no script, and fit light and dark screens and paper."""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jinja2


@cache
def templates(package: str) -> "jinja2.Environment":
    """Return the templates of a package, in its folder `templates`. What they are given is escaped, but for `Markup` and `Svg`."""
    import jinja2  # noqa: PLC0415 - 40 ms, for commands that seldom make a page

    loader = jinja2.PackageLoader(package)
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def render(template: str, **values: Any) -> str:  # noqa: ANN401 - what the template needs
    """Return a page, or a part that other templates insert as it is, by one of the templates here."""
    from markupsafe import Markup  # noqa: PLC0415 - as above

    return Markup(templates(__name__).get_template(template).render(values))  # noqa: S704 - the template escapes
