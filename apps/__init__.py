"""The applications: each goes from raw scans to an engine."""
