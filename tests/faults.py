# SPDX-License-Identifier: Apache-2.0
"""The faults of ``break_it``: each changes what is computed of valid arguments."""

from typing import NamedTuple


class Fault(NamedTuple):
    """Python source that becomes other source; then these tests must fail.

    ``old`` is an expression or a statement, compared as a syntax tree. ``name=value``
    is an assignment, a keyword argument or the default of a parameter. It occurs once
    in the function, which is a qualified name such as "ClipLeading.clipping" or
    "with_adamw.update". Without a function it occurs once in the file, and without a
    file once in the package.

    ``tests`` are arguments of pytest. Without them, they are the tests with the name of
    the file or, if there are none, of its folder.
    """

    file: str
    function: str
    old: str
    new: str
    tests: str = ""


RULES = "tests/parameters/test_rules.py"
PARAMETERS = "tests/parameters"
LAYOUTS = "tests/test_properties.py -k layout"
ALGORITHM = "tests/test_algorithm.py"
RELATIVES = "tests/test_relatives.py"
RECOMMENDED = "tests/test_recommended.py"
MESHES = "tests/sharding/test_meshes.py"
ROLES = "tests/parameters/test_roles.py"
EXCHANGE = "tests/sharding/test_exchange.py"

# name: (file, function, old, new, tests), bottom up.
_FAULTS = {
    # Rows.
    "tangent_lengthens": ("linalg/rows.py", "", "1 - ww", "1 + ww"),
    "noise_is_a_direction": (
        "linalg/rows.py",
        "",
        "left <= (8 * eps) ** 2",
        "left < 0",
    ),
    "zero_rows_scale_the_others": (
        "linalg/rows.py",
        "unit_rows_and_columns",
        "jnp.where(rows == 0, jnp.inf, rows)",
        "rows",
    ),
    # Products.
    "part_of_a_rows_squares_is_lost": (
        "linalg/products.py",
        "inverse_root",
        "100 * float(jnp.finfo(squares.dtype).tiny) * terms",
        "0.0",
        "tests/test_properties.py",
    ),
    "exact_products_are_not": (
        "linalg/products.py",
        "exact_product",
        "precision=jax.lax.Precision.HIGHEST",
        "precision=None",
    ),
    "half_precision_sums": (
        "linalg/products.py",
        "product",
        "preferred_element_type=sums",
        "preferred_element_type=a.dtype",
    ),
    "a_tpu_takes_the_way_of_a_gpu": (
        "linalg/platforms.py",
        "",
        'functools.partial(on, "tpu", f)',
        'functools.partial(on, "gpu", f)',
    ),
    # Newton-Schulz.
    "muons_third_coefficient": (
        "linalg/newton_schulz.py",
        "",
        "2.0315",
        "2.0215",
    ),
    "gram_form_without_restart": (
        "linalg/newton_schulz.py",
        "",
        "[table[:2], *later]",
        "[table]",
    ),
    "part_of_the_squares_is_lost": (
        "linalg/newton_schulz.py",
        "",
        "inverse_root(jnp.trace(r), size)",
        "inverse_root(jnp.trace(r))",
    ),
    "three_steps_after_the_fifth": (
        "linalg/newton_schulz.py",
        "",
        "len(table) <= 5",
        "True",
    ),
    "schatten_is_frobenius": (
        "linalg/newton_schulz.py",
        "",
        'norm == "schatten"',
        "False",
    ),
    "products_set_and_do_not_clip": (
        "linalg/newton_schulz.py",
        "clipping_factor",
        "exact_product((identity - sign) / 2, factor - identity)",
        "factor - identity",
    ),
    "whitening_of_another_start": (
        "linalg/whitening.py",
        "whiten",
        "inverse_root(jnp.sum(gram * gram))",
        "inverse_root(jnp.trace(gram))",
        RELATIVES,
    ),
    # The sketch.
    "a_power_less": (
        "linalg/sketch.py",
        "clip_by_sketch",
        "range(power_iterations)",
        "range(power_iterations - 1)",
    ),
    "smallest_modes": (
        "linalg/sketch.py",
        "",
        "len(values) - rank[0]",
        "0 * rank[0]",
    ),
    "modes_below_one_clipped": (
        "linalg/sketch.py",
        "",
        "values > level[0]",
        "values == values",
    ),
    "the_rest_is_all": (
        "linalg/sketch.py",
        "",
        "total - jnp.sum(jnp.where(among, values, 0))",
        "total",
    ),
    "short_rows_are_a_basis": (
        "linalg/sketch.py",
        "",
        "jnp.where(short[:, None] | short[None], 0, gram)",
        "gram",
    ),
    "draws_without_the_batch_index": (
        "linalg/sketch.py",
        "",
        "jax.random.fold_in(of_parameter, own[1])",
        "of_parameter",
    ),
    # Axes.
    "axes_not_restored": (
        "parameters/dims.py",
        "from_matrices",
        "tuple(order.index(axis) for axis in range(len(shape)))",
        "order",
    ),
    "blocks_in_one_piece": (
        "parameters/dims.py",
        "blocks_of",
        "(rows // blocks,) * blocks",
        "(rows,)",
        f"{PARAMETERS} {LAYOUTS}",
    ),
    "a_preset_forgets_layers": (
        "parameters/presets.py",
        "maxtext",
        "MatrixDims(inputs=0, outputs=2)",
        "MatrixDims(inputs=1, outputs=2)",
        PARAMETERS,
    ),
    # Groups.
    "embedding_by_normpre": (
        "parameters/vocabulary.py",
        "",
        '"wte"',
        '"embs"',
        RULES,
    ),
    "any_aspect_ratio": (
        "parameters/tree.py",
        "",
        "MAX_ASPECT_RATIO = 64",
        "MAX_ASPECT_RATIO = 6400",
        RULES,
    ),
    "gpt2_read_transposed": (
        "parameters/rules.py",
        "",
        "(first < second) != is_narrower",
        "(first < second) == is_narrower",
        PARAMETERS,
    ),
    "attention_outputs_are_queries": (
        "parameters/rules.py",
        "_attention_layout",
        'role == "query"',
        "True",
        PARAMETERS,
    ),
    "biases_decay": (
        "parameters/rules.py",
        "",
        'frozenset({"bias", "norm", "state_space", "vector"})',
        'frozenset({"norm", "state_space", "vector"})',
        PARAMETERS,
    ),
    # Roles under Hyperball.
    "queries_write": ("parameters/roles.py", "", "self.reads(path)", "False"),
    "a_number_is_no_place": (
        "parameters/roles.py",
        "",
        "path in self._several",
        "False",
    ),
    "experts_count_as_layers": (
        "parameters/layer_counts.py",
        "",
        "both.elements()",
        "sizes",
        ROLES,
    ),
    "numbered_experts_count": (
        "parameters/layer_counts.py",
        "",
        "self.copies[one_expert, spec.shape] in self.sizes.get(layer, ())",
        "False",
        ROLES,
    ),
    "a_final_norm_is_in_the_stack": (
        "parameters/layer_counts.py",
        "",
        "other.sizes or _share_a_number(names, other.names)",
        "True",
        ROLES,
    ),
    "attentions_output_needs_a_name": (
        "parameters/roles.py",
        "",
        "is_attention and others == [own]",
        "False",
    ),
    # Meshes.
    "a_wrong_device": (
        "sharding/plan.py",
        "",
        "index * sizes[a] + at[a]",
        "index + sizes[a] * at[a]",
        EXCHANGE,
    ),
    "pieces_joined_wrong": (
        "sharding/exchange.py",
        "",
        "pieces.transpose(2, 0, 3, 1, 4)",
        "pieces.transpose(2, 1, 3, 0, 4)",
    ),
    "one_owner_for_all": (
        "sharding/plan.py",
        "",
        "int(np.lexsort((draft.lines, busiest))[0])",
        "0",
        EXCHANGE,
    ),
    "stacks_not_transposed_back": (
        "sharding/auto.py",
        "",
        "y.mT",
        "jnp.reshape(y, y.mT.shape)",
        MESHES,
    ),
    "state_on_every_device": (
        "sharding/placement.py",
        "",
        "n != m",
        "True",
    ),
    # Stages.
    "columns_first": (
        "stages/rows.py",
        "",
        '(state.count % 2 == 0) == (first == "rows")',
        '(state.count % 2 == 0) != (first == "rows")',
        ALGORITHM,
    ),
    "a_row_is_a_column": (
        "stages/rows.py",
        "normalize_rows",
        'side == "rows"',
        'side != "rows"',
        RELATIVES,
    ),
    "size_of_a_row": (
        "stages/scale.py",
        "with_rms",
        "(m * n) ** 0.5",
        "n**0.5",
        ALGORITHM,
    ),
    "the_slow_average_at_once": (
        "stages/momentum.py",
        "",
        "(1 - slow**t) ** 4",
        "1",
        RECOMMENDED,
    ),
    "no_bias_correction": (
        "stages/momentum.py",
        "",
        "1 - fast**t",
        "1",
        RECOMMENDED,
    ),
    "the_metric_before_only": (
        "stages/metric.py",
        "",
        "in_metric(new)",
        "new",
        RECOMMENDED,
    ),
    "the_metric_of_all_blocks": (
        "stages/metric.py",
        "",
        "jnp.mean(squares, outputs, keepdims=True, where=inside)",
        "jnp.mean(squares, outputs, keepdims=True)",
        LAYOUTS,
    ),
    "the_metric_of_updates": (
        "stages/stage.py",
        "_run_chain",
        '{"gradients": updates}',
        '{"gradients": None}',
        RECOMMENDED,
    ),
    "row_moments_grow": ("stages/metric.py", "", "1 - decay", "1 + decay", RELATIVES),
    "groups_forget_the_state": (
        "stages/tpu_groups.py",
        "",
        "new_state |= dict(jax.tree.leaves_with_path(own_state))",
        "pass",
        f"{ALGORITHM} -k groups",
    ),
    "a_share_of_the_larger_dimension": (
        "stages/spectral.py",
        "",
        "self.clipping(x.shape[-2], total, threshold)",
        "self.clipping(x.shape[-1], total, threshold)",
        ALGORITHM,
    ),
    "draws_of_the_first_step": (
        "stages/execution.py",
        "spectral.update",
        "optax.safe_increment(state.count)",
        "state.count",
        ALGORITHM,
    ),
    # Optimizers.
    "algorithm_without_the_tangent": (
        "algorithm.py",
        "scale_by_normpre",
        "normalize_tangent(tangent, orientation)",
        'normalize_tangent("none", orientation)',
    ),
    "normuon_without_its_scale": (
        "relatives/normuon.py",
        "",
        "scale_by_shape(keller_scale)",
        "scale_by_shape(lambda m, n: 1.0)",
    ),
    "mano_starts_with_rows": (
        "relatives/mano.py",
        "",
        'first="columns"',
        'first="rows"',
    ),
    "muoneq_by_columns": (
        "relatives/muoneq.py",
        "",
        "normalize_rows(mode)",
        'normalize_rows("columns")',
    ),
    "moga_of_the_other_side": ("relatives/moga.py", "", "m**0.5 / n", "n**0.5 / m"),
    # The complete optimizer.
    "off_the_sphere": (
        "hyperball.py",
        "_step",
        "(back * a - 1) * w - back * b * u",
        "(back * a - 1) * w - b * u",
    ),
    "a_step_of_another_norm": (
        "hyperball.py",
        "_step",
        "inverse_root(uu)",
        "inverse_root(ww)",
    ),
    "frozen_layers_rescaled": (
        "hyperball.py",
        "_step",
        "uu == 0",
        "False",
    ),
    "keep_forgets_the_norm": (
        "hyperball.py",
        "_step",
        "jnp.where(ww == 0, rate * norm, jnp.sqrt(ww))",
        "norm",
    ),
    "zeros_get_the_full_norm": ("hyperball.py", "_step", "rate * norm", "norm"),
    "a_huge_rate_overflows": (
        "hyperball.py",
        "_step",
        "jnp.minimum(jnp.asarray(rate, u.dtype), _REPLACES)",
        "jnp.asarray(rate, u.dtype)",
    ),
    "norms_of_the_other_side": (
        "hyperball.py",
        "_step",
        "math.prod(u.shape[axis] for axis in outputs)",
        "math.prod(u.shape[axis] for axis in inputs)",
    ),
    "mask_ignored": (
        "optimizer.py",
        "",
        'decays = _bools("weight_decay_mask", self.weight_decay_mask, params)',
        "pass",
        f"{ALGORITHM} -k mask",
    ),
    "updates_stay_float32": (
        "optimizer.py",
        "",
        "optax.tree.cast_like(steps, params)",
        "steps",
        "tests/test_properties.py -k dtypes",
    ),
    "multipliers_ignored": (
        "optimizer.py",
        "",
        "multipliers[path] * u",
        "u",
        "tests/test_learning_rates.py",
    ),
    "adams_other_b2": (
        "optimizer.py",
        "with_adamw",
        "adam_b2=0.95",
        "adam_b2=0.999",
        ALGORITHM,
    ),
    "adamw_decays_as_matrices_do": (
        "optimizer.py",
        "",
        "weight_decay = self.adam_weight_decay",
        "weight_decay = None",
        ALGORITHM,
    ),
    "wide_models_learn_faster": (
        "learning_rates.py",
        "",
        "math.sqrt(n * max(m, n) / m)",
        "math.sqrt(m * max(m, n) / n)",
    ),
}
FAULTS = {name: Fault(*fault) for name, fault in _FAULTS.items()}
