"""What is known of single slides of Camelyon16."""

from pathlib import Path

# Source: the README of the CAMELYON16 data. The first is a duplicate, the second is marked in part.
DUPLICATE, EXCLUDED = "test_049", ("test_049", "test_114")
# Slides with tumour that is not marked, as two public pipelines list them; the release's own list was not at hand.
MARKED_IN_PART = frozenset(
    f"tumor_{number:03d}"
    for number in (10, 15, 18, 20, 25, 29, 33, 34, 44, 46, 51, 54, 55, 56, 67, 79, 85, 92, 95, 110)
)


def is_scored(slide: str) -> bool:
    """Return whether Camelyon16 scores the lesions of a slide of this name, such as `test_049`, suffix or not."""
    return Path(slide).stem.lower() not in EXCLUDED
