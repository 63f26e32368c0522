"""Fused variants of what the networks, losses and augmentation compute, each beside its twin in plain torch."""
