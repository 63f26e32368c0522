"""A loopback server, a place to download to, and waiting that takes no time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_scripts.download import Patience
from tests.faulty_server import CONTENT, FaultyServer, running


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the traffic on the loopback device also where a proxy is configured."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    """Return a server of CONTENT."""
    with running(CONTENT) as server:
        yield server


@pytest.fixture
def waits() -> list[float]:
    """Return the seconds that `patience` was asked to wait so far."""
    return []


@pytest.fixture
def patience(waits: list[float]) -> Patience:
    """Return the patience for four attempts, without the waiting."""
    return Patience(timeout=5, attempts=4, sleep=waits.append)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a path in a folder that is not there yet."""
    return tmp_path / "data" / "a.tar"
