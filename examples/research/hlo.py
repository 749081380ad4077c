# SPDX-License-Identifier: Apache-2.0
"""What one device does in a compiled program, read off its text.

``parse`` turns the text into computations of instructions. ``executed`` walks them from
the entry: a loop counts as often as it turns, and of a conditional's branches the most
expensive counts. The caller says what an instruction costs: ``cost`` adds up bytes of
collectives and operations of products, ``machine_cost`` the time on a TPU or GPU, from
``products`` and from what ``traffic`` counts.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

# The last is how TPUs of one slice get something from those of another: by their hosts.
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "recv",
)
# What names, groups or waits for values, and does not compute any.
FREE = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "add-dependency",
        "opt-barrier",
    ),
    *(
        "partition-id",
        "replica-id",
        "copy-done",
        "slice-done",
        "dynamic-slice-done",
        "async-update",
        "async-done",
    ),
}
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.+)$")
_OPERATION = re.compile(r" ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: ``name = shape operation(operands), rest``; ``literal`` is what stands
    in the parentheses.
    """

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    literal: str
    rest: str
    root: bool

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from, empty where that is not known."""
        return attribute(self, r'op_name="((?:[^"\\]|\\.)*)"') or ""


Computation = dict[str, Instruction]


class Program(NamedTuple):
    """All computations by name, and the name of the one that runs."""

    computations: dict[str, Computation]
    entry: str


class Executed(NamedTuple):
    """An instruction that is launched, in its computation, and how often."""

    instruction: Instruction
    computation: Computation
    times: float


class Array(NamedTuple):
    """An array in a shape; ``memory`` is the number of its memory space, 0 for the main
    one.
    """

    dtype: str
    sizes: tuple[int, ...]
    memory: int

    @property
    def bytes(self) -> float:
        """Its size, without padding."""
        return math.prod(self.sizes) * bytes_of(self.dtype)


class Product(NamedTuple):
    """Operations (two a multiply-add) of a matrix product on operands of one type at
    one precision.
    """

    flops: float
    dtype: str
    precision: str


class Cost(NamedTuple):
    """Per device and run: output bytes by kind of collective, and operations (two a
    multiply-add) of products.

    ``far`` are those of the bytes that collectives exchange with devices beyond the
    fast network, ``overlapped`` those that move while the device computes, as the
    compiler has scheduled it.
    """

    collectives: dict[str, float]
    flops: float
    far: float = 0
    overlapped: float = 0

    @property
    def bytes(self) -> float:
        """Output bytes of all collectives."""
        return sum(self.collectives.values())


def cost(text: str, turns: float | None = None, group: int | None = None) -> Cost:
    """Count a compiled program. Of a conditional, every kind of cost is that of the
    branch with most of it.

    Args:
        text: ``compiled.as_text()``.
        turns: how often loops turn on average whose bounds are data.
        group: how many devices, one after the other, share a fast network; None: all of
            them.

    Returns:
        Its cost.

    Raises:
        ValueError: if a loop that multiplies or communicates does not say how often it
            turns and ``turns`` is None.
    """
    program = parse(text)

    def flops(instruction: Instruction, computation: Computation) -> float:
        return sum(
            product.flops for product in products(program, instruction, computation)
        )

    def moved(which: Callable[[Instruction, Computation], bool]) -> float:
        def weight(instruction: Instruction, computation: Computation) -> float:
            within = inside(program, instruction, computation)
            return sum(
                collective_bytes(i)
                for i, where in within
                if which(i, where) and not continued(i, where)
            )

        return total(executed(program, weight, turns), weight)

    kinds = {
        collective(i)
        for computation in program.computations.values()
        for i in computation.values()
    }
    totals = {
        kind: moved(lambda i, _, kind=kind: collective(i) == kind)
        for kind in COLLECTIVES
        if kind in kinds
    }
    far = 0 if group is None else moved(lambda i, _: goes_beyond(i, group))
    done = total(executed(program, flops, turns), flops)
    return Cost(
        {kind: n for kind, n in totals.items() if n}, done, far, moved(overlaps)
    )


def total(
    done: list[Executed], price: Callable[[Instruction, Computation], float]
) -> float:
    """The sum of ``price`` over all instructions."""
    return sum(e.times * price(e.instruction, e.computation) for e in done)


# --- Reading
# ------------------------------------------------------------------------------------


def parse(text: str) -> Program:
    """The computations of ``compiled.as_text()``."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start and not line.startswith(" "):
            current = computations.setdefault(start[1], {})
            entry = start[1] if line.startswith("ENTRY") else entry
            continue
        found = _INSTRUCTION.match(line)
        operation = _OPERATION.search(found[3]) if found else None
        if found and operation:
            literal, rest = _in_parentheses(found[3][operation.end() :])
            shape, root = found[3][: operation.start()], bool(found[1])
            current[found[2]] = Instruction(
                found[2], shape, operation[1], _names(literal), literal, rest, root
            )
    return Program(computations, entry)


