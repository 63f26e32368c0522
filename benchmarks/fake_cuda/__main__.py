"""Count what a step costs on a GPU, without one: `python -m medspeed.benchmarks.fake_cuda [APP ...] [--write]`."""

from medspeed.benchmarks.fake_cuda import shim

if __name__ == "__main__":
    shim.load()  # before torch is loaded
    from medspeed.benchmarks.fake_cuda.budget import main

    main()
