"""The documentation site: it builds, every page is reachable, and nothing is fetched from other sites."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Attributes whose address a browser fetches unasked. Links (a href) wait for a click.
FETCHED = {"img": "src", "script": "src", "iframe": "src", "source": "src", "link": "href"}
# Kinds of `link` that describe a page and are not fetched.
TOLD = {"canonical", "prev", "next", "alternate"}


class Resources(HTMLParser):
    """Addresses that a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(FETCHED.get(tag, ""))
        if address and not (tag == "link" and values.get("rel") in TOLD):
            self.found.append(address)


def is_elsewhere(address: str) -> bool:
    return address.startswith(("http:", "https:", "//"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built outside the repository because builds leave a cache behind."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


def test_every_page_is_built_and_in_the_navigation(site: Path) -> None:
    listed = set(re.findall(r'= "([\w-]+\.md)"', (ROOT / "zensical.toml").read_text()))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {path.removesuffix(".md") for path in listed} <= {path.stem for path in site.glob("*.html")}


def test_what_pages_fetch_is_there_and_nowhere_else(site: Path) -> None:
    pages = list(site.glob("*.html"))
    assert pages
    for page in pages:
        resources = Resources()
        resources.feed(page.read_text())
        assert len(resources.found) > 2, "the parser sees nothing"
        for address in resources.found:
            assert not is_elsewhere(address), f"{page.name} fetches {address}"
            # The 404 page is served at any path, so its addresses begin at the root.
            if page.name != "404.html":
                assert (site / address.partition("?")[0]).exists(), f"{page.name}: {address} is missing"
    for sheet in site.rglob("*.css"):
        addresses = re.findall(r"url\(['\"]?([^'\")]+)", sheet.read_text())
        assert not [address for address in addresses if is_elsewhere(address)], sheet


def test_the_check_sees_what_is_fetched_from_elsewhere() -> None:
    resources = Resources()
    resources.feed('<link rel="stylesheet" href="https://fonts.example/x.css"><a href="https://a.example">')
    assert resources.found == ["https://fonts.example/x.css"]
    assert is_elsewhere(resources.found[0])


def test_the_api_reference_has_every_public_name(site: Path) -> None:
    import tokenmerge

    page = (site / "api.html").read_text()
    assert [name for name in tokenmerge.__all__ if not re.search(rf'id="tokenmerge\.[\w.]*{name}"', page)] == []


def test_generated_pages_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / "pages.py"), run_name="__main__")
    assert end.value.code == 0
