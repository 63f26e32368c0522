"""Measurements of our recipes against what people use today."""
