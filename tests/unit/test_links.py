"""Links between the repository's documents and notebooks lead to files and headings that exist."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs").glob("[egit]*/*.md")),  # evidence, guides, internals, tutorials
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
_LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def _text(page):
    text = page.read_text()
    if page.suffix != ".ipynb":
        return _CODE_BLOCK.sub("", text)
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def _anchors(page):
    """Returns the anchors of the headings of a page, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    for target, anchor in _LINK.findall(_text(page)):
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor:
            assert anchor[1:] in _anchors(file), target + anchor


def test_badges_of_notebooks_open_the_notebook_itself():
    conf = (ROOT / "docs" / "conf.py").read_text()
    repository = re.search(r'"GITHUB_REPOSITORY", "(.+?)"', conf)[1]
    for page in (ROOT / "notebooks").glob("*.ipynb"):
        path = f"github/{repository}/blob/main/notebooks/{page.name}"
        assert f"https://colab.research.google.com/{path}" in _text(page)
        assert f"git+https://github.com/{repository}" in page.read_text()
