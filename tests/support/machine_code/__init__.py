"""Reads the machine code of every kernel, compiled ahead of time: by rules, and by figures no worse than before.

Files, each importing those above it: disassembly (text to instructions and basic blocks), provenance (from an
instruction to the source it was made from), rules, record, check (the command).
"""
