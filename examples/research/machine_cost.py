# SPDX-License-Identifier: Apache-2.0
"""What a compiled program costs on a TPU or GPU: a model of the machine.

``hlo`` says what is executed, ``traffic`` what it moves. ``Tpu`` and ``Gpu`` hold a
machine's published figures and price an instruction with them; ``meter`` adds the
prices up over a run, and ``assumptions`` says what they rest on. Nothing runs, so the
figures are free of noise: they rank programs. They leave out what the compiler's text
does not show: the cache of a GPU (every kernel reads and writes main memory), kernels
that overlap, and collectives, which are counted in bytes only.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from examples.research import hlo, traffic

TOP = 10
# Of a Jacobi eigendecomposition on a TPU: sweeps, and cycles that one round of one
# matrix takes. No estimate exists.
EIGH_SWEEPS = 8
EIGH_CYCLES = 150
# cuSOLVER's batched eigendecomposition takes 0.26 ms for batches of up to 32 x 32 (jax
# issue 31368).
EIGH_CALL_MS = 0.5
EIGH_BATCH = 64
EIGH_SIDE = 64
LAUNCH_MS = 2.5e-3
# They rearrange names, or reserve memory.
FREE_CALLS = {"ConcatBitcast", "AllocateBuffer", "Sharding"}


class Price(NamedTuple):
    """What one instruction costs, once.

    Milliseconds of computing and of eigendecompositions, bytes of main memory, and
    launches; ``unpriced`` names what the model knows no time for.
    """

    compute_ms: float = 0
    eigh_ms: float = 0
    bytes: float = 0
    kernels: float = 0
    unpriced: str = ""


class Memory:
    """What every machine has: a main memory."""

    bandwidth: float

    def moving_ms(self, moved: float) -> float:
        """Time of so many bytes."""
        return 1e3 * moved / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Tpu(Memory):
    """A TPU core that JAX sees as one device."""

    name: str
    topology: str
    # Hz: the published peak over the operations that the matrix units do in a cycle.
    clock: float
    bandwidth: float  # Bytes a second of HBM.
    peak: float  # bfloat16 operations a second.

    platform = "tpu"

    def price(
        self, program: hlo.Program, i: hlo.Instruction, computation: hlo.Computation
    ) -> Price:
        """Cycles as the compiler estimates them.

        It prices products as if their operands were on the chip.
        """
        target = hlo.call_target(i)
        if target in FREE_CALLS:
            return Price()
        moved = traffic.moved(program, i, computation)
        if target == "EighTpu":
            return Price(eigh_ms=self.eigh_ms(i, computation), bytes=moved)
        cycles = hlo.attribute(i, r'"estimated_cycles":"(\d+)"')
        if cycles:
            return Price(compute_ms=1e3 * (int(cycles) / self.clock), bytes=moved)
        # A Pallas kernel has no cycles, but says how many operations it does.
        operations = hlo.attribute(i, r'"cost_estimate":\{"flops":"(\d+)"')
        if operations:
            return Price(compute_ms=1e3 * (int(operations) / self.peak), bytes=moved)
        if i.operation.endswith("-start"):
            return Price(bytes=moved)
        return Price(bytes=moved, unpriced=_name_of(i, target))

    def eigh_ms(self, i: hlo.Instruction, computation: hlo.Computation) -> float:
        """A Jacobi eigendecomposition.

        Its matrices come in four blocks of half their side.
        """
        *batch, half, _ = hlo.arrays(computation[i.operands[0]].shape)[0].sizes
        rounds = EIGH_SWEEPS * (2 * half - 1)
        return 1e3 * math.prod(batch) * rounds * EIGH_CYCLES / self.clock

    def total_ms(self, compute_ms: float, moved: float, eigh_ms: float) -> float:
        """Computing and moving overlap."""
        return max(compute_ms, self.moving_ms(moved)) + eigh_ms

    @property
    def assumptions(self) -> str:
        """What the figures rest on, in words."""
        return (
            "cycles ms: the compiler's estimated cycles of all instructions at"
            f" {self.clock / 1e9:.3g} GHz (published peak over the operations of the"
            " matrix units in a cycle), loops as often as they turn, of a conditional"
            " the dearest branch; a Pallas kernel as the operations that it says it"
            " does, at the peak. HBM ms: bytes of all operands and results in main"
            f" memory at {self.bandwidth / 1e9:,.0f} GB/s. ms: the larger of the two,"
            " plus eigh ms. eigh ms, an assumption, as the compiler estimates none:"
            f" {EIGH_SWEEPS} sweeps of n - 1 rounds of {EIGH_CYCLES} cycles for every"
            " matrix of side n."
        )


@dataclasses.dataclass(frozen=True)
class Gpu(Memory):
    """An NVIDIA GPU."""

    name: str
    bandwidth: float  # Bytes a second of main memory.
    bfloat16: float  # Dense operations a second of the tensor cores.
    tensor_float: float  # Those on float32 operands cut to TF32.
    float32: float  # Those without tensor cores.
    config: str  # What the compiler is told of it, a ``GpuTargetConfig``.

    platform = "cuda"

    def price(
        self, program: hlo.Program, i: hlo.Instruction, computation: hlo.Computation
    ) -> Price:
        """Bytes or operations of a kernel, whichever take longer, and its launch."""
        target = hlo.call_target(i)
        if target in FREE_CALLS:
            return Price()
        moved = traffic.moved(program, i, computation)
        if target and "syev" in target:
            eigh_ms = self.eigh_ms(i, computation)
            return Price(eigh_ms=eigh_ms, bytes=moved, kernels=1)
        products = hlo.products(program, i, computation)
        computing = sum(1e3 * p.flops * self.seconds(p) for p in products)
        unpriced = ""
        if target and not target.startswith("__cublas"):
            unpriced = target
        return Price(
            compute_ms=max(computing, self.moving_ms(moved)) + LAUNCH_MS,
            bytes=moved,
            kernels=1,
            unpriced=unpriced,
        )

    def seconds(self, product: hlo.Product) -> float:
        """Of one operation of a product."""
        precision = product.precision
        times = 1
        if passes := re.search(r"_x(\d)$", precision):  # such as dot_bf16_bf16_f32_x3
            times = int(passes[1])
        if product.dtype in ("bf16", "f16") or precision.startswith("dot_bf16"):
            return times / self.bfloat16
        is_tf32 = precision in ("default", "high") or "tf32" in precision
        if product.dtype == "f32" and is_tf32:
            return times / self.tensor_float
        return times / self.float32

    def eigh_ms(self, i: hlo.Instruction, computation: hlo.Computation) -> float:
        """Calls for batches of small matrices; the cost of larger ones is cubic."""
        *batch, side, _ = hlo.arrays(computation[i.operands[0]].shape)[0].sizes
        calls = math.ceil(math.prod(batch) / EIGH_BATCH)
        return EIGH_CALL_MS * calls * max(1, side / EIGH_SIDE) ** 3

    def total_ms(self, compute_ms: float, moved: float, eigh_ms: float) -> float:
        """Kernels run one after the other; each was charged for what it moves."""
        return compute_ms + eigh_ms

    @property
    def assumptions(self) -> str:
        """What the figures rest on, in words."""
        return (
            "kernels ms: for every kernel its bytes in and out at"
            f" {self.bandwidth / 1e9:,.0f} GB/s or its products' operations, whichever"
            f" take longer, and {1e3 * LAUNCH_MS:g} microseconds to launch; loops as"
            " often as they turn, of a conditional the dearest branch. Operations a"
            " second, from NVIDIA's data sheet (dense): bfloat16"
            f" {self.bfloat16 / 1e12:g}e12; float32 {self.tensor_float / 1e12:g}e12 as"
            f" TF32 at default precision, {self.float32 / 1e12:g}e12 at the highest."
            " HBM ms: all bytes, without the cache. ms: kernels ms plus eigh ms. eigh"
            f" ms, an assumption: {EIGH_CALL_MS} ms a call for up to {EIGH_BATCH}"
            f" matrices of side up to {EIGH_SIDE} (published: 0.26 ms for batches up to"
            " 32 x 32, jax issue 31368)."
        )


def _name_of(i: hlo.Instruction, target: str | None) -> str:
    """What to call an instruction without a price; numbers by themselves need none."""
    if target:
        return target
    entries = [math.prod(array.sizes) for array in hlo.arrays(i.shape)]
    if max(entries, default=0) <= 1:
        return ""
    return f"{i.operation} ({i.op_name.rpartition('/')[2]})"


Machine = Tpu | Gpu


def _gpu_config(
    *,
    description: str,
    capability: tuple[int, int],
    cores: int,
    fpus: int,
    shared_memory: int,
    bandwidth: int,
    l2_cache: int,
    clock_ghz: float,
    memory: int,
) -> str:
    """XLA's ``GpuTargetConfig`` as text.

    FPUs and shared memory are those of a core, sizes are in bytes.
    """
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "core_count": cores,
        "fpus_per_core": fpus,
        "shared_memory_per_core": shared_memory,
        "shared_memory_per_block_optin": shared_memory - 1024,
        "memory_bandwidth": bandwidth,
        "l2_cache_size": l2_cache,
        "clock_rate_ghz": clock_ghz,
        "device_memory_size": memory,
    }
    written = " ".join(f"{name}: {value}" for name, value in fields.items())
    major, minor = capability
    return (
        f"gpu_device_info {{ {written} cuda_compute_capability {{ major: {major} minor:"
        f" {minor} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }'
        f' device_description_str: "{description}"'
    )


# Peaks and bandwidths of TPUs are Google Cloud's, per JAX device: of tpu7x that is half
# a chip. Operations a cycle are two for each place of the matrix units, four of 128 x
# 128 (v5e), eight of those (v5p) or four of 256 x 256. GPUs are the SXM modules of
# NVIDIA's data sheets, without sparsity.
MACHINES: dict[str, Machine] = {
    "v5e": Tpu("TPU v5e", "v5e:2x2", clock=1.5e9, bandwidth=819e9, peak=197e12),
    "v5p": Tpu("TPU v5p", "v5p:2x2x1", clock=1.75e9, bandwidth=2765e9, peak=459e12),
    "v6e": Tpu("TPU v6e", "v6e:2x2", clock=1.75e9, bandwidth=1640e9, peak=918e12),
    "tpu7x": Tpu(
        "TPU7x (half a chip)",
        "tpu7x:2x2x1",
        clock=2.2e9,
        bandwidth=3690e9,
        peak=1153e12,
    ),
    "a100": Gpu(
        name="A100 SXM 80 GB",
        bandwidth=2039e9,
        bfloat16=312e12,
        tensor_float=156e12,
        float32=19.5e12,
        config=_gpu_config(
            description="NVIDIA A100-SXM4-80GB",
            capability=(8, 0),
            cores=108,
            fpus=64,
            shared_memory=167936,
            bandwidth=2039000000000,
            l2_cache=41943040,
            clock_ghz=1.41,
            memory=85899345920,
        ),
    ),
    "h100": Gpu(
        name="H100 SXM",
        bandwidth=3352.32e9,
        bfloat16=989e12,
        tensor_float=494.7e12,
        float32=67e12,
        config=_gpu_config(
            description="NVIDIA H100 80GB HBM3",
            capability=(9, 0),
            cores=132,
            fpus=128,
            shared_memory=233472,
            bandwidth=3352320000000,
            l2_cache=52428800,
            clock_ghz=1.98,
            memory=84942979072,
        ),
    ),
    "b200": Gpu(
        name="B200 SXM",
        bandwidth=8000e9,
        bfloat16=2250e12,
        tensor_float=1125e12,
        float32=75e12,
        config=_gpu_config(
            description="NVIDIA B200",
            capability=(10, 0),
            cores=148,
            fpus=128,
            shared_memory=233472,
            bandwidth=8000000000000,
            l2_cache=132644864,
            clock_ghz=1.965,
            memory=191512248320,
        ),
    ),
}


def meter(text: str, machine: Machine, turns: float | None = None) -> dict[str, Any]:
    """Estimate a compiled program.

    Args:
        text: ``compiled.as_text()``, compiled for ``machine``.
        machine: whose model.
        turns: how often loops turn on average whose bounds are data.

    Returns:
        ``ms``, the estimate; what it is made of: ``compute_ms``, ``hbm_ms``,
        ``eigh_ms``; ``hbm_bytes``; ``kernels``; ``flops`` by type and precision of
        operands; ``collectives``, their output bytes; ``unpriced``, instructions that
        no time is known for, by name; ``top``, the ten most expensive origins.

    Raises:
        ValueError: if a loop whose bounds are data costs anything and ``turns`` is
            None.
    """
    program = hlo.parse(text)
    price = _prices(program, machine)

    def weight(i: hlo.Instruction, computation: hlo.Computation) -> float:
        one = price(i, computation)
        return machine.total_ms(one.compute_ms, one.bytes, one.eigh_ms)

    totals = _Totals()
    for e in hlo.executed(program, weight, turns):
        products = hlo.products(program, e.instruction, e.computation)
        ms = weight(e.instruction, e.computation)
        totals.add(e, price(e.instruction, e.computation), products, ms)
    return {
        "ms": machine.total_ms(totals.compute_ms, totals.bytes, totals.eigh_ms),
        "compute_ms": totals.compute_ms,
        "hbm_ms": machine.moving_ms(totals.bytes),
        "eigh_ms": totals.eigh_ms,
        "hbm_bytes": totals.bytes,
        "kernels": totals.kernels,
        "flops": dict(sorted(totals.flops.items())),
        "collectives": dict(sorted(totals.collectives.items())),
        "unpriced": dict(sorted(totals.unpriced.items())),
        "top": totals.top(),
    }


def _prices(
    program: hlo.Program, machine: Machine
) -> Callable[[hlo.Instruction, hlo.Computation], Price]:
    """The function that prices an instruction of a program, each once.

    A computation is a dictionary, which no cache takes: it stands for its name.
    """

    @functools.cache
    def at(name: str, computation: str) -> Price:
        body = program.computations[computation]
        return machine.price(program, body[name], body)

    owner = {id(body): name for name, body in program.computations.items()}

    def price(i: hlo.Instruction, computation: hlo.Computation) -> Price:
        return at(i.name, owner[id(computation)])

    return price


def _by_name() -> dict[str, float]:
    """Sums by name, zero at first."""
    return collections.defaultdict(float)


@dataclasses.dataclass
class _Totals:
    """What the instructions of a run cost together."""

    compute_ms: float = 0.0
    eigh_ms: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    flops: dict[str, float] = dataclasses.field(default_factory=_by_name)
    collectives: dict[str, float] = dataclasses.field(default_factory=_by_name)
    unpriced: dict[str, float] = dataclasses.field(default_factory=_by_name)
    # By where in the traced program an instruction comes from.
    origin_ms: dict[str, float] = dataclasses.field(default_factory=_by_name)
    origin_times: dict[str, float] = dataclasses.field(default_factory=_by_name)

    def add(
        self, e: hlo.Executed, price: Price, products: list[hlo.Product], ms: float
    ) -> None:
        """Add an instruction as often as it runs."""
        self.compute_ms += e.times * price.compute_ms
        self.eigh_ms += e.times * price.eigh_ms
        self.bytes += e.times * price.bytes
        self.kernels += e.times * price.kernels
        for product in products:
            kind = f"{product.dtype} {product.precision}"
            self.flops[kind] += e.times * product.flops
        if collective := hlo.collective(e.instruction):
            communicated = hlo.collective_bytes(e.instruction)
            self.collectives[collective] += e.times * communicated
        if price.unpriced:
            self.unpriced[price.unpriced] += e.times
        # Layers differ in their numbers, and count as one origin.
        name = e.instruction.op_name or e.instruction.operation
        origin = re.sub(r"\d+", "#", name)
        self.origin_ms[origin] += e.times * ms
        self.origin_times[origin] += e.times

    def top(self) -> list[dict[str, Any]]:
        """The most expensive origins."""
        origins = sorted(self.origin_ms, key=lambda origin: -self.origin_ms[origin])
        return [
            {
                "origin": origin,
                "ms": self.origin_ms[origin],
                "times": self.origin_times[origin],
            }
            for origin in origins[:TOP]
        ]
