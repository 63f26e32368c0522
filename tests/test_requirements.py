"""constraints.txt and the requirements.lock: one version of each package, each archive by its digest, no address."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {plain(re.split(r"[\[>=]", requirement)[0]) for requirement in requirements}


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {plain(name): version for name, version in (line.split("==") for line in lines if not line.startswith("#"))}


def lock() -> dict[str, tuple[str, list[str]]]:
    """Return version and digests of each package."""
    text = re.sub(r"^#.*\n", "", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    found = {}
    for entry in text.replace("\\\n", " ").splitlines():
        pin, *words = entry.split(" --hash=sha256:")
        name, version = pin.split(" ;")[0].strip().split("==")
        found[plain(name)] = version, [word.strip() for word in words]
    return found


def test_the_readme_leads_to_what_may_be_opened():
    told = (ROOT / "SECURITY.md").read_text()
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text()
    for word in ("run folders", "trusted like programs", "in private", "requirements.lock", "sbom.json", "BASE_IMAGE"):
        assert word in told.lower() or word in told


def test_every_dependency_and_every_extra_is_constrained():
    extras = PROJECT["optional-dependencies"].values()
    wanted = names([*PROJECT["dependencies"], *(each for extra in extras for each in extra)])
    assert wanted - constraints().keys() == set()


def test_the_lock_holds_what_the_image_needs_in_the_versions_of_the_constraints():
    found, pinned = lock(), constraints()
    wanted = names([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["rtx"], "cucim-cu13", "setuptools"])
    assert wanted - found.keys() == set()
    assert {name: version for name, (version, _) in found.items() if pinned.get(name, version) != version} == {}


def test_each_archive_is_known_by_its_digest():
    for name, (_, digests) in lock().items():
        assert digests, name
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests), name


@pytest.mark.parametrize("name", ["constraints.txt", "requirements.lock"])
def test_no_address_of_an_index_is_in_it(name: str):
    assert not re.search(r"://|index-url|find-links|trusted-host|file:", (ROOT / name).read_text())