def _in_parentheses(text: str) -> tuple[str, str]:
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def _names(literal: str) -> tuple[str, ...]:
    return tuple(re.findall(r"%([\w.\-]+)", literal))


def attribute(instruction: Instruction, pattern: str) -> str | None:
    """The first group of ``pattern`` in what follows the operands."""
    found = re.search(pattern, instruction.rest)
    return found[1] if found else None


def called(instruction: Instruction) -> str | None:
    """The computation that a fusion, call or wrapper runs."""
    return attribute(instruction, r"(?:calls|to_apply)=%?([\w.\-]+)")


def inside(
    program: Program, instruction: Instruction, computation: Computation
) -> Iterator[tuple[Instruction, Computation]]:
    """An instruction, or all of those that are fused in it, with their computations."""
    name = called(instruction) if instruction.operation == "fusion" else None
    if name is None:
        yield instruction, computation
        return
    within = program.computations[name]
    for i in within.values():
        yield from inside(program, i, within)


def bytes_of(dtype: str) -> float:
    """Size of one entry."""
    bits = re.match(r"(?:[fsuc]|f8\w*?)(\d+)", dtype)
    return _BYTES[dtype] if dtype in _BYTES else int(bits[1]) / 8 if bits else 4


def arrays(shape: str) -> list[Array]:
    """The arrays of a shape, which may be a tuple."""
    found = []
    for dtype, sizes, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        found.append(
            Array(
                dtype,
                tuple(int(s) for s in sizes.split(",") if s),
                int(space[1]) if space else 0,
            )
        )
    return found


def root_of(computation: Computation) -> Instruction:
    """What a computation returns."""
    return next(i for i in computation.values() if i.root)


# --- Walking
# ------------------------------------------------------------------------------------


def executed(
    program: Program,
    weight: Callable[[Instruction, Computation], float],
    turns: float | None = None,
) -> list[Executed]:
    """What a run launches.

    Conditions of loops that say how often they turn cost nothing.

    Args:
        program: what runs.
        weight: by which of the branches the dearest is chosen.
        turns: how often loops turn on average whose bounds are data.

    Raises:
        ValueError: if such a loop has any weight and ``turns`` is None.
    """
    return _Walk(program, weight, turns).computation(program.entry, {})


@dataclasses.dataclass(frozen=True)
class _Walk:
    program: Program
    weight: Callable[[Instruction, Computation], float]
    turns: float | None

    def computation(self, name: str, constants: dict[int, int]) -> list[Executed]:
        """What ``name`` launches; ``constants`` are elements of its parameter that are
        known.
        """
        body, found = self.program.computations[name], []
        for i in body.values():
            if i.operation == "while":
                found += self.loop(i, body, constants)
            elif i.operation == "conditional":
                found += self.branches(i)
            elif i.operation in ("call", "async-start") and called(i):
                handed = (
                    _tuple_constants(i, body, constants) if len(i.operands) == 1 else {}
                )
                found += self.computation(called(i) or "", handed)
            elif i.operation not in FREE:
                found.append(Executed(i, body, 1))
        return found

    def loop(
        self, i: Instruction, body: Computation, constants: dict[int, int]
    ) -> list[Executed]:
        condition, inner = (
            attribute(i, r"condition=%?([\w.\-]+)"),
            attribute(i, r"body=%?([\w.\-]+)"),
        )
        assert condition
        assert inner
        starts = _tuple_constants(i, body, constants)
        kept = {
            k: v
            for k, v in starts.items()
            if k in _invariant(self.program.computations[inner])
        }
        once = self.computation(inner, kept)
        count = trips(self.program, i, starts, kept)
        if count is not None:
            return _times(once, count)
        checks = self.computation(condition, kept)
        if self.turns is None and total(once, self.weight):
            raise ValueError(f"loop {i.name} does not say how often it turns")
        turns = self.turns or 0
        return _times(checks, turns + 1) + _times(once, turns)

    def branches(self, i: Instruction) -> list[Executed]:
        listed = attribute(i, r"branch_computations=\{([^}]*)\}")
        names = (
            listed.split(",")
            if listed
            else re.findall(r"(?:true|false)_computation=([^,\s]+)", i.rest)
        )
        runs = [self.computation(name.strip().lstrip("%"), {}) for name in names]
        return max(runs, key=lambda run: total(run, self.weight))


def _times(done: list[Executed], n: float) -> list[Executed]:
    return [e._replace(times=e.times * n) for e in done]


