# SPDX-License-Identifier: Apache-2.0
"""What one device does in a compiled program, read off its text.

``parse`` turns the text into computations of instructions. ``executed`` walks them from
the entry: a loop counts as often as it turns, and of a conditional's branches the most
expensive counts. The caller says what an instruction costs: ``cost`` adds up bytes of
collectives and operations of products, ``machine_cost`` the time on a TPU or GPU, from
``products`` and from what ``traffic`` counts.
"""

import dataclasses
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
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "opt-barrier",
    "partition-id",
    "replica-id",
    "copy-done",
    "slice-done",
    "dynamic-slice-done",
    "async-update",
    "async-done",
}
_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "c64": 8, "c128": 16, "token": 0}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.+)$")
_OPERATION = re.compile(r" ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: ``name = shape operation(operands), rest``.

    ``literal`` is what stands in the parentheses.
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
    """An array in a shape; ``memory`` is its memory space, 0 for the main one."""

    dtype: str
    sizes: tuple[int, ...]
    memory: int

    @property
    def bytes(self) -> float:
        """Its size, without padding."""
        return math.prod(self.sizes) * bytes_of(self.dtype)


class Product(NamedTuple):
    """A matrix product: operations (two a multiply-add), type and precision."""

    flops: float
    dtype: str
    precision: str


class Cost(NamedTuple):
    """What one device does in a run.

    ``collectives`` are output bytes by kind, ``flops`` operations (two a multiply-add)
    of products. ``far`` are those of the bytes that are exchanged with devices beyond
    the fast network, ``overlapped`` those that are communicated while the device
    computes, as the compiler has scheduled it.
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
    """Count a compiled program.

    Of a conditional, every kind of cost is that of the branch with most of it.

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
        found = products(program, instruction, computation)
        return sum(product.flops for product in found)

    bytes_by_kind = {}
    for kind in kinds_of_collectives(program):
        communicated = communicated_bytes(program, turns, _is_of_kind(kind))
        if communicated:
            bytes_by_kind[kind] = communicated
    far: float = 0
    if group is not None:
        far = communicated_bytes(program, turns, _is_beyond(group))
    return Cost(
        collectives=bytes_by_kind,
        flops=total(executed(program, flops, turns), flops),
        far=far,
        overlapped=communicated_bytes(program, turns, overlaps),
    )


def kinds_of_collectives(program: Program) -> list[str]:
    """Those of ``COLLECTIVES`` that are in a program, in that order."""
    present = set()
    for computation in program.computations.values():
        present |= {collective(i) for i in computation.values()}
    return [kind for kind in COLLECTIVES if kind in present]


def communicated_bytes(
    program: Program,
    turns: float | None,
    is_counted: Callable[[Instruction, Computation], bool],
) -> float:
    """Output bytes of the collectives for which ``is_counted`` is true."""

    def weight(instruction: Instruction, computation: Computation) -> float:
        return sum(
            collective_bytes(i)
            for i, where in inside(program, instruction, computation)
            if is_counted(i, where) and not continued(i, where)
        )

    return total(executed(program, weight, turns), weight)


def _is_of_kind(kind: str) -> Callable[[Instruction, Computation], bool]:
    """A function that says whether an instruction is a collective of this kind."""
    return lambda instruction, _: collective(instruction) == kind


def _is_beyond(group: int) -> Callable[[Instruction, Computation], bool]:
    """A function that says whether an instruction communicates beyond a group."""
    return lambda instruction, _: goes_beyond(instruction, group)


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
    entry = ""
    current: Computation = {}
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start and not line.startswith(" "):
            current = computations.setdefault(start[1], {})
            if line.startswith("ENTRY"):
                entry = start[1]
        elif instruction := _instruction(line):
            current[instruction.name] = instruction
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    """The instruction of a line, None where there is none."""
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    root, name, said = found.groups()
    operation = _OPERATION.search(said)
    if not operation:
        return None
    literal, rest = _in_parentheses(said[operation.end() :])
    return Instruction(
        name=name,
        shape=said[: operation.start()],
        operation=operation[1],
        operands=_names(literal),
        literal=literal,
        rest=rest,
        root=bool(root),
    )


def _in_parentheses(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes an open one, and after it."""
    depth = 1
    for i, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        if depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def _names(literal: str) -> tuple[str, ...]:
    """Names of the instructions that an instruction takes."""
    return tuple(re.findall(r"%([\w.\-]+)", literal))


def attribute(instruction: Instruction, pattern: str) -> str | None:
    """The first group of ``pattern`` in what follows the operands."""
    found = re.search(pattern, instruction.rest)
    if found is None:
        return None
    return found[1]


def called(instruction: Instruction) -> str | None:
    """The computation that a fusion, call or wrapper runs."""
    return attribute(instruction, r"(?:calls|to_apply)=%?([\w.\-]+)")


def inside(
    program: Program, instruction: Instruction, computation: Computation
) -> Iterator[tuple[Instruction, Computation]]:
    """An instruction, or all of those that are fused in it, with their computations."""
    fused = None
    if instruction.operation == "fusion":
        fused = called(instruction)
    if fused is None:
        yield instruction, computation
        return
    within = program.computations[fused]
    for i in within.values():
        yield from inside(program, i, within)


def bytes_of(dtype: str) -> float:
    """Size of one entry."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    # The first number of f32, s4 and f8e4m3fn is that of their bits.
    bits = re.match(r"(?:[fsuc]|f8\w*?)(\d+)", dtype)
    if bits is None:
        return 4
    return int(bits[1]) / 8


def arrays(shape: str) -> list[Array]:
    """The arrays of a shape, which may be a tuple."""
    found = []
    for dtype, sizes, layout in _ARRAY.findall(shape):
        memory = 0
        if space := re.search(r"S\((\d+)\)", layout):
            memory = int(space[1])
        found.append(Array(dtype, tuple(_whole_numbers(sizes)), memory))
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
    """What ``executed`` is given, for all computations that are walked."""

    program: Program
    weight: Callable[[Instruction, Computation], float]
    turns: float | None

    def computation(self, name: str, constants: dict[int, int]) -> list[Executed]:
        """What ``name`` launches.

        Args:
            name: of a computation.
            constants: elements of its parameter, a tuple, that are known, by index.
        """
        body = self.program.computations[name]
        found: list[Executed] = []
        for i in body.values():
            if i.operation == "while":
                found += self.loop(i, body, constants)
            elif i.operation == "conditional":
                found += self.branches(i)
            elif i.operation in ("call", "async-start") and (inner := called(i)):
                passed = {}
                if len(i.operands) == 1:
                    passed = _tuple_constants(i, body, constants)
                found += self.computation(inner, passed)
            elif i.operation not in FREE:
                found.append(Executed(i, body, 1))
        return found

    def loop(
        self, i: Instruction, body: Computation, constants: dict[int, int]
    ) -> list[Executed]:
        """What a loop launches in all of its turns."""
        condition = attribute(i, r"condition=%?([\w.\-]+)")
        inner = attribute(i, r"body=%?([\w.\-]+)")
        assert condition
        assert inner
        starts = _tuple_constants(i, body, constants)
        unchanged = _invariant(self.program.computations[inner])
        kept = {index: n for index, n in starts.items() if index in unchanged}
        once = self.computation(inner, kept)
        count = trips(self.program, i, starts, kept)
        if count is not None:
            return _times(once, count)
        checks = self.computation(condition, kept)
        if self.turns is None and total(once, self.weight):
            raise ValueError(f"loop {i.name} does not say how often it turns")
        turns = self.turns or 0
        # The condition is computed once more, when the loop ends.
        return _times(checks, turns + 1) + _times(once, turns)

    def branches(self, i: Instruction) -> list[Executed]:
        """What the most expensive branch of a conditional launches."""
        listed = attribute(i, r"branch_computations=\{([^}]*)\}")
        if listed:
            names = listed.split(",")
        else:
            names = re.findall(r"(?:true|false)_computation=([^,\s]+)", i.rest)
        runs = [self.computation(name.strip().lstrip("%"), {}) for name in names]
        return max(runs, key=lambda run: total(run, self.weight))


def _times(done: list[Executed], n: float) -> list[Executed]:
    """The same ``n`` times as often."""
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
    test = root_of(condition)
    operands = test.operands
    if test.operation == "fusion":
        fused = program.computations[called(test) or ""]
        test = root_of(fused)
        outer = {}
        for i in fused.values():
            if i.operation == "parameter":
                outer[i.name] = operands[int(i.literal)]
        operands = tuple(outer.get(name, name) for name in test.operands)
        condition = fused | condition
    if test.operation != "compare" or attribute(test, r"direction=(\w+)") != "LT":
        return None
    start = _constant(operands[0], condition, starts)
    bound = _constant(operands[1], condition, kept)
    if bound is None:
        return None
    return max(bound - (start or 0), 0)


def _constant(
    name: str, computation: Computation, parameter: dict[int, int]
) -> int | None:
    """The whole number that ``name`` is, None where it is not known.

    ``parameter`` are known elements of the computation's tuple.
    """
    i = computation[name]
    if i.operation == "constant" and re.fullmatch(r"-?\d+", i.literal):
        return int(i.literal)
    if _is_element_of_parameter(i, computation):
        return parameter.get(int(attribute(i, r"index=(\d+)") or -1))
    if i.operation in ("copy", "bitcast", "copy-done", "copy-start"):
        return _constant(i.operands[0], computation, parameter)
    return None


def _is_element_of_parameter(i: Instruction, computation: Computation) -> bool:
    """Whether an instruction takes an element of the tuple of its computation."""
    if i.operation != "get-tuple-element":
        return False
    return computation[i.operands[0]].operation == "parameter"


def _tuple_constants(
    i: Instruction, computation: Computation, parameter: dict[int, int]
) -> dict[int, int]:
    """The elements, of the tuple that ``i`` takes, that are constants."""
    start = computation[i.operands[0]]
    if start.operation == "parameter":
        return parameter
    if start.operation != "tuple":
        return {}
    constants = {}
    for index, name in enumerate(start.operands):
        found = _constant(name, computation, parameter)
        if found is not None:
            constants[index] = found
    return constants


def _invariant(body: Computation) -> set[int]:
    """Elements of a loop's tuple that its body leaves as they are."""
    root = root_of(body)
    if root.operation != "tuple":
        return set()
    unchanged = set()
    for index, name in enumerate(root.operands):
        i = body[name]
        is_element = _is_element_of_parameter(i, body)
        if is_element and attribute(i, r"index=(\d+)") == str(index):
            unchanged.add(index)
    return unchanged


# --- Counting
# ------------------------------------------------------------------------------------


def collective(instruction: Instruction) -> str | None:
    """Which of ``COLLECTIVES`` it is, or begins."""
    kind = instruction.operation.removesuffix("-start")
    if kind == "recv" and "is_host_transfer=true" not in instruction.rest:
        return None  # a part of a permutation
    if kind not in COLLECTIVES:
        return None
    return kind


def continued(instruction: Instruction, computation: Computation) -> bool:
    """Whether it stands for a collective that another fusion has begun.

    A TPU's fusions repeat a collective until it is done.
    """
    if not _in_chain(instruction):
        return False
    targets = [call_target(i) for i in computation.values()]
    return "AsyncCollectiveStart" not in targets


def overlaps(instruction: Instruction, computation: Computation) -> bool:
    """Whether it is a collective between whose start and end something is computed."""
    if collective(instruction) is None or instruction.operation == "recv":
        return False
    if _in_chain(instruction):
        return True
    if not instruction.operation.endswith("-start"):
        return False
    place = list(computation).index(instruction.name)
    for i in list(computation.values())[place + 1 :]:
        if instruction.name in i.operands:  # the end
            return False
        is_asynchronous = i.operation.endswith(("-start", "-done"))
        if i.operation not in FREE and not is_asynchronous:
            return True
    return False


def _in_chain(instruction: Instruction) -> bool:
    """Whether it is a collective that a TPU computes in several fusions."""
    return collective(instruction) is not None and "chain_id=" in instruction.rest


def call_target(instruction: Instruction) -> str | None:
    """What a custom call calls."""
    return attribute(instruction, r'custom_call_target="([^"]*)"')


def goes_beyond(instruction: Instruction, group: int) -> bool:
    """Whether it is a collective of devices of more than one group.

    A group are so many devices, one after the other.
    """
    kind = collective(instruction)
    if kind is None:
        return False
    if kind == "recv":  # from another slice
        return True
    for devices in groups(instruction):
        if len({device // group for device in devices}) > 1:
            return True
    return False


def groups(instruction: Instruction) -> list[list[int]]:
    """The devices between which a collective communicates."""
    pairs = attribute(instruction, r"source_target_pairs=(\{\{[\d,{}]*\}\})")
    listed = pairs or attribute(instruction, r"replica_groups=(\{\{[\d,{}]*\}\})")
    if listed:
        return [_whole_numbers(one) for one in re.findall(r"\{([\d,]+)\}", listed)]
    # [2,4]<=[4,2]T(1,0): numbers of a 4 x 2 array, transposed, as two groups of four.
    lined_up = re.search(
        r"replica_groups=\[(\d+),\d+\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?",
        instruction.rest,
    )
    if lined_up:
        count, sizes, order = lined_up.groups()
        return _lined_up(sizes, order).reshape(int(count), -1).tolist()
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}",
        instruction.rest,
    )
    if mesh is None:
        raise ValueError(f"between which devices is not said: {instruction.rest[:200]}")
    return _groups_of_mesh(*mesh.groups())


def _groups_of_mesh(axes: str, device_ids: str | None, among: str) -> list[list[int]]:
    """Groups of devices, as a mesh: those that differ in some of its axes only.

    Args:
        axes: such as ``'data'=2,'fsdp'=4``.
        device_ids: the devices, or the shape and order of their numbers; None: in
            order.
        among: the axes along which devices of a group differ.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    ids = np.arange(math.prod(sizes.values()))
    if device_ids:
        order = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?", device_ids)
        if order:
            ids = _lined_up(order[1], order[2])
        else:
            ids = np.array(_whole_numbers(device_ids))
    ids = ids.reshape(list(sizes.values()))
    places = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", among)]
    size = math.prod(ids.shape[place] for place in places)
    at_the_end = range(-len(places), 0)
    return np.moveaxis(ids, places, at_the_end).reshape(-1, size).tolist()


def _lined_up(sizes: str, order: str | None) -> np.ndarray:
    """Numbers from zero in an array of these sizes, its axes then in another order."""
    shape = _whole_numbers(sizes)
    ids = np.arange(math.prod(shape)).reshape(shape)
    if order:
        ids = ids.transpose(_whole_numbers(order))
    return ids


def collective_bytes(instruction: Instruction) -> float:
    """Output bytes of a collective."""
    sizes = [array.bytes for array in arrays(instruction.shape)]
    if instruction.operation == "recv":  # and a context, and a token
        return sizes[0]
    if instruction.operation.endswith("-start"):  # its shape has the operands first
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


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
            axes = attribute(i, r"lhs_contracting_dims=\{([\d,]*)\}")
            found.append(_product(i, where, _contraction(i, where, axes)))
        elif i.operation == "convolution":
            found.append(_product(i, where, _taps(i, where)))
        elif i.operation == "custom-call":
            if (call_target(i) or "").startswith("__cublas$"):
                axes = attribute(i, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
                found.append(_product(i, where, _contraction(i, where, axes)))
            elif "matmul" in i.rest:
                raise ValueError(
                    f"a product hidden in a custom call is not counted: {i.rest[:200]}"
                )
    return found


def _product(i: Instruction, computation: Computation, contracted: float) -> Product:
    """A product with so many multiply-adds for an entry of its result."""
    precision = _first_attribute(
        i, r"algorithm=(dot_\w+)", r'"algorithm":"ALG_(DOT_\w+)"'
    )
    if not precision:
        precision = _first_attribute(
            i, r"operand_precision=\{(\w+)", r'"operand_precision":\["(\w+)"'
        )
    result = arrays(i.shape)[0]
    operand = arrays(computation[i.operands[0]].shape)[0]
    return Product(
        flops=2.0 * math.prod(result.sizes) * contracted,
        dtype=operand.dtype,
        precision=(precision or "default").lower(),
    )


def _first_attribute(i: Instruction, *patterns: str) -> str | None:
    """The first of several attributes that an instruction has."""
    for pattern in patterns:
        if found := attribute(i, pattern):
            return found
    return None


def _contraction(i: Instruction, computation: Computation, axes: str | None) -> int:
    """Multiply-adds for an entry of a product over these axes of its first operand."""
    sizes = arrays(computation[i.operands[0]].shape)[0].sizes
    return math.prod(sizes[axis] for axis in _whole_numbers(axes))


def _taps(i: Instruction, computation: Computation) -> float:
    """Multiply-adds for an entry of a convolution, which is how a TPU writes products.

    They are the kernel's input features times its window, without the zeros that
    dilation puts in the window: a batch of products is a convolution whose window sees
    one of them at a time.
    """
    labels = attribute(i, r"dim_labels=\w+_(\w+)->") or "io"
    kernel = arrays(computation[i.operands[1]].shape)[0]
    window = attribute(i, r"window=\{([^}]*)\}") or ""
    sizes = _by_x(window, "size")
    dilation = _by_x(window, "lhs_dilate") or [1] * len(sizes)
    taps = kernel.sizes[labels.index("i")]
    for size, dilated in zip(sizes, dilation, strict=True):
        taps *= -(-size // dilated)  # rounded up
    return taps


def _by_x(window: str, name: str) -> list[int]:
    """Sizes such as 3 and 4 of ``name=3x4``."""
    found = re.search(rf"(?:^| ){name}=([\dx]+)", window)
    if found is None:
        return []
    return [int(n) for n in found[1].split("x")]


def _whole_numbers(text: str | None) -> list[int]:
    """All whole numbers in a text."""
    return [int(n) for n in re.findall(r"\d+", text or "")]
