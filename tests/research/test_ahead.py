# SPDX-License-Identifier: Apache-2.0
"""The cost estimate of programs whose cost is known.

And of real ones, where the compilers of TPUs and GPUs are installed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from examples.research import ahead, hlo, machine_cost
from examples.research.machine_cost import MACHINES

pytestmark = pytest.mark.every_platform

# Round figures: a cycle is a microsecond, a byte a nanosecond, an operation a
# picosecond or more.
TPU = machine_cost.Tpu("test", "", clock=1e6, bandwidth=1e9, peak=1e12)
GPU = machine_cost.Gpu(
    "test", bandwidth=1e9, bfloat16=1e12, tensor_float=5e11, float32=1e11, config=""
)
LAUNCH = machine_cost.LAUNCH_MS


def cycles(n):
    return (
        'metadata={op_name="jit(step)/mul"},'
        f' backend_config={{"estimated_cycles":"{n}"}}'
    )


def computation(name, *lines):
    """The computation of these instructions, of which the last is the root.

    "main" is the entry.
    """
    *before, last = lines
    inside = "".join(f"  {line}\n" for line in (*before, f"ROOT {last}"))
    entry = "ENTRY " if name == "main" else ""
    return f"{entry}%{name} (x: f32[]) -> f32[] {{\n{inside}}}\n"


X, CARRY = "f32[1000]{0}", "(s32[], f32[1000]{0}, s32[])"
SCALE = computation("scale", f"%p = {X} parameter(0)", f"%double = {X} add(%p, %p)")
WORK = (f"%z = {X} fusion(%y), kind=kLoop, calls=%scale, {cycles(7)}",)
IN_THE_TUPLE = "get-tuple-element(%c), index=2"
COUNTER = 12  # bytes: a turn adds one to a number


def one(*lines, computations=(SCALE,)):
    """A program of these instructions, whose argument is x."""
    entry = computation("main", f"%x = {X} parameter(0)", *lines)
    return "\n".join([*computations, entry])


def less(name, bound=IN_THE_TUPLE):
    """The condition of a loop."""
    return computation(
        name,
        f"%c = {CARRY} parameter(0)",
        "%i = s32[] get-tuple-element(%c), index=0",
        f"%n = s32[] {bound}",
        "%less = pred[] compare(%i, %n), direction=LT",
    )


def body(name, inside, last="%m"):
    """A turn of a loop, that makes z of y."""
    return computation(
        name,
        f"%b = {CARRY} parameter(0)",
        "%j = s32[] get-tuple-element(%b), index=0",
        f"%y = {X} get-tuple-element(%b), index=1",
        "%m = s32[] get-tuple-element(%b), index=2",
        "%one = s32[] constant(1)",
        "%next = s32[] add(%j, %one)",
        *inside,
        f"%t = {CARRY} tuple(%next, %z, {last})",
    )


def looped(rest="", inside=WORK, bound=IN_THE_TUPLE, last="%m", more=()):
    """A loop over the scaling of a thousand numbers.

    It starts at 0, with the bound 4 in its tuple.
    """
    return one(
        "%zero = s32[] constant(0)",
        "%four = s32[] constant(4)",
        f"%start = {CARRY} tuple(%zero, %x, %four)",
        f"%loop = {CARRY} while(%start), condition=%test, body=%body{rest}",
        f"%y = {X} get-tuple-element(%loop), index=1",
        computations=(SCALE, *more, less("test", bound), body("body", inside, last)),
    )


def test_bytes_and_cycles_of_a_fusion_and_names_of_what_has_no_price():
    fusion = f"%y = {X} fusion(%x), kind=kLoop, calls=%scale, {cycles(3)}"
    row = machine_cost.meter(one(fusion), TPU)
    assert row["hbm_bytes"] == 8000  # four in, four out
    assert (row["compute_ms"], row["hbm_ms"]) == pytest.approx((0.003, 0.008))
    assert row["ms"] == row["hbm_ms"]  # the larger of the two
    call = f'%y = {X} custom-call(%x), custom_call_target="Cholesky"'
    assert machine_cost.meter(one(call), TPU)["unpriced"] == {"Cholesky": 1}
    # A Pallas kernel says how many operations it has.
    estimate = '{"flops":"20000000","transcendentals":"0"}'
    call += f', backend_config={{"custom_call_config":{{"cost_estimate":{estimate}}}}}'
    row = machine_cost.meter(one(call), TPU)
    assert row["compute_ms"] == pytest.approx(0.02)
    assert row["unpriced"] == {}
    assert row["hbm_bytes"] == 8000


def test_what_is_on_the_chip_costs_no_bytes_and_a_copy_counts_once():
    row = machine_cost.meter(
        one(
            "%start = (f32[1000]{0:T(8)S(1)}, f32[1000]{0:T(8)}, u32[]{:S(2)})"
            " copy-start(%x)",
            "%here = f32[1000]{0:T(8)S(1)} copy-done(%start)",
            "%slice = ((f32[1000]{0:T(8)}), f32[10]{0:T(8)S(1)}, s32[]{:S(2)})"
            " slice-start(%x), slice={[0:10]}",
            "%part = f32[10]{0:T(8)S(1)} slice-done(%slice)",
            "%all = f32[10]{0:T(8)S(1)} custom-call(%part),"
            ' custom_call_target="ConcatBitcast"',
            "%y = f32[1000]{0:T(8)S(1)} fusion(%here), kind=kLoop, calls=%scale,"
            f" {cycles(3)}",
        ),
        TPU,
    )
    assert row["hbm_bytes"] == 4000 + 40
    assert row["unpriced"] == {}


def test_slices_in_a_fusion_count_with_the_slice():
    a = "f32[100,1000]{1,0}"
    given = (
        "%k = s32[] parameter(2)",
        "%nil = s32[] constant(0)",
        f"%p = {a} parameter(0)",
        f"%q = {a} parameter(1)",
    )
    inner = computation(
        "part",
        *given,
        "%row = f32[1,1000]{1,0} dynamic-slice(%p, %k, %nil),"
        " dynamic_slice_sizes={1,1000}",
        "%sine = f32[1,1000]{1,0} sine(%row)",
        f"%out = {a} dynamic-update-slice(%q, %sine, %k, %nil)",
    )
    outer = computation(
        "main",
        *given,
        f"%y = {a} fusion(%p, %q, %k), kind=kLoop, calls=%part, {cycles(1)}",
    )
    for machine in (TPU, GPU):
        row = machine_cost.meter(inner + outer, machine)
        assert row["hbm_bytes"] == 4000 + 4000 + 4  # a row in, a row out, the index


def test_how_often_a_loop_turns():
    for text, turns in (
        (looped(', backend_config={"known_trip_count":{"n":"3"}}'), 3),
        (looped(bound="constant(5)"), 5),
        (looped(), 4),
    ):
        row = machine_cost.meter(text, TPU)
        assert row["compute_ms"] == pytest.approx(turns * 0.007)
        assert row["hbm_bytes"] == turns * (8000 + COUNTER)
    changing = looped(last="%next")  # a bound that is data
    with pytest.raises(ValueError, match="does not say how often"):
        machine_cost.meter(changing, TPU)
    row = machine_cost.meter(changing, TPU, turns=2.5)
    assert row["compute_ms"] == pytest.approx(2.5 * 0.007)


def test_how_often_a_loop_in_a_loop_turns():
    inner = (
        "%zero = s32[] constant(0)",
        f"%start = {CARRY} tuple(%zero, %y, %m)",
        f"%loop = {CARRY} while(%start), condition=%inner, body=%work",
        f"%z = {X} get-tuple-element(%loop), index=1",
    )
    more = (less("inner"), body("work", WORK))
    nested = looped(inside=inner, bound="constant(5)", more=more)
    row = machine_cost.meter(nested, TPU)
    assert row["compute_ms"] == pytest.approx(5 * 4 * 0.007)


def test_the_most_expensive_branch_counts():
    fusion = f"%r = {X} fusion(%p), kind=kLoop, calls=%scale, "
    branches = [
        computation(f"b{n}", f"%p = {X} parameter(0)", fusion + cycles(n))
        for n in (10, 30, 20)
    ]
    call = (
        f"%y = {X} conditional(%which, %x, %x, %x), branch_computations={{%b10, %b30,"
        " %b20}"
    )
    row = machine_cost.meter(
        one("%which = s32[] constant(0)", call, computations=(SCALE, *branches)), TPU
    )
    assert row["compute_ms"] == pytest.approx(0.03)
    assert row["hbm_bytes"] == 8000
    assert row["top"][0]["times"] == 1


def test_kernels_of_a_gpu():
    """A product of 100 x 100 in TF32, and a launch.

    It has 2e6 operations (4 us), and moves 120,000 bytes (120 us).
    """
    a = "f32[100,100]{1,0}"
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = computation(
        "gemm",
        f"%p = {a} parameter(0)",
        f"%q = {a} parameter(1)",
        f"%d = {a} dot(%p, %q), {dims}",
    )
    fusion = f"%y = {a} fusion(%a, %b), kind=kCustom, calls=%gemm"
    text += computation(
        "main", f"%a = {a} parameter(0)", f"%b = {a} bitcast(%a)", fusion
    )
    row = machine_cost.meter(text, GPU)
    assert row["kernels"] == 1
    assert row["flops"] == {"f32 default": 2e6}
    assert row["ms"] == pytest.approx(0.12 + LAUNCH)
    slow = dataclasses.replace(GPU, bandwidth=1e15)
    row = machine_cost.meter(text, slow)
    assert row["ms"] == pytest.approx(0.004 + LAUNCH, rel=1e-3)
    highest = text.replace(dims, f"{dims}, operand_precision={{highest,highest}}")
    row = machine_cost.meter(highest, slow)
    assert row["ms"] == pytest.approx(0.02 + LAUNCH, rel=1e-3)


def test_products_of_libraries_and_as_convolutions():
    def operands(a, b):
        return f"%a = {a}{{2,1,0}} parameter(0)", f"%b = {b}{{2,1,0}} parameter(1)"

    call = (
        "%y = (bf16[7,10,30]{2,1,0}, s8[64]{0}) custom-call(%a, %b),"
        ' custom_call_target="__cublas$gemm", '
        'backend_config={"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"]}}'
    )
    text = computation("main", *operands("bf16[7,10,20]", "bf16[7,20,30]"), call)
    row = machine_cost.meter(text, GPU)
    assert row["flops"] == {"bf16 default": 2 * 7 * 10 * 20 * 30}
    assert row["unpriced"] == {}
    # A batch of products that a TPU writes as a convolution.
    call = (
        "%y = f32[12,256,128]{2,1,0} convolution(%a, %b), window={size=12 stride=11"
        " lhs_dilate=12}, dim_labels=0bf_0io->0bf"
    )
    text = computation("main", *operands("f32[12,256,512]", "f32[12,512,128]"), call)
    assert hlo.cost(text).flops == 2 * 12 * 256 * 512 * 128


def test_eigendecompositions_are_priced_by_assumption():
    def call(count, size, target, memory="", given="%x"):
        x = f"f32[{count},{size},{size}]{{2,1,0{memory}}}"
        y = f"f32[{count},{size}]{{1,0{memory}}}"
        eigh = f'%y = {y} custom-call({given}), custom_call_target="{target}"'
        return computation("main", f"%x = {x} parameter(0)", eigh)

    row = machine_cost.meter(call(3, 20, "EighTpu", ":S(1)", "%x, %x, %x, %x"), TPU)
    assert row["ms"] == pytest.approx(row["eigh_ms"])
    assert row["ms"] == pytest.approx(3 * 8 * 39 * 150 / 1e3)
    assert row["unpriced"] == {}
    row = machine_cost.meter(call(65, 40, "cusolver_syevd_ffi"), GPU)
    assert (row["eigh_ms"], row["kernels"]) == (1, 1)  # two batches of up to 64


def test_an_option_that_is_not_known_is_named():
    for options, said in (
        ({"target": ("v99",)}, "--target v99: it takes v5e, "),
        ({"target": ()}, "--target without a name: it takes"),
        ({"optimizers": ("adamv",)}, "--optimizers adamv: it takes"),
        ({"model": "gpt3"}, "--model gpt3: it takes tiny, "),
        ({"train_step": "gpt3"}, "--train-step gpt3: it takes"),
        ({"layers": 0}, "--layers 0 is none of 1 to 12"),
        ({"layers": 99}, "--layers 99 is none of 1 to 12"),
    ):
        with pytest.raises(SystemExit, match=f"^{said}"):
            ahead.main(ahead.Options(**options))


def test_what_does_not_fit_is_one_line_and_the_rest_has_its_rows(monkeypatch, tmp_path):
    class Large:
        def trace(self, *args, **kwargs):
            return self

        def lower(self, *args, **kwargs):
            return self

        def compile(self, **options):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory on HBM (18G).\nLargest: ..."
            )

    def estimate(target, model, layers, name):
        if name == "muon":
            ahead.compiled(target, Large(), ())
        return dict.fromkeys(("ms", "compile_s"), 1.0) | {"unpriced": {}, "flops": {}}

    monkeypatch.setattr(ahead, "estimate", estimate)
    monkeypatch.setattr(ahead, "devices", lambda target: jax.devices("cpu"))
    line = (
        r"^muon on v5e: Ran out of memory on HBM \(18G\)\. --layers .*--micro-batch"
        r" [a-z ]+$"
    )
    with pytest.raises(SystemExit, match=line):
        ahead.main(ahead.Options(optimizers=("adamw", "muon"), out=tmp_path))
    assert "| adamw | 1 |" in (tmp_path / "ahead_v5e_gpt2_small.md").read_text()


def test_a_compiler_that_is_not_installed_is_asked_for(monkeypatch):
    monkeypatch.setattr(ahead.importlib.util, "find_spec", lambda name: None)
    ahead.devices.cache_clear()
    for target, extra in (("v5e", "tpu-compile"), ("h100", "gpu-compile")):
        with pytest.raises(SystemExit, match=extra):
            ahead.devices(target)


def compiles(target):
    """A mark: only where the compiler for ``target`` is installed."""
    extra = ahead.missing(target)
    return pytest.mark.skipif(bool(extra), reason=f'pip install ".[{extra}]"')


BOTH = [pytest.param(target, marks=compiles(target)) for target in ("v5e", "h100")]


def priced(target, f, *shapes):
    """The estimated cost of a function compiled for a chip."""
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    program, *_ = ahead.compiled(target, jax.jit(f), arguments)
    return machine_cost.meter(program.as_text(), MACHINES[target])


@pytest.mark.parametrize("target", BOTH)
def test_a_loop_costs_what_the_unrolled_program_does(target):
    def step(y, w):
        return jnp.tanh(y @ w)

    def unrolled(x, w):
        for _ in range(7):
            x = step(x, w)
        return x

    def rolled(x, w):
        return jax.lax.fori_loop(0, 7, lambda _, y: step(y, w), x)

    loop = priced(target, rolled, (1024, 1024), (1024, 1024))
    flat = priced(target, unrolled, (1024, 1024), (1024, 1024))
    assert loop["flops"].keys() <= {"f32 default", "bf16 default"}
    assert sum(loop["flops"].values()) == sum(flat["flops"].values()) == 7 * 2 * 1024**3
    # On a GPU a loop also launches a kernel that counts, and one that copies what it
    # carries.
    if target == "v5e":
        assert loop["ms"] == pytest.approx(flat["ms"], rel=0.1)


@pytest.mark.parametrize("target", BOTH)
def test_a_large_product_takes_what_is_published(target):
    """Within a fifth of the peak.

    The compiler fills the matrix units; the model of a GPU assumes so.
    """
    row = ahead.estimate(target, "tiny", None, ahead.PRODUCT)
    peak = {"v5e": 197e12, "h100": 989e12}[target]
    assert 1 <= row["ms"] / (1e3 * 2 * ahead.SIDE**3 / peak) < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("target", BOTH)
def test_adamw_moves_28_bytes_a_weight(target):
    """Four arrays in, three out; the time of these bytes and not much more."""
    row = ahead.estimate(target, "gpt2_small", 1, "adamw")
    assert row["hbm_bytes_per_weight"] == pytest.approx(28, rel=1e-3)
    assert row["state_per_weight_byte"] == pytest.approx(2, rel=1e-3)
    assert row["hbm_ms"] <= row["ms"] < 1.4 * row["hbm_ms"]


@pytest.mark.slow
@pytest.mark.parametrize("target", BOTH)
def test_the_report(target, tmp_path):
    options = ahead.Options(
        target=(target,),
        model="tiny",
        layers=1,
        optimizers=("adamw", "mano"),
        out=tmp_path,
    )
    ahead.main(options)
    table = (tmp_path / f"ahead_{target}_tiny_1layers.md").read_text()
    assert "nothing was run" in table
    assert "| mano |" in table
    assert "--layers 1 --optimizers adamw mano" in table


@pytest.mark.slow
@compiles("v5e")
def test_a_train_step():
    row = ahead.estimate_train_step("v5e", "tiny", 1, "adamw")
    assert row["peak_bytes"] >= row["argument_bytes"] > 0
    assert row["flops"]
