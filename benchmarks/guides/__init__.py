"""What is true of one app's guide alone; a module here makes `compare.py` know the app of that name."""
