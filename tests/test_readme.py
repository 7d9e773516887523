"""The README's example of the kernels runs as it stands, and the README names what exists."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_kernel_example_runs_and_does_what_its_comments_say() -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "dispatch.pack" in block]
    seen: dict[str, object] = {}
    exec(code, seen)
    gradients, totals = seen["gradients"], seen["totals"]
    assert isinstance(gradients, list) and gradients[2] is None
    assert gradients[0].abs().max() < 1.0, "divided by 4, and halved"
    stored = torch.stack([4.0 * one.double().square().sum() for one in gradients[:1]])
    torch.testing.assert_close(totals.parameter_sums[:1], stored, rtol=1e-6, atol=0)  # type: ignore[attr-defined]


def test_linked_files_exist() -> None:
    root = Path(__file__).resolve().parent.parent
    for page in (root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))):
        for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^):]+)\)", page.read_text())):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            if heading:
                assert heading in _headings(linked), f"{page.name} links to {target}#{heading}"


def _headings(page: Path) -> set[str]:
    """As links name them: in small letters, without punctuation, with hyphens for blanks."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
