"""Scans of slides: maps of probability, what they leave, and how they score."""
