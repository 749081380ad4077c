# SPDX-License-Identifier: Apache-2.0
"""Small faults, put into the package one at a time: the default tests must catch every
one of them.

    python -m tests.break_it                    # all of them
    python -m tests.break_it a_power_less ...   # these

Each fault changes a line of the package in a copy of the working tree, and names the
tests that must fail. They run as the default run does, without slow tests, and stop at
the first failure; that test must pass without the fault. A fault that survives, or
whose line no longer exists, fails the script.
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
    """``old`` occurs once in ``file`` of the package and becomes ``new``; then these
    tests must fail.
    """

    file: str
    old: str
    new: str
    given: str = ""

    @property
    def tests(self) -> str:
        """Those that are given, or those with the name of the file or its folder."""
        folder, _, name = f"/{self.file[:-3]}".rpartition("/")
        own = f"tests{folder}/test_{name}.py"
        return self.given or (
            own if (ROOT / own).exists() else f"tests/test_{folder[1:]}.py"
        )


# fmt: off
FAULTS = {name: Fault(*fault) for name, fault in {  # name: file, old, new, tests
    "tangent_lengthens": ("linalg/rows.py", "kept = 1 - ww if", "kept = 1 + ww if"),
    "noise_is_a_direction": ("linalg/rows.py", "jnp.where(left <= (8 * eps) ** 2, 0, left)", "left"),
    "muons_third_coefficient": ("linalg/newton_schulz.py", "-4.7750, 2.0315),)", "-4.7750, 2.0215),)"),
    "gram_form_without_restart": ("linalg/newton_schulz.py", "[table[:2], *later] if gram", "[table] if gram"),
    "part_of_the_squares_is_lost": ("linalg/newton_schulz.py", "(jnp.trace(r), x.size)", "(jnp.trace(r))"),
    "part_of_a_rows_squares_is_lost": ("linalg/products.py", "tiny) * terms", "tiny) * 0",
        "tests/test_properties.py"),
    "three_steps_after_the_fifth": ("linalg/newton_schulz.py", "3 if len(table) <= 5 else 2", "3"),
    "schatten_is_frobenius": ("linalg/newton_schulz.py", 'if scale == "schatten" and', "if not scale and"),
    "products_set_and_do_not_clip": ("linalg/newton_schulz.py",
        "exact_product((identity - sign) / 2, factor - identity)", "factor - identity"),
    "a_power_less": ("linalg/sketch.py", "for _ in range(power_iterations):", "for _ in range(power_iterations - 1):"),
    "smallest_modes": ("linalg/sketch.py", ">= len(values) - rank[0]", "< rank[0]"),
    "modes_below_one_clipped": ("linalg/sketch.py", "clipped = among & (values > level[0])", "clipped = among"),
    "the_rest_is_all": ("linalg/sketch.py", "share * (total - jnp.sum(jnp.where(among, values, 0)))", "share * total"),
    "short_rows_are_a_basis": ("linalg/sketch.py", "jnp.where(short[:, None] | short[None], 0, gram)", "gram"),
    "draws_without_the_batch_index": ("linalg/sketch.py",
        "jax.random.fold_in(jax.random.fold_in(key, own[0]), own[1])", "jax.random.fold_in(key, own[0])"),
    "exact_products_are_not": ("linalg/products.py", "return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)",
        "return jnp.matmul(a, b)"),
    "a_tpu_takes_the_way_of_a_gpu": ("linalg/platforms.py", 'tpu=functools.partial(on, "tpu", f)', 'tpu=functools.partial(on, "gpu", f)'),
    "axes_not_restored": ("parameters/dims.py", "tuple(order.index(axis) for axis in range(len(shape)))", "order"),
    "embedding_by_normpre": ("parameters/vocabulary.py", '"embs", "wte"}', '"embs"}', "tests/parameters/test_rules.py"),
    "any_aspect_ratio": ("parameters/tree.py", "MAX_ASPECT_RATIO = 64", "MAX_ASPECT_RATIO = 6400",
        "tests/parameters/test_rules.py"),
    "queries_write": ("parameters/roles.py", "inside(path) and not _reads(path))", "inside(path))"),
    "a_number_is_no_place": ("parameters/roles.py", "path in equal or block_depth", "block_depth",
        "tests/parameters/test_roles.py"),
    "frozen_layers_rescaled": ("hyperball.py", "(uu == 0) | ((ww != 0) & keep)", "(ww != 0) & keep"),
    "gpt2_read_transposed": ("parameters/rules.py", 'return (first < second) != (layer == "c_proj"',
        'return (first < second) == (layer == "c_proj"', "tests/parameters"),
    "blocks_in_one_piece": ("parameters/dims.py", "sizes = [rows // blocks] * blocks if", "sizes = [rows] if",
        "tests/parameters tests/test_properties.py -k layout"),
    "a_preset_forgets_layers": ("parameters/presets.py", "return MatrixDims(inputs=0, outputs=2)",
        "return MatrixDims(inputs=1, outputs=2)", "tests/parameters"),
    "a_wrong_device": ("sharding/exchange.py", "index * sizes[a] + at[a]", "index + sizes[a] * at[a]"),
    "pieces_joined_wrong": ("sharding/exchange.py", "transpose(2, 0, 3, 1, 4)", "transpose(2, 1, 3, 0, 4)"),
    "one_owner_for_all": ("sharding/exchange.py", "owner = int(np.lexsort((length, busiest))[0])", "owner = 0"),
    "stacks_not_turned_back": ("sharding/auto.py", "[t.mT if is_tall else t for t", "[t for t",
        "tests/sharding/test_meshes.py"),
    "state_on_every_device": ("sharding/placement.py", "[entry if n == m else None for", "[None for"),
    "columns_first": ("stages/rows.py", '(state.count % 2 == 0) == (first == "rows")',
        '(state.count % 2 == 0) != (first == "rows")', "tests/test_algorithm.py"),
    "a_row_is_a_column": ("stages/rows.py", "return rows.unit_rows(x, inputs if side",
        "return rows.unit_rows(x, outputs if side", "tests/test_relatives.py"),
    "the_slow_average_at_once": ("stages/momentum.py", "slow_weight * (1 - slow**t) ** 4", "slow_weight",
        "tests/test_recommended.py"),
    "no_bias_correction": ("stages/momentum.py", "share / (1 - b**t)", "share", "tests/test_recommended.py"),
    "the_metric_before_only": ("stages/metric.py", "return within_metric(t), MetricState", "return t, MetricState",
        "tests/test_recommended.py"),
    "the_metric_of_all_blocks": ("stages/metric.py", "keepdims=True, where=x) for", "keepdims=True) for",
        "tests/test_properties.py -k layout"),
    "the_metric_of_updates": ("stages/tpu_groups.py", "{\"gradients\": updates} | extra", "{\"gradients\": None} | extra",
        "tests/test_recommended.py"),
    "size_of_a_row": ("stages/scale.py",
        "matrix_shape(t.shape, dims)[1:]) **", "matrix_shape(t.shape, dims)[2:]) **", "tests/test_algorithm.py"),
    "row_moments_grow": ("stages/metric.py", "(1 - decay) * n", "(1 + decay) * n", "tests/test_relatives.py"),
    "groups_forget_the_state": ("stages/tpu_groups.py", "new_state |= dict(jax.tree.leaves_with_path(own_state))", "new_state |= {}",
        "tests/test_algorithm.py -k groups"),
    "a_share_of_the_larger_dimension": ("stages/spectral.py", "self.clipping(x.shape[-2], total, threshold)",
        "self.clipping(x.shape[-1], total, threshold)", "tests/test_algorithm.py"),
    "draws_of_the_first_step": ("stages/spectral.py", "sketch.draws(self.seed, step, s.ids",
        "sketch.draws(self.seed, 0 * step, s.ids", "tests/test_algorithm.py"),
    "normuon_without_its_scale": ("relatives/normuon.py", "scale_by_shape(keller_scale)", "scale_by_shape(lambda m, n: 1.0)"),
    "mano_starts_with_rows": ("relatives/mano.py", 'first="columns"', 'first="rows"'),
    "muoneq_by_columns": ("relatives/muoneq.py", "normalize_rows(mode)", 'normalize_rows("columns")'),
    "off_the_sphere": ("hyperball.py", "return (back * a - 1) * w - back * b * u", "return (back * a - 1) * w - b * u"),
    "a_step_of_another_norm": ("hyperball.py", "u.dtype) * inverse_root(uu)", "u.dtype) * inverse_root(ww)"),
    "keep_forgets_the_norm": ("hyperball.py", "(uu == 0) | ((ww != 0) & keep)", "uu == 0"),
    "norms_of_the_other_side": ("hyperball.py", "for axis in outputs) ** 0.5", "for axis in inputs) ** 0.5"),
    "experts_count_as_layers": ("parameters/roles.py", "sizes[:-1] if experts else sizes", "sizes"),
    "mask_ignored": ("options.py", "jax.tree.broadcast(tree, params, is_leaf=is_leaf)",
        "jax.tree.map(lambda _: True, params)",
        "tests/test_algorithm.py -k mask"),
    "updates_stay_float32": ("optimizer.py", "lambda u, p: u.astype(jnp.asarray(p).dtype), new, params",
        "lambda u, p: u, new, params", "tests/test_properties.py -k dtypes"),
    "numbers_unchecked": ("options.py", "x, *TREES[name]", "1, *TREES[name]", "tests/test_hyperball.py"),
    "multipliers_ignored": ("optimizer.py", "[times[path] * u for path, u in", "[u for path, u in",
        "tests/test_learning_rates.py"),
    "adams_other_b2": ("optimizer.py", "adam_b2: Number = 0.95,", "adam_b2: Number = 0.999,", "tests/test_api.py"),
    "any_shape": ("optimizer.py", '_like("gradients", updates, params,',
        '_like("gradients", params, params,', "tests/test_contract.py -k gradients_that_do_not_fit"),
    "boxes_around_nothing": ("optimizer.py", "== 1 else box", "== 9 else box", "tests/test_frameworks.py -k shapes"),
    "integers": ("optimizer.py", "check_dtype_of(path, leaf.dtype)", "pass", "tests/test_contract.py -k integers"),
    "masked_in_silence": ("parameters/explain.py", "isinstance(hole, optax.MaskedNode) or", "",
        "tests/test_hyperball.py -k masked"),
    "any_momentum": ("checks.py", '"b2", "adam_b1", "adam_b2"), (0, 1))', '"b2", "adam_b1", "adam_b2"), (0, 9))',
        "tests/test_api.py"),
    "wide_models_learn_faster": ("learning_rates.py", "math.sqrt(n * max(m, n) / m)", "math.sqrt(m * max(m, n) / n)"),
    "algorithm_without_the_tangent": ("algorithm.py", "normalize_tangent(tangent,", 'normalize_tangent("none",'),
}.items()}
# fmt: on


def caught_by(fault: Fault, tree: Path) -> str:
    """Return the first test that fails with the fault in ``tree``; "" if all pass."""
    path = tree / "normpre_optax" / fault.file
    source = path.read_text()
    if source.count(fault.old) != 1:
        raise SystemExit(
            f"{fault.file}: {fault.old!r} occurs {source.count(fault.old)} times, not"
            " once"
        )
    path.write_text(source.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", *fault.tests.split()]
    try:
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, check=False, timeout=600
        )
    finally:
        path.write_text(source)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if not done.returncode:
        return ""
    if (
        not failed
        or subprocess.run(
            [*command[:5], failed[1]], cwd=tree, capture_output=True, check=False
        ).returncode
    ):
        raise SystemExit(
            f"failed for another reason:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed[1]


def main(names: list[str]) -> int:
    """Try the faults of these names, or all; return how many survived."""
    unknown = set(names) - FAULTS.keys()
    if unknown:
        raise SystemExit(
            f"no such fault: {', '.join(sorted(unknown))}; there are"
            f" {', '.join(FAULTS)}"
        )
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        unwanted = shutil.ignore_patterns(
            ".git",
            ".venv*",
            ".pytest_cache",
            "__pycache__",
            "results",
            "_build",
            "runs",
        )
        shutil.copytree(ROOT, tree, ignore=unwanted)
        for name in names or FAULTS:
            start = time.perf_counter()
            test = caught_by(FAULTS[name], tree)
            survivors += not test
            print(
                f"{name:28} {time.perf_counter() - start:5.0f} s  {test or 'SURVIVED'}",
                flush=True,
            )
    print(f"{survivors} of {len(names or FAULTS)} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
