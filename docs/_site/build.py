"""Builds the site: `python -m docs._site.build OUT` (or `tests/run site`). Ends with status 1 and what is wrong if anything is.

The pages lie in docs/ as people read them on the forge. For the site they are copied next to a table of contents, the pages that are made
from the code, and the files that they show or link to. Sphinx then treats every warning as an error: a link to a page or heading that is
not there, an image that is missing, a page in no section. Links to other sites are listed in OUT/external-links.txt and not fetched.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs._site import reference
from docs._site.contents import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / "docs" / "_site"
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|<img src=\"([^\"]+)\"")
_EXTERNAL = re.compile(r"https?://[^\s)>\"`]+")
GENERATED = {
    "reference/commands": reference.commands,
    "reference/settings": reference.settings,
    "reference/pools": reference.pools,
    "reference/errors": reference.errors,
    "reference/events": reference.events,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs._site.build", description="Build the documentation's site.")
    parser.add_argument("out", type=Path, help="the folder for the pages; replaced if it is there")
    parser.add_argument("--source", type=Path, help="keep what is given to Sphinx in this folder, to look at")
    options = parser.parse_args(arguments)
    if wrong := list(misplaced()):
        print("\n".join(wrong), file=sys.stderr)
        return 1
    if options.out.exists():
        shutil.rmtree(options.out)
    with tempfile.TemporaryDirectory(prefix="jfg-site-") as scratch:
        source = options.source or Path(scratch)
        write_source(source)
        command = [
            sys.executable,
            "-m",
            "sphinx",
            "-q",
            "-W",
            "--keep-going",
            "-n",
            "-b",
            "html",
            "-c",
            str(CONFIGURATION),
        ]
        doctrees = ["-d", str(Path(scratch, ".doctrees"))]
        code = subprocess.run([*command, *doctrees, str(source), str(options.out)], check=False).returncode
    links = external_links()
    (options.out / "external-links.txt").write_text("".join(f"{link}\n" for link in links))
    print(
        f"{options.out / 'index.html'}: {len(pages()) + len(GENERATED)} pages, {len(links)} external links (listed, not fetched)"
    )
    return code


def pages() -> list[str]:
    """Return the names of all pages in docs/, without `.md`."""
    return sorted(path.stem for path in (ROOT / "docs").glob("*.md"))


def misplaced() -> Iterator[str]:
    """Yield a sentence for each page that is in no section or in several, and for each name of a section that is no page."""
    placed = [page for _, names in SECTIONS.values() for page in names]
    for page in pages():
        if placed.count(page) != 1:
            yield f"docs/{page}.md is in {placed.count(page)} sections of docs/_site/contents.py; put it into one"
    for page in set(placed) - set(pages()):
        yield f"docs/_site/contents.py names {page!r}, and there is no docs/{page}.md"


def write_source(source: Path) -> None:
    """Write what Sphinx reads into the folder."""
    docs = source / "docs"
    docs.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "docs").iterdir():
        if path.suffix in (".md", ".svg", ".png"):
            _copy(path, docs / path.name)
    for name, make in GENERATED.items():
        page = docs / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(_titled(make()))
    for linked in sorted(_linked_files()):
        target = source / linked.relative_to(ROOT)
        if linked.is_dir():
            for file in sorted(one for one in linked.rglob("*") if one.is_file() and "__pycache__" not in one.parts):
                _copy(file, source / file.relative_to(ROOT))
        elif not target.exists():
            _copy(linked, target)
    (source / "index.md").write_text(_index())
    for title, (sentence, names) in SECTIONS.items():
        (source / f"{_slug(title)}.md").write_text(_section(title, sentence, names))


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".md":
        # A page outside of docs/ is reached by links alone.
        orphan = "" if path.parent == ROOT / "docs" else "---\norphan: true\n---\n\n"
        target.write_text(orphan + _for_the_site(path))
    else:
        shutil.copyfile(path, target)


def _for_the_site(path: Path) -> str:
    """Return the page for readers of a site.

    Links to folders are plain text, because a site has no listing of them; links that are called by their file have the page's title;
    diagrams are text.
    """

    def plain(match: re.Match[str]) -> str:
        place = path.parent / match[2]
        return match[1] if place.is_dir() else match[0]

    text = re.sub(r"\[([^\]]+)\]\(([^)#\s]+)\)", plain, path.read_text()).replace("```mermaid", "```text")
    return _titled(text)


def _titled(text: str) -> str:
    """Return the text with a page's title in links that are called by their file."""

    def title(match: re.Match[str]) -> str:
        page = ROOT / "docs" / Path(match[1].partition("#")[0]).name
        first = page.read_text().partition("\n")[0] if page.is_file() else ""
        return f"[{first.removeprefix('# ')}]({match[1]})" if first.startswith("# ") else match[0]

    return re.sub(r"\[`?(?:docs/)?[\w-]+\.md`?\]\(((?:docs/|\.\./)?[\w-]+\.md(?:#[\w-]+)?)\)", title, text)


def _linked_files() -> set[Path]:
    """Return the files outside of docs/ that pages show or link to."""
    found: set[Path] = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for linked, image in _LINK.findall(page.read_text()):
            place = (page.parent / (linked or image)).resolve()
            if place.is_file() and place.is_relative_to(ROOT) and (ROOT / "docs") not in place.parents:
                found.add(place)
    return found


def _index() -> str:
    """Return the first page: the README, then the sections."""
    text = (ROOT / "README.md").read_text()
    sections = "\n".join(_slug(title) for title in SECTIONS)
    body = re.sub(r"<img src=\"([^\"]+)\"[^>]*alt=\"([^\"]+)\"[^>]*>", r"![\2](\1)", text)
    body = re.sub(
        r"\[([^\]]+)\]\(([^)#\s]+)\)", lambda match: match[1] if (ROOT / match[2]).is_dir() else match[0], body
    )
    return f"{_titled(body)}\n\n```{{toctree}}\n:hidden:\n:maxdepth: 2\n\n{sections}\n```\n"


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(title: str, sentence: str, names: Sequence[str]) -> str:
    made = [f"docs/{name}" for name in GENERATED] if title == "Reference" else []
    listed = "\n".join([*(f"docs/{name}" for name in names), *made])
    return f"# {title}\n\n{sentence}\n\n```{{toctree}}\n:maxdepth: 2\n\n{listed}\n```\n"


def external_links() -> list[str]:
    """Return the links to other sites in README and docs."""
    texts = [path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    return sorted({link.rstrip(".,;:") for text in texts for link in _EXTERNAL.findall(text)})


if __name__ == "__main__":
    raise SystemExit(main())
