"""`python -m fusedreduce.run`: runs any training script, unchanged, with fusedreduce's reducer in place of torch's.

The command checks its flags, puts them into the environment, puts the folder site/ first on PYTHONPATH, and executes
the program it was given. In that process, and in every Python process that the program starts,
`site/sitecustomize.py` waits for torch to define its DistributedDataParallel; `process.py` installs ours when the first
one is made or loaded.
"""