def trips(
    program: Program, loop: Instruction, starts: dict[int, int], kept: dict[int, int]
) -> int | None:
    """How often a loop turns, None where data decide.

    Args:
        program: where it stands.
        loop: a ``while``.
        starts: elements of the tuple it starts with that are constants, by index.
        kept: those of them that stay as they are.
    """
    known = attribute(loop, r'"known_trip_count":\{"n":"(\d+)"')
    if known:
        return int(known)
    condition = program.computations[attribute(loop, r"condition=%?([\w.\-]+)") or ""]
    test, operands = root_of(condition), root_of(condition).operands
    if test.operation == "fusion":
        fused = program.computations[called(test) or ""]
        test = root_of(fused)
        outer = {
            i.name: operands[int(i.literal)]
            for i in fused.values()
            if i.operation == "parameter"
        }
        operands = tuple(outer.get(name, name) for name in test.operands)
        condition = fused | condition
    if test.operation != "compare" or attribute(test, r"direction=(\w+)") != "LT":
        return None
    start, bound = (
        _constant(operands[0], condition, starts),
        _constant(operands[1], condition, kept),
    )
    return None if bound is None else max(bound - (start or 0), 0)


def _constant(
    name: str, computation: Computation, parameter: dict[int, int]
) -> int | None:
    """The whole number that ``name`` is; ``parameter`` are known elements of the
    computation's tuple.
    """
    i = computation[name]
    if i.operation == "constant" and re.fullmatch(r"-?\d+", i.literal):
        return int(i.literal)
    if (
        i.operation == "get-tuple-element"
        and computation[i.operands[0]].operation == "parameter"
    ):
        return parameter.get(int(attribute(i, r"index=(\d+)") or -1))
    if i.operation in ("copy", "bitcast", "copy-done", "copy-start"):
        return _constant(i.operands[0], computation, parameter)
    return None


def _tuple_constants(
    i: Instruction, computation: Computation, parameter: dict[int, int]
) -> dict[int, int]:
    """The elements, of the tuple that ``i`` takes, that are constants."""
    start = computation[i.operands[0]]
    if start.operation == "parameter":
        return parameter
    if start.operation != "tuple":
        return {}
    found = {
        k: _constant(name, computation, parameter)
        for k, name in enumerate(start.operands)
    }
    return {k: v for k, v in found.items() if v is not None}


def _invariant(body: Computation) -> set[int]:
    """Elements of a loop's tuple that its body hands on as they are."""
    root = root_of(body)
    if root.operation != "tuple":
        return set()
    results = [body[name] for name in root.operands]
    return {
        k
        for k, i in enumerate(results)
        if i.operation == "get-tuple-element"
        and body[i.operands[0]].operation == "parameter"
        and attribute(i, r"index=(\d+)") == str(k)
    }


# --- Counting
# ------------------------------------------------------------------------------------


def collective(instruction: Instruction) -> str | None:
    """Which of ``COLLECTIVES`` it is, or begins."""
    kind = instruction.operation.removesuffix("-start")
    if kind == "recv" and "is_host_transfer=true" not in instruction.rest:
        return None  # a part of a permutation
    return kind if kind in COLLECTIVES else None


def continued(instruction: Instruction, computation: Computation) -> bool:
    """Whether it stands for a collective that another fusion has begun: a TPU's repeat
    it until it is done.
    """
    return _in_chain(instruction) and not any(
        call_target(i) == "AsyncCollectiveStart" for i in computation.values()
    )


def overlaps(instruction: Instruction, computation: Computation) -> bool:
    """Whether it is a collective that has something to compute scheduled between its
    beginning and its end.
    """
    if collective(instruction) is None or instruction.operation == "recv":
        return False
    if _in_chain(instruction):
        return True
    if not instruction.operation.endswith("-start"):
        return False
    following = list(computation.values())[
        list(computation).index(instruction.name) + 1 :
    ]
    between = itertools.takewhile(
        lambda i: instruction.name not in i.operands, following
    )
    return any(
        i.operation not in FREE and not i.operation.endswith(("-start", "-done"))
        for i in between
    )


def _in_chain(instruction: Instruction) -> bool:
    return collective(instruction) is not None and "chain_id=" in instruction.rest


def call_target(instruction: Instruction) -> str | None:
    """What a custom call calls."""
    return attribute(instruction, r'custom_call_target="([^"]*)"')


