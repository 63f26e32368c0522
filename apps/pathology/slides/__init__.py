"""Slides in: readers, tissue, and where Camelyon16 marks tumour."""
