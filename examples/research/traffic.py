# SPDX-License-Identifier: Apache-2.0
"""Bytes that an instruction of a compiled program moves between main memory and the
chip.

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
    """Bytes between main memory and the chip: operands read and results written that
    lie in main memory.

    What is only sliced, or updated in a slice, counts with the slice. An asynchronous
    copy counts where it begins.
    """
    i, results = instruction, arrays(instruction.shape)
    if i.operation in FREE:
        return 0
    if i.operation == "copy-start":
        return sum(array.bytes for array in results[:2] if array.memory == 0)
    if i.operation in ("slice-start", "dynamic-slice-start"):
        piece = results[1]
        return piece.bytes * ((results[0].memory == 0) + (piece.memory == 0))
    if i.operation == "fusion":
        within = program.computations[called(i) or ""]
        parameters = {
            int(p.literal): p.name
            for p in within.values()
            if p.operation == "parameter"
        }
        read = [
            (name, _read(program, within, parameters[k]))
            for k, name in enumerate(i.operands)
        ]
        written = _written(within, root_of(within))
    else:
        read = [
            (name, _read_by(program, i, name, computation))
            for name in dict.fromkeys(i.operands)
        ]
        written = _written(computation, i)
    reads = sum(size for name, size in read if _in_main_memory(computation[name]))
    return reads + sum(
        size for size, array in zip(written, results, strict=False) if array.memory == 0
    )


def _in_main_memory(i: Instruction) -> bool:
    return all(array.memory == 0 for array in arrays(i.shape))


def _read(program: Program, computation: Computation, name: str) -> float:
    """Bytes of ``name`` that a fused computation reads."""
    users = [i for i in computation.values() if name in i.operands]
    read = sum(_read_by(program, user, name, computation) for user in users)
    return min(read, sum(array.bytes for array in arrays(computation[name].shape)))


def _read_by(
    program: Program, user: Instruction, name: str, computation: Computation
) -> float:
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
        return [
            size
            for name in i.operands
            for size in _written(computation, computation[name])
        ]
    if (
        i.operation == "bitcast"
        and computation[i.operands[0]].operation == "dynamic-update-slice"
    ):
        return _written(computation, computation[i.operands[0]])
    if i.operation == "dynamic-update-slice":
        return [arrays(computation[i.operands[1]].shape)[0].bytes]
    return [array.bytes for array in arrays(i.shape)]
