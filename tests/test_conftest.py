from typing import Any

import pytest
import torch

from tests.conftest import pytest_collection_modifyitems


class Item:
    """A collected test."""

    def __init__(self, *markers):
        self.markers = [getattr(pytest.mark, name) for name in markers]

    def get_closest_marker(self, name):
        return next((each for each in self.markers if each.name == name), None)

    def add_marker(self, marker):
        self.markers.append(marker)


@pytest.mark.parametrize(("there", "added", "words"), [(True, "filterwarnings", ("default",)), (False, "skip", ())])
def test_a_warning_fails_no_test_on_a_gpu(monkeypatch, there, added, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    on_gpu, other = Item("gpu"), Item("slow")
    items: Any = [on_gpu, other]
    pytest_collection_modifyitems(items)
    assert [(each.name, each.args) for each in on_gpu.markers[1:]] == [(added, words)]
    assert len(other.markers) == 1
