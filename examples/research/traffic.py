# SPDX-License-Identifier: Apache-2.0
"""Bytes that an instruction reads from main memory and writes there.

``moved`` adds up operands and results that lie in main memory. Inside a fusion it
follows every parameter to what becomes of it, as one that is only sliced is not read
whole, and one that is only updated in place is not read at all.
"""

from examples.research.hlo import (
    FREE,
    Computation,
    Instruction,
    Program,
    arrays,
    called,
    root_of,
)

_SLICES = ("slice", "dynamic-slice", "gather")


def moved(
    program: Program, instruction: Instruction, computation: Computation
) -> float:
    """Bytes between main memory and the chip: operands read and results written.

    Only those in main memory count. What is only sliced, or updated in a slice, counts
    with the slice. An asynchronous copy counts where it begins.
    """
    i = instruction
    results = arrays(i.shape)
    if i.operation in FREE:
        return 0
    if i.operation == "copy-start":  # results: the copy, what is copied, a context
        return sum(array.bytes for array in results[:2] if array.memory == 0)
    if i.operation in ("slice-start", "dynamic-slice-start"):
        whole, piece, *_ = results
        ends = [array.memory == 0 for array in (whole, piece)]
        return piece.bytes * sum(ends)
    if i.operation == "fusion":
        within = program.computations[called(i) or ""]
        read = _read_by_fusion(program, i, within)
        written = _written(within, root_of(within))
    else:
        read = []
        for name in dict.fromkeys(i.operands):  # an operand is read once
            read.append((name, _read_by(program, i, name, computation)))
        written = _written(computation, i)
    total = sum(size for name, size in read if _in_main_memory(computation[name]))
    for size, array in zip(written, results, strict=False):
        if array.memory == 0:
            total += size
    return total


def _read_by_fusion(
    program: Program, i: Instruction, within: Computation
) -> list[tuple[str, float]]:
    """Operands of a fusion, and the bytes that it reads of each."""
    parameters = {}
    for inner in within.values():
        if inner.operation == "parameter":
            parameters[int(inner.literal)] = inner.name
    read = []
    for place, name in enumerate(i.operands):
        read.append((name, _read(program, within, parameters[place])))
    return read


def _in_main_memory(i: Instruction) -> bool:
    """Whether all arrays of its result are stored there."""
    return all(array.memory == 0 for array in arrays(i.shape))


def _read(program: Program, computation: Computation, name: str) -> float:
    """Bytes of ``name`` that a fused computation reads."""
    users = [i for i in computation.values() if name in i.operands]
    read = sum(_read_by(program, user, name, computation) for user in users)
    return min(read, sum(array.bytes for array in arrays(computation[name].shape)))


def _read_by(
    program: Program, user: Instruction, name: str, computation: Computation
) -> float:
    """Bytes of ``name`` that one instruction reads."""
    whole = sum(array.bytes for array in arrays(computation[name].shape))
    first_only = user.operands[0] == name and name not in user.operands[1:]
    if user.operation in _SLICES and first_only:
        return min(arrays(user.shape)[0].bytes, whole)
    if user.operation == "dynamic-update-slice" and first_only:
        return 0
    if user.operation == "bitcast" and not user.root:
        return _read(program, computation, user.name)
    if user.operation == "fusion":
        within = program.computations[called(user) or ""]
        parameters = [p for p in within.values() if p.operation == "parameter"]
        inner = [p.name for p in parameters if user.operands[int(p.literal)] == name]
        return min(sum(_read(program, within, p) for p in inner), whole)
    return whole


def _written(computation: Computation, i: Instruction) -> list[float]:
    """Bytes of every result of ``i``."""
    if i.operation == "tuple":
        sizes: list[float] = []
        for name in i.operands:
            sizes += _written(computation, computation[name])
        return sizes
    if i.operation == "bitcast":
        operand = computation[i.operands[0]]
        if operand.operation == "dynamic-update-slice":
            return _written(computation, operand)
    if i.operation == "dynamic-update-slice":
        update = computation[i.operands[1]]
        return [arrays(update.shape)[0].bytes]
    return [array.bytes for array in arrays(i.shape)]
