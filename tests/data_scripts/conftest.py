"""A loopback server, a place to download to, and waiting that takes no time."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from medspeed.data_scripts import fetch
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
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Give up after four attempts; return the seconds waited between them so far, which take no time."""
    waits: list[float] = []
    monkeypatch.setattr(fetch, "ATTEMPTS", 4)
    monkeypatch.setattr(fetch, "TIMEOUT", 5)
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a path in a folder that is not there yet."""
    return tmp_path / "data" / "a.tar"
