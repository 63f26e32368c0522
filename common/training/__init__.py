"""The training loop and what it needs: optimizers, losses, checkpoints."""
