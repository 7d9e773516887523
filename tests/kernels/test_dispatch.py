"""Which path runs, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import triton
from support.inside import devices_known, forget_devices, take_torch_path
from support.walked import walked

from fusedreduce.buckets.bucket import Bucket
from fusedreduce.kernels import combine, counting, cpu, dispatch
from fusedreduce.kernels.parts import Part
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.planning.layout import flat_layout

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
def test_the_interpreter_never_writes_bf16() -> None:
    assert dispatch.path_for(CPU, (torch.float16,)) == "interpreter"
    assert dispatch.path_for(CPU, (torch.bfloat16,)) == "torch"
    assert dispatch.path_for(CPU, (torch.float32, torch.bfloat16)) == "torch"
    gradient = torch.tensor([1.0 + 2.0**-8 + 2.0**-9])
    wire = torch.empty(1, dtype=torch.bfloat16)
    chunks = ChunkTable([1], [0], [torch.float32], 1)
    dispatch.pack([gradient], chunks, PointerTable(), wire, 1.0)
    assert wire.item() == 1.0078125


def test_without_triton_everything_takes_the_torch_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_torch_path(monkeypatch)
    forget_devices()
    assert dispatch.path_for(CPU, (torch.float16,)) == "torch" and not caplog.records
    assert dispatch.path_for(CUDA, (torch.float16,)) == "torch"
    assert dispatch.path_for(CUDA, (torch.float16,)) == "torch"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once, not at every step"


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
def test_architectures_without_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.path_for(CUDA, (torch.bfloat16,)) == "torch", "the interpreter cannot follow a GPU's addresses"
    monkeypatch.setattr("fusedreduce.kernels.variants.interpreted", lambda: False)
    monkeypatch.setattr("fusedreduce.kernels.variants.current_target", lambda device: ("hip", "gfx906"))
    forget_devices()
    try:
        with pytest.raises(dispatch.UnsupportedPairError, match=r"hip gfx906.*no code"):
            dispatch.path_for(CUDA, (torch.bfloat16,))
    finally:
        forget_devices()


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("parameters", [1, 10])
def test_one_kernel_for_each_function_whatever_the_number_of_parameters(parameters: int) -> None:
    offsets = [3 * slot for slot in range(parameters)]
    chunks = ChunkTable([3] * parameters, offsets, [torch.float32] * parameters, 3 * parameters)
    gradients = [torch.full((3,), 2.0) for _ in range(parameters)]
    pointers, partials, sources = PointerTable(), chunks.new_partials(CPU), chunks.new_source_partials(CPU)
    wire, spans = torch.empty(3 * parameters, dtype=torch.float16), chunks.spans(CPU)
    with counting.count_launches() as counted:
        dispatch.scale(gradients, chunks, pointers, torch.tensor([0.5]))
        dispatch.measure(gradients, chunks, pointers, partials)
        totals = dispatch.reduce_partials(partials, spans)
        dispatch.pack(gradients, chunks, pointers, wire, 1.0, sources)
        found = dispatch.reduce_source_partials(sources, spans)
        dispatch.unpack(gradients, chunks, pointers, wire, torch.ones(1))
    assert [(one.function, one.path, one.launches) for one in counted] == [
        ("scale", "interpreter", 1),
        ("measure", "interpreter", 1),
        ("reduce_partials", "interpreter", 2),
        ("pack", "interpreter", 1),
        ("reduce_source_partials", "interpreter", 2),
        ("unpack", "interpreter", 1),
    ]
    assert totals.total.tolist() == [3.0 * parameters, 1.0, 0.0] and found.first.tolist() == [-1, -1]
    assert pointers.uploads == 1, "one table serves all that walk the same gradients"
    dispatch.pack(gradients, chunks, pointers, wire, 1.0)
    assert len(counted) == 6, "nothing is counted outside the context"


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
def test_the_interpreter_neither_measures_nor_scales_bf16() -> None:
    gradient = torch.tensor([1.0, 2.0**-130], dtype=torch.bfloat16)
    chunks = ChunkTable([2], [0], [torch.bfloat16], 2)
    partials = chunks.new_partials(CPU)
    with counting.count_launches() as counted:
        dispatch.scale([gradient], chunks, PointerTable(), torch.tensor([1.0 + 2.0**-8 + 2.0**-9]))
        dispatch.measure([gradient], chunks, PointerTable(), partials)
    assert [one.path for one in counted] == ["torch", "torch"]
    assert gradient[0].item() == 1.0078125 and partials.peaks.tolist() == [1.0078125]


def test_the_counter_counts_operators_that_do_work_and_none_else() -> None:
    tensors = [torch.ones(3), torch.ones(4)]
    with counting.OperatorCounter() as operators:
        tensors[0].view(3, 1)
        torch.empty_like(tensors[0])
        torch.zeros(2).add_(1.0)
        torch._foreach_mul_(tensors, 2.0)
    assert operators.calls == 3, "zeros, add_ and one foreach; no view, no bare allocation"


def test_warm_up_is_a_no_op_where_nothing_is_compiled() -> None:
    dispatch.warm_up(CPU, torch.bfloat16)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("path", ["interpreter", "torch"])
def test_what_is_written_has_a_new_version_and_what_is_read_has_not(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So autograd notices where something that it has saved is overwritten, whatever wrote it."""
    if path == "torch":
        monkeypatch.setattr("fusedreduce.kernels.variants.interpreted", lambda: False)
    chunks = ChunkTable([3, 2, 4], [0, 3, 5], [torch.float32] * 3, 9)
    first, last, wire = torch.ones(3), torch.ones(4), torch.empty(9)
    gradients, pointers, one = [first, None, last], PointerTable(), torch.ones(1)
    tensors = [first, last, wire]

    def raised(function: Callable[[], object]) -> list[bool]:
        before = [tensor._version for tensor in tensors]
        function()
        return [tensor._version > then for tensor, then in zip(tensors, before, strict=True)]

    assert dispatch.path_for(CPU, (torch.float32,)) == path
    assert raised(lambda: dispatch.pack(gradients, chunks, pointers, wire, 1.0)) == [False, False, True]
    assert raised(lambda: dispatch.unpack(gradients, chunks, pointers, wire, one)) == [True, True, False]
    assert raised(lambda: dispatch.scale(gradients, chunks, pointers, one)) == [True, True, False]
    partials = chunks.new_partials(CPU)
    assert raised(lambda: dispatch.measure(gradients, chunks, pointers, partials)) == [False, False, False]


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("function", [combine.combine, cpu.combine], ids=["interpreter", "torch"])
def test_outputs_of_combine_have_a_new_version(function: Callable[..., None]) -> None:
    read, written = torch.ones(4), torch.ones(4)
    function([read, written], [written], (Part(0, 4, ((0, 1),), 0),))
    assert read._version == 0 and written._version > 0


