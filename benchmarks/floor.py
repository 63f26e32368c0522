"""Estimate a training step on a GPU, without one: `python benchmarks/floor.py APP [--gpu h200]`."""

from medspeed.benchmarks.fake_cuda import shim

if __name__ == "__main__":
    shim.load()  # before torch is loaded
    from medspeed.benchmarks.fake_cuda.estimate import main

    main()
