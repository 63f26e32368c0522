"""Spleen segmentation in CT (MSD Task09), and any dataset in its layout."""
