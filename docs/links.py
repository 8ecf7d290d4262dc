"""A hook of mkdocs: what the pages link outside of docs/ comes with the site, below ``files/``.

So a link such as ``../benchmarks/results/masks_cpu.md`` works in the checkout and on the site. A
Markdown file becomes a page, whose own links are followed; everything else is copied. A link to
something that does not exist is left as it is, and fails the strict build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
OUTSIDE = "files/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that the pages link outside of docs/, and those that these link."""
    todo = [file for file in files if file.is_documentation_page()]
    while todo:
        page = todo.pop()
        if page.src_uri.endswith(".ipynb"):
            continue
        for path in _outside(_source(page).read_text(encoding="utf-8"), _source(page)):
            uri = OUTSIDE + path.relative_to(ROOT).as_posix()
            if files.get_file_from_path(uri) is None:
                file = File.generated(
                    config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV
                )
                files.append(file)
                todo += [file] if file.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links to such files to where they are on the site, and keep them out of the search."""
    if page.file.src_uri.startswith(OUTSIDE):
        page.meta["search"] = {"exclude": True}
    source = _source(page.file)
    here = os.path.dirname(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        path = (source.parent / link[1]).resolve()
        uri = _uri(path)
        return os.path.relpath(uri, here) if files.get_file_from_path(uri) else link[1]

    return LINK.sub(turned, markdown)


def _outside(text: str, source: Path) -> list[Path]:
    """The files outside of docs/ that a page links."""
    paths = ((source.parent / link).resolve() for link in LINK.findall(text))
    return [path for path in paths if path.is_file() and _uri(path).startswith(OUTSIDE)]


def _source(file: File) -> Path:
    return Path(file.abs_src_path or "")


def _uri(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    return OUTSIDE + path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
