"""The project's own steps on a CUDA device that is not there: counted, not timed."""
