"""One bucket: its memory, its path through a step, and the statistics of its gradients (stats/).

    dense.py      pack -> all-reduce -> unpack, two launches: the wire is ours
    exchanged.py  the same with contributions that are exchanged and added up here (phases.py), also in two_levels.py
                  and of a comm hook's buckets maybe a part (partly_encoded.py)
    comm_hook.py  copy -> a comm hook (torch's contract) -> copy: the hook owns scale, cast and collective
    sparse.py     one sparse gradient: divide -> sparse all-reduce (or the hook)

A reduction keeps the tensors it works on until it is finished, and only `finish` writes gradients: when a step fails, a
bucket's gradients are all reduced or all still local. (Gradients that are views of the wire are the wire itself, and a
collective that fails leaves them divided.)
"""
