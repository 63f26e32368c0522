"""Fused variants of network, loss and augmentation operations, each with its plain torch equivalent."""
