"""Runs the PTX that Triton makes of the kernels, on host memory, without a GPU; numpy and ctypes.

    kernel = load(compiled.asm["ptx"])
    memory = Memory()
    memory.allow(tensor, "wire", write=True)             # everything else is out of bounds
    run(kernel, programs, values_of_parameters, memory, shared_bytes)

What is exact: every instruction here has the result that the PTX ISA prescribes, bit for bit: subnormal numbers are
kept, results that are NaN are the one NaN that the ISA names, minimum and maximum drop NaN. An instruction or modifier
that is not known raises PtxError when the kernel is read, and nothing is ever skipped.

What is watched (each raises PtxError, with thread, program, instruction and line of the source):
    access       outside of what `allow` was told, a write to what may only be read, or not aligned to its width
    shared       memory that was never written is read, or an access beyond its end
    race         one thread touches what another one wrote, or writes what another one read, with no barrier between
    convergence  a shuffle, reduction or barrier that some threads of its warp or program have not come to
    stores       two threads store different values in one place by one instruction

What is not seen: what ptxas makes of the PTX (`mul.f32` followed by `add.f32`, without ".rn", it may fuse), the order
of memory between programs, streams, AMD, payloads of NaN.

Files, each importing those above it: ptx (text to instructions), memory, arithmetic, instructions, machine; driver (a
driver of Triton's that carries launches out), launcher (Triton's own launcher in C); cases and kernels (what is run).
"""
