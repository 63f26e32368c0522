"""Patches: which there are, where their pixels lie, and the batches made of them."""
