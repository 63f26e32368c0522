"""Measurements of our recipes against what people use today."""

from pathlib import Path
from typing import Any

import yaml

GUIDES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("guides.yaml").read_text(encoding="utf-8"))
"""What is known of each app that has a guide to be compared with, `benchmarks/peers/APP_guide.py`."""
