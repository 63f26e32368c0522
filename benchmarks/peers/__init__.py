"""The guides as plain MONAI scripts that import nothing of ours."""
