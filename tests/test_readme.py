"""Links of README.md, CONTRIBUTING.md and docs/ lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path


def test_linked_files_exist() -> None:
    root = Path(__file__).resolve().parent.parent
    for page in (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))):
        for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", page.read_text())):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            if heading:
                assert heading in _headings(linked), f"{page.name} links to {target}#{heading}"


def _headings(page: Path) -> set[str]:
    """As links name them: in small letters, without punctuation, with hyphens for blanks."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
