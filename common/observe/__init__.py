"""What is seen of a run: the machine's load, curves, overlays, the report, how far its steps are from the limit."""
