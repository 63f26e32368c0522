"""The applications: each goes from raw scans to an engine."""

from pathlib import Path

APPS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/train.py")))
"""Names of the apps: their folders."""
