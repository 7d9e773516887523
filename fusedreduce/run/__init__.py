"""`python -m fusedreduce.run`: any training script with our wrapper in the place of torch's, no line changed.

The command checks its flags, puts them into the environment, puts the folder site/ first on PYTHONPATH, and becomes the
program that it was given: plain Python runs the script. `site/sitecustomize.py` waits there, and in every Python that
the script starts, for torch to define its DistributedDataParallel; `process.py` takes over when that is first called.
"""
