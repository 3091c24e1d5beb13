"""The documentation names what there is: modules, messages, telemetry events, files; and it uses plain words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sources import PACKAGE, ROOT, trees
from test_direction import all_imports

from djjobs import telemetry
from djjobs.work import messages

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = [
    page
    for page in (
        *sorted((ROOT / "docs").glob("*.md")),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
        ROOT / "tests" / "README.md",
    )
    if page.exists()
]
MOST_HOPS = 25
#: Words of our own for things that have a name in the field.
PRIVATE_WORDS = ("bench", "desk", "crew", "hire", "burial", "guardian", "courier", "bell", "pulse", "keeper")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- every module has its place in architecture.md --------------------------------------------------------------------

MODULES = {path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")}
NAMED = {(ROOT / "docs" / link).resolve() for link in re.findall(r"^\| \[[^]]*\]\((\S+\.py)\)", ARCHITECTURE, re.M)}


def test_architecture_names_every_module() -> None:
    missing = sorted(map(name_of, MODULES - NAMED))
    assert not missing, f"docs/architecture.md says nothing of {', '.join(missing)}"


def test_architecture_names_no_other_module() -> None:
    gone = sorted(map(name_of, NAMED - MODULES))
    assert not gone, f"docs/architecture.md names {', '.join(gone)}, which is not there"


def test_architecture_calls_a_module_by_its_path() -> None:
    for words, link in re.findall(r"\[([\w/]+\.py)\]\((\S+\.py)\)", ARCHITECTURE):
        assert link == f"../djjobs/{words}", f"[{words}]({link})"


def test_architecture_names_every_message() -> None:
    section = ARCHITECTURE.partition("## Processes")[2].partition("\n## ")[0]
    named = set(re.findall(r"\| `(\w+)` \|", section))
    assert named == set(messages.__all__) - {"Message"}


def test_architecture_names_every_telemetry_event() -> None:
    section = ARCHITECTURE.partition("## Telemetry")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(.*?)` \|", section, re.M)) == telemetry.NAMES


# -- a job's way ------------------------------------------------------------------------------------------------------

_HOP = re.compile(r"^(\d+)\. `([\w/]+)` → `([\w/]+)`( \*\(registered\)\*)?:", re.M)
HOPS = [(int(number), from_, to, bool(registered)) for number, from_, to, registered in _HOP.findall(ARCHITECTURE)]


def reachable() -> dict[str, set[str]]:
    """Of every module the modules that it imports, directly or through others."""
    found = {name: {target for target, _ in imports} for name, imports in all_imports(trees()).items()}
    while True:
        more = {name: set().union(*(found[other] for other in others)) for name, others in found.items()}
        if all(more[name] <= others for name, others in found.items()):
            return found
        found = {name: others | more[name] for name, others in found.items()}


def test_a_jobs_way_is_short() -> None:
    assert [number for number, *_ in HOPS] == list(range(1, len(HOPS) + 1))
    assert 15 < len(HOPS) <= MOST_HOPS


def test_no_hop_of_a_jobs_way_goes_backwards() -> None:
    """A module calls one that it imports, directly or not; or one that has registered a function with it."""
    imported = reachable()
    for number, from_, to, registered in HOPS:
        caller, callee = (f"djjobs.{name.replace('/', '.')}" for name in (from_, to))
        assert {caller, callee} <= set(imported), f"hop {number}: there is no {from_} or no {to}"
        user, used = (callee, caller) if registered else (caller, callee)
        assert used in imported[user], f"hop {number}: {user} does not import {used}"
        assert user not in imported[used], f"hop {number}: {used} imports {user}, too"


# -- links ------------------------------------------------------------------------------------------------------------


def links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


def anchors_of(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.M)
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor:
            assert anchor in anchors_of(target), f"{name_of(page)}: {link} has no such heading"


def test_there_are_links_to_look_at() -> None:
    assert len([link for page in PAGES for link in links_of(page)]) > 100


# -- words ------------------------------------------------------------------------------------------------------------


def private_words_in(text: str) -> set[str]:
    """The private words in a text, also as parts of names: `_Courier`, `bell_rings`. `make bench` is a command."""
    text = re.sub(r"make bench|tests/bench\S*", "", text)
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).lower())
    return {private for private in PRIVATE_WORDS for word in words if word in (private, f"{private}s", f"{private}es")}


@pytest.mark.parametrize(
    "path", [*PAGES, *sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "docs").glob("*.svg"))], ids=name_of
)
def test_words_are_those_of_the_field(path: Path) -> None:
    found = private_words_in(path.read_text())
    assert not found, f"{name_of(path)} says {', '.join(sorted(found))}; see docs/glossary.md for the word"


@pytest.mark.parametrize(
    "text", ["class _Courier:", "the Bell rings", "bells", "self._crew", "a keeper's job", "Bench"]
)
def test_a_private_word_is_found(text: str) -> None:
    assert private_words_in(text)


@pytest.mark.parametrize("text", ["benchmarks", "`make bench`", "hired", "tests/bench/run.py", "timekeeping"])
def test_other_words_are_not(text: str) -> None:
    assert not private_words_in(text)
