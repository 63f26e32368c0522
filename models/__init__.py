"""Networks: plain functions that return an nn.Module."""
