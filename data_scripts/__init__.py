"""Scripts that download real data sets or make synthetic ones; no torch."""
