"""Scripts that download datasets or generate synthetic ones, without torch."""
