# SPDX-License-Identifier: Apache-2.0
"""Small faults, put into the library one at a time: the default tests must catch every one of them.

    python -m tests.break_it                    # all of them
    python -m tests.break_it a_power_less ...   # these

Each fault is a line of the library, changed in a copy of the working tree, and the test files that are to notice. They
run as the default run does, without what is marked slow, and stop at the first failure: the report names it, if it
passes without the fault. A fault that survives, or that no longer finds its line, fails the script.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """``old`` stands once in ``file`` of the package, and becomes ``new``; ``tests`` are to notice."""

    file: str
    old: str
    new: str
    tests: str


FAULTS = {
    "tangent_lengthens": Fault(
        "linalg/rows.py",
        "relaxed = 1 - ww /",
        "relaxed = 1 + ww /",
        "tests/linalg/test_rows.py",
    ),
    "noise_is_a_direction": Fault(
        "linalg/rows.py",
        "(xx <= (8 * eps) ** 2 * mm)",
        "(xx < 0)",
        "tests/linalg/test_rows.py",
    ),
    "muons_third_coefficient": Fault(
        "linalg/newton_schulz.py",
        "((3.4445, -4.7750, 2.0315),)",
        "((3.4445, -4.7750, 2.0215),)",
        "tests/linalg/test_newton_schulz.py",
    ),
    "gram_not_scaled": Fault(
        "linalg/newton_schulz.py",
        "y = _times(q * start, y, operand_dtype)",
        "y = _times(q, y, operand_dtype)",
        "tests/linalg/test_newton_schulz.py",
    ),
    "modes_below_one_clipped": Fault(
        "linalg/spectrum.py",
        "jnp.maximum(modes.values / level[..., 0], 1)",
        "jnp.maximum(modes.values / level[..., 0], 0.5)",
        "tests/linalg/test_spectrum.py",
    ),
    "a_power_less": Fault(
        "linalg/eigenspace.py",
        "for _ in range(power_iterations):",
        "for _ in range(power_iterations - 1):",
        "tests/linalg/test_eigenspace.py",
    ),
    "smallest_modes": Fault(
        "linalg/eigenspace.py",
        "Modes(values[..., :k], exact_product(z[..., :k, :], a), exact_product(z[..., :k, :], b))",
        "Modes(values[..., -k:], exact_product(z[..., -k:, :], a), exact_product(z[..., -k:, :], b))",
        "tests/linalg/test_eigenspace.py",
    ),
    "noise_is_a_pivot": Fault(
        "linalg/orthonormal.py",
        "inverse = jnp.where(pivot <= noise, 0,",
        "inverse = jnp.where(pivot < 0, 0,",
        "tests/linalg/test_orthonormal.py",
    ),
    "exact_products_are_not": Fault(
        "linalg/precision.py",
        "return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)",
        "return jnp.matmul(a, b)",
        "tests/linalg/test_precision.py",
    ),
    "draws_forget_the_place": Fault(
        "transforms/draws.py",
        "for part in (step, identity, slice_index):",
        "for part in (step, identity):",
        "tests/transforms/test_stages.py",
    ),
    "columns_first": Fault(
        "transforms/wrappers.py",
        '(state.count % 2 == 0) == (first == "rows")',
        '(state.count % 2 == 0) != (first == "rows")',
        "tests/transforms/test_wrappers.py",
    ),
    "updates_stay_float32": Fault(
        "transforms/wrappers.py",
        "lambda u, p: u.astype(jnp.asarray(p).dtype)",
        "lambda u, p: u",
        "tests/transforms/test_wrappers.py tests/test_contract.py",
    ),
    "size_of_a_row": Fault(
        "transforms/scale.py",
        "math.sqrt(t.shape[-2] * t.shape[-1])",
        "math.sqrt(t.shape[-1])",
        "tests/transforms/test_stages.py",
    ),
    "row_moments_grow": Fault(
        "transforms/second_moment.py",
        "kept * moment + (1 - kept)",
        "kept * moment + (1 + kept)",
        "tests/test_family.py",
    ),
    "dion_forgets_nothing": Fault(
        "transforms/low_rank.py",
        "left = m - in_context(share)",
        "left = m - 0 * in_context(share)",
        "tests/test_family.py",
    ),
    "record_a_step_late": Fault(
        "transforms/monitor.py",
        "count % every == 0",
        "count % every == 1",
        "tests/transforms/test_monitor.py",
    ),
    "axes_not_put_back": Fault(
        "parameters/dims.py",
        "tuple(order.index(axis) for axis in range(len(shape)))",
        "order",
        "tests/parameters/test_dims.py",
    ),
    "embedding_by_normpre": Fault(
        "parameters/roles.py",
        '"embs", "wte"}',
        '"embs"}',
        "tests/parameters",
    ),
    "mask_ignored": Fault(
        "finish.py",
        "jax.tree.broadcast(given if is_tree else given(params), params)",
        "jax.tree.map(lambda _: default, params)",
        "tests/test_contract.py -k tree_of_parameters",
    ),
    "adams_other_b2": Fault(
        "options.py",
        "adam_b2: Annotated[Number, Option(0.95,",
        "adam_b2: Annotated[Number, Option(0.999,",
        "tests/test_api_grammar.py",
    ),
    "any_momentum": Fault(
        "options.py",
        '"``mu`` in ``M = mu M + G``.", least=0, below=1)',
        '"``mu`` in ``M = mu M + G``.")',
        "tests/test_api_grammar.py",
    ),
    "any_shape": Fault(
        "transforms/checks.py",
        "if gradient_shapes[path] != shape:",
        "if False:",
        "tests/test_contract.py -k gradients_that_do_not_fit",
    ),
    "products_set_and_do_not_clip": Fault(
        "linalg/newton_schulz.py",
        "exact_product((whole - sign) / 2, factor - whole)",
        "factor - whole",
        "tests/linalg/test_newton_schulz.py",
    ),
    "brake_of_the_first_order": Fault(
        "norm_control.py",
        "(2 * wu + uu) / jnp.where(both == 0, 1, both)",
        "2 * wu / jnp.where(both == 0, 1, both)",
        "tests/test_norm_control.py",
    ),
    "off_the_sphere": Fault(
        "norm_control.py",
        "return (back - 1) * w - back * size * u",
        "return (back - 1) * w - size * u",
        "tests/test_norm_control.py",
    ),
    "directions_forget_their_length": Fault(
        "norm_control.py",
        "turn = jnp.where(gain == 0, 1, gain) / jnp.where(length == 0, 1, length)",
        "turn = jnp.ones_like(gain)",
        "tests/test_norm_control.py",
    ),
    "rates_ignored": Fault(
        "finish.py",
        "lambda u, x: x * u",
        "lambda u, x: u",
        "tests/test_transfer.py",
    ),
    "a_wrong_device": Fault(
        "meshes/plan.py",
        "flat * sizes[a] + at[a]",
        "flat + sizes[a] * at[a]",
        "tests/meshes normpre_optax/meshes",
    ),
    "pieces_put_together_wrong": Fault(
        "meshes/exchange.py",
        "from_lines(lines, rows, columns).transpose(2, 0, 3, 1, 4)",
        "from_lines(lines, rows, columns).transpose(2, 1, 3, 0, 4)",
        "tests/meshes",
    ),
    "problems_of_another_device": Fault(
        "meshes/small.py",
        "jax.lax.axis_index(team) * share + jnp.arange(share)",
        "jnp.arange(share)",
        "tests/meshes/test_small.py",
    ),
    "draws_of_another_device": Fault(
        "meshes/exchange.py",
        "ids[jnp.asarray(plan.slots)[device]]",
        "ids[jnp.asarray(plan.slots)[0]]",
        "tests/meshes",
    ),
    "state_on_every_device": Fault(
        "meshes/run.py",
        "entries.append(None if side is None else lie[side])",
        "entries.append(None)",
        "tests/meshes",
    ),
    "all_turn_for_one": Fault(
        "meshes/run.py",
        "transposed=balance > 0",
        "transposed=balance < 0",
        "tests/meshes",
    ),
}


def caught_by(fault: Fault, tree: Path) -> str:
    """The first test that fails with the fault in ``tree``; "" if all pass."""
    path = tree / "normpre_optax" / fault.file
    source = path.read_text()
    if source.count(fault.old) != 1:
        raise SystemExit(f"{fault.file}: {fault.old!r} stands there {source.count(fault.old)} times, not once")
    path.write_text(source.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", *fault.tests.split()]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=600)
    finally:
        path.write_text(source)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if not done.returncode:
        return ""
    if not failed or subprocess.run([*command[:5], failed[1]], cwd=tree, capture_output=True, check=False).returncode:
        raise SystemExit(f"not the fault's doing:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failed[1]


def main(names: list[str]) -> int:
    """Try the faults of those names, or all; the number of those that survived."""
    unknown = set(names) - FAULTS.keys()
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        unwanted = shutil.ignore_patterns(".git", ".venv*", ".pytest_cache", "__pycache__", "results", "_build", "runs")
        shutil.copytree(ROOT, tree, ignore=unwanted)
        for name in names or FAULTS:
            start = time.perf_counter()
            test = caught_by(FAULTS[name], tree)
            survivors += not test
            print(f"{name:28} {time.perf_counter() - start:5.0f} s  {test or 'SURVIVED'}", flush=True)
    print(f"{survivors} of {len(names or FAULTS)} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
