"""The pages of docs/: all are in the site's navigation, and the names in them exist.

`make docs`, which builds the site, tests the links; this test looks for the pages beside it.
"""

import importlib
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BESIDE = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "recipes/README.md")
]

_NAMED = re.compile(r"(?<![\w/.-])(?:\.\./)*((?:recipes|tests|benchmarks)/[\w./-]*\w)")
_TEST = re.compile(r"`(test_\w+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")


def pages_in(nav):
    """Pages of a navigation: a page, or a title with a page, or a title with a part of the same kind."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_in(part)]


def missing_in(text):
    """Files and folders of the repository that a page names and that are not there."""
    return [path for path in _NAMED.findall(text) if not (ROOT / path).exists()]


def test_the_navigation_has_every_page_once():
    in_nav = pages_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(in_nav) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_recipes_and_tests_named_on_a_page_exist(page):
    assert missing_in(page.read_text()) == []


def test_a_missing_recipe_is_detected():
    assert missing_in("ntp chaos recipes/chaos/no-such.toml, [x](../../recipes/chaos/none.toml)") == [
        "recipes/chaos/no-such.toml",
        "recipes/chaos/none.toml",
    ]


@pytest.mark.parametrize("page", BESIDE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_pages_beside_the_site_lead_somewhere(page):
    assert [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()] == []


def test_tests_named_by_function_exist():
    functions = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    named = {name: page.name for page in PAGES for name in _TEST.findall(page.read_text())}
    assert {name: page for name, page in named.items() if name not in functions} == {}


PUBLIC = ["ntp_plugin", *(f"ntp_plugin.{name}" for name in ("errors", "planning", "telemetry", "testing"))]
ELSEWHERE = {
    "ntp_plugin.NtpError",
    "ntp_plugin.__version__",
    "ntp_plugin.plan",
    "ntp_plugin.read_run",
    "ntp_plugin.telemetry.Event",
}
"""Names that are on the page of another module, or on none."""


@pytest.mark.parametrize("module", [*PUBLIC, "ntp_plugin.megatron"])
def test_every_public_name_is_in_the_api_pages(module):
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    described = {*re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    described |= {f"ntp_plugin.{name}" for name in re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)}
    names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    assert names - described - ELSEWHERE == set()


def test_every_chaos_recipe_is_in_the_table_of_them():
    recipes = {path.stem for path in (ROOT / "recipes" / "chaos").glob("*.toml")}
    rows = re.findall(r"^\| (`.*?`) \|", (DOCS / "chaos.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == recipes
