"""Measurements of our recipes against what people use today."""

from pathlib import Path

GUIDES = sorted(path.stem for path in Path(__file__).parent.glob("guides/[a-z]*.py"))
"""The apps that have a guide to be compared with: the modules of `benchmarks/guides`."""