def goes_beyond(instruction: Instruction, group: int) -> bool:
    """Whether it is a collective of devices that are not of one group of so many, one
    after the other.
    """
    kind = collective(instruction)
    if kind in (None, "recv"):
        return kind == "recv"
    return any(
        len({device // group for device in one}) > 1 for one in groups(instruction)
    )


def groups(instruction: Instruction) -> list[list[int]]:
    """The devices between which a collective moves data."""
    pairs = attribute(instruction, r"source_target_pairs=(\{\{[\d,{}]*\}\})")
    listed = pairs or attribute(instruction, r"replica_groups=(\{\{[\d,{}]*\}\})")
    if listed:
        return [_whole_numbers(one) for one in re.findall(r"\{([\d,]+)\}", listed)]
    lined_up = re.search(
        r"replica_groups=\[(\d+),\d+\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?",
        instruction.rest,
    )
    if lined_up:
        return (
            _lined_up(lined_up[2], lined_up[3]).reshape(int(lined_up[1]), -1).tolist()
        )
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}",
        instruction.rest,
    )
    if mesh is None:
        raise ValueError(f"between which devices is not said: {instruction.rest[:200]}")
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
    order = re.match(
        r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?", mesh[2] or f"[{math.prod(axes.values())}]"
    )
    ids = (
        _lined_up(order[1], order[2]) if order else np.array(_whole_numbers(mesh[2]))
    ).reshape(list(axes.values()))
    among = [list(axes).index(name) for name in re.findall(r"'(\w+)'", mesh[3])]
    return (
        np.moveaxis(ids, among, range(-len(among), 0))
        .reshape(-1, math.prod(ids.shape[a] for a in among))
        .tolist()
    )


def _lined_up(sizes: str, order: str | None) -> np.ndarray:
    """Numbers from zero in an array of these sizes, its axes then in another order."""
    ids = np.arange(math.prod(_whole_numbers(sizes))).reshape(_whole_numbers(sizes))
    return ids.transpose(_whole_numbers(order)) if order else ids


def collective_bytes(instruction: Instruction) -> float:
    """Output bytes; the shape of one that only begins has the operands first."""
    sizes = [array.bytes for array in arrays(instruction.shape)]
    if instruction.operation == "recv":  # and a context, and a token
        return sizes[0]
    return sum(
        sizes[len(sizes) // 2 :] if instruction.operation.endswith("-start") else sizes
    )


def products(
    program: Program, instruction: Instruction, computation: Computation
) -> list[Product]:
    """The matrix products in an instruction and in what is fused in it.

    Raises:
        ValueError: if a custom call hides one.
    """
    found = []
    for i, where in inside(program, instruction, computation):
        if i.operation == "dot":
            contracted = _whole_numbers(
                attribute(i, r"lhs_contracting_dims=\{([\d,]*)\}")
            )
            found.append(_product(i, where, _contraction(i, where, contracted)))
        elif i.operation == "convolution":
            found.append(_product(i, where, _taps(i, where)))
        elif i.operation == "custom-call" and attribute(
            i, r'custom_call_target="(__cublas\$[^"]*)"'
        ):
            listed = attribute(i, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
            found.append(
                _product(i, where, _contraction(i, where, _whole_numbers(listed)))
            )
        elif i.operation == "custom-call" and "matmul" in i.rest:
            raise ValueError(
                f"a product hidden in a custom call is not counted: {i.rest[:200]}"
            )
    return found


def _product(i: Instruction, computation: Computation, contracted: float) -> Product:
    precision = attribute(i, r"operand_precision=\{(\w+)") or attribute(
        i, r'"operand_precision":\["(\w+)"'
    )
    algorithm = attribute(i, r"algorithm=(dot_\w+)") or attribute(
        i, r'"algorithm":"ALG_(DOT_\w+)"'
    )
    result, dtype = (
        arrays(i.shape)[0],
        arrays(computation[i.operands[0]].shape)[0].dtype,
    )
    return Product(
        2.0 * math.prod(result.sizes) * contracted,
        dtype,
        (algorithm or precision or "default").lower(),
    )


def _contraction(i: Instruction, computation: Computation, axes: list[int]) -> int:
    sizes = arrays(computation[i.operands[0]].shape)[0].sizes
    return math.prod(sizes[axis] for axis in axes)


def _taps(i: Instruction, computation: Computation) -> float:
    """Multiplications for an output of a convolution, which is how a TPU writes
    products.

    They are the kernel's input features times its window, without the zeros that
    dilation puts in the window: a batch of products is a convolution whose window sees
    one of them at a time.
    """
    labels = attribute(i, r"dim_labels=\w+_(\w+)->") or "io"
    features = arrays(computation[i.operands[1]].shape)[0].sizes[labels.index("i")]
    window = attribute(i, r"window=\{([^}]*)\}") or ""
    sizes, dilation = _by_x(window, "size"), _by_x(window, "lhs_dilate")
    return features * math.prod(
        -(-size // d)
        for size, d in zip(sizes, dilation or [1] * len(sizes), strict=True)
    )


def _by_x(window: str, name: str) -> list[int]:
    found = re.search(rf"(?:^| ){name}=([\dx]+)", window)
    return [int(n) for n in found[1].split("x")] if found else []


def _whole_numbers(text: str | None) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text or "")]
