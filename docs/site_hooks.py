"""Hooks of MkDocs: files of the repository outside docs/ become pages, and relative links hold there and on the site.

A link is written as a repository browser follows it: from docs/train.md, `../SECURITY.md`. On the site, docs/ is the
root, and what lies beside docs/ is found under its own path.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SHOWN = (
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", "apps/*/README.md", "benchmarks/LOG.md",
    "benchmarks/records/*/*.md", "benchmarks/records/*/*.png",
)  # fmt: skip
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files of the repository that the site shows, each under its own path."""
    for path in sorted(found for pattern in SHOWN for found in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page whose links lead to where the site has the files; a link to a folder leads to its README."""
    source = page.file.src_uri
    here = source if (ROOT / source).is_file() else f"docs/{source}"
    return _LINK.sub(lambda found: found[1] + _on_site(found[2], here, source), markdown)


def _on_site(link: str, here: str, source: str) -> str:
    """Return a link of a repository's file (`here`) for the page that is made of it (`source`)."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(here), link))
    if (ROOT / target).is_dir():
        target += "/README.md"
    target = "index.md" if target == "README.md" else target.removeprefix("docs/")
    return posixpath.relpath(target, posixpath.dirname(source) or ".")
