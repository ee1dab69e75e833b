"""What readers are told to install. At a release change `PACKAGE` and run `python -m docs._site.installing`: it changes every page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fractional_gpu import __version__

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = f"jupyter_fractional_gpu-{__version__}-py3-none-any.whl"
"""The wheel that readers build (docs/start.md says how), because nothing is published. Published: `jupyter-fractional-gpu`."""
IS_FILE: Final = PACKAGE.endswith(".whl")
BUILD: Final = "python3 -m pip wheel --no-deps ."
_INSTALLS: Final = re.compile(r"pip install|--plugin|^COPY .*\.whl")
_NAME: Final = re.compile(
    r"(?P<folder>[\w$./~-]*/)?(?:jupyter_fractional_gpu-[\w.+${}-]+?-py3-none-any\.whl|jupyter-fractional-gpu)(?![\w/-])"
)


def pages() -> Iterator[Path]:
    """Yield the documents and examples."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))
    for pattern in ("*.md", "*.py", "Dockerfile*", "*.sh"):
        yield from sorted((ROOT / "examples").rglob(pattern))


def installing(text: str) -> Iterator[re.Match[str]]:
    """Yield what the text's commands install of this package, `folder` being where the file is."""
    for line in text.splitlines():
        if _INSTALLS.search(line):
            yield from _NAME.finditer(line)


def current(text: str) -> str:
    """Return the text with commands that install `PACKAGE`, and with this version in Dockerfiles."""

    def named(match: re.Match[str]) -> str:
        package = PACKAGE.replace(__version__, "${VERSION}") if "${VERSION}" in match[0] else PACKAGE
        return f"{match['folder'] or './'}{package}" if IS_FILE else PACKAGE

    lines = re.sub(r"(?m)^ARG VERSION=.*", f"ARG VERSION={__version__}", text).splitlines(keepends=True)
    return "".join(_NAME.sub(named, line) if _INSTALLS.search(line) else line for line in lines)


def main() -> None:
    """Change the pages."""
    for page in pages():
        text = page.read_text()
        if (fresh := current(text)) != text:
            page.write_text(fresh)


if __name__ == "__main__":
    main()