def test_a_passing_failure_is_raised_and_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory, or of the user's own kernel before: the next call finds out anew."""
    raised = iter([torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("an illegal access")])

    def fail(*_: object, **__: object) -> None:
        raise next(raised)

    monkeypatch.setattr("fusedreduce.kernels.variants.interpreted", lambda: False)
    monkeypatch.setattr("fusedreduce.kernels.variants.current_target", lambda device: ("cuda", 90))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.empty(0))
    monkeypatch.setattr("fusedreduce.kernels.launchers.pack", fail)
    forget_devices()
    with pytest.raises(torch.OutOfMemoryError):
        dispatch.without_kernels(CUDA)
    with pytest.raises(torch.AcceleratorError):
        dispatch.without_kernels(CUDA)
    assert not devices_known()


def test_in_a_capture_no_kernel_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be recorded, with addresses that are gone at the replay."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(dispatch, "_why_not", lambda _: pytest.fail("a kernel is tried"))
    forget_devices()
    assert dispatch.path_for(CUDA, ()) == "triton" and not devices_known()


def test_what_reducers_call_is_found_once_and_is_the_paths_own() -> None:
    """A steady pack and unpack of a bucket enter no function of `dispatch`, and check nothing."""
    bucket = Bucket(flat_layout(3), [torch.float32], torch.bfloat16, CPU, "bucket 0")
    gradients, wire, one = [torch.ones(3)], bucket.wire(), torch.ones(1)

    def step() -> None:
        bucket.pack(gradients, wire, 2.0, None)
        bucket.unpack(gradients, wire, one, None)

    step()
    called = walked(step).files
    assert called["buckets/bucket.py"] == 2
    assert not [file for file in called if file in ("kernels/dispatch.py", "kernels/checks.py", "kernels/counting.py")]


def test_the_public_functions_check_what_unchecked_ones_do_not() -> None:
    """Whatever path is taken: a gradient that is longer than its slot would be read out of bounds by a kernel."""
    chunks, wire = ChunkTable([3], [0], [torch.float32], 3), torch.empty(3, dtype=torch.bfloat16)
    dispatch.unchecked(CPU, (torch.bfloat16,)).pack([torch.ones(3)], chunks, PointerTable(), wire, 1.0)
    assert wire.tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="has 4 elements, its slot expects 3"):
        dispatch.pack([torch.ones(4)], chunks, PointerTable(), wire, 1.0)
    with pytest.raises(ValueError, match="has 4 elements, its slot expects 3"):
        dispatch.unpack([torch.ones(4)], chunks, PointerTable(), wire, torch.ones(1))


@pytest.mark.parametrize("path", ["interpreter", "torch"], indirect=True)
def test_launches_are_counted_on_every_thread_and_by_everybody_who_counts(path: str) -> None:
    """Of buckets that have found what they call before; and nothing is left behind."""
    if path == "interpreter" and not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    found = dispatch.unchecked(CPU, (torch.float32,))
    before = vars(found) | {}
    chunks = ChunkTable([3], [0], [torch.float32], 3)
    arguments = [torch.ones(3)], chunks, PointerTable(), torch.empty(3), torch.ones(1), chunks.new_partials(CPU)
    with counting.count_launches() as outer:
        with counting.count_launches() as inner:
            thread = threading.Thread(target=found.unpack, args=arguments)
            thread.start()
            thread.join(10)
        found.unpack(*arguments)
    found.unpack(*arguments)
    seen = [(one.function, one.path) for one in outer]
    assert seen == [("unpack", path)] * 2, "what a function calls of others is its own"
    assert inner == outer[:1] and outer[0] == outer[1]
    assert vars(found) == before


def test_what_raises_is_not_counted_and_the_next_call_is() -> None:
    chunks, found = ChunkTable([3], [0], [torch.float32], 3), dispatch.unchecked(CPU, (torch.bfloat16,))
    wire, gradients = torch.empty(3, dtype=torch.bfloat16), [torch.ones(3)]
    with counting.count_launches() as counted:
        with pytest.raises(TypeError):
            found.pack(gradients, chunks, PointerTable())  # type: ignore[call-arg]
        found.pack(gradients, chunks, PointerTable(), wire, 3.0)
    assert [one.function for one in counted] == ["pack"]
