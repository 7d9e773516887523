"""One bucket: its memory, its way through a step, and what is found out on the way (stats/).

    dense.py      pack -> all-reduce -> unpack, two launches: the wire is ours
    comm_hook.py  copy -> a comm hook (torch's contract) -> copy: the hook owns scale, cast and collective
    sparse.py     one sparse gradient: divide -> sparse all-reduce (or the hook)

A reduction keeps the tensors it works on until it is finished, and writes gradients in `finish` alone: when a step
fails, a bucket's gradients are all reduced or all still local. (With gradients as views of the wire they are the
wire, and a collective that fails leaves them divided.)
"""
