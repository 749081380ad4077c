# SPDX-License-Identifier: Apache-2.0
"""What an editor knows: the options of every optimizer; misspelled ones are errors."""

import ast
import inspect
import json
import subprocess
import sys

import normpre_optax as npo
from tests import stub

# Calls, one a line. pyright must report those whose comment says so, and no others.
CALLS = """
import functools
import jax.numpy as jnp, optax
import normpre_optax as npo
from normpre_optax.relatives.muon import scale_by_muon
rate = optax.linear_schedule(1e-2, 0.0, 100)
tx: optax.GradientTransformationExtraArgs
tx = npo.normpre_h(rate, adam_learning_rate=3e-3, slow_weight=rate)
half, rule = jnp.bfloat16, npo.presets.maxtext
npo.normpre_h(jnp.float32(1e-2), 3e-3, mu_dtype=half, matrix_dims=rule)
peak = npo.learning_rate_by_length(1_500)
npo.normpre_h(peak, 3e-3, row_norms="keep", ns_coefficients="you")
npo.normpre_h(peak, 3e-3, compute_dtype="narrow", mu_dtype="bfloat16")
npo.normpre_h(npo.learning_rate_by_length, 3e-3)
npo.learning_rate_by_length("1500")  # error
npo.normpre_h(1e-2)  # error
npo.normpre_h(1e-2, adam_learning_rat=3e-3)  # error
npo.normpre_h(1e-2, 3e-3, tangent="none")  # error
npo.muon(1e-3, nesterov=False, convention="keller", weight_decay=0.0)
npo.muon(1e-3, convention="original")  # error
npo.muon(lr=1e-3)  # error
npo.normpre(1e-3, npo.precondition_locally(rank=8), momentum=0.9)
npo.normpre_g(1e-3, 0.95)  # error
npo.scale_by_normpre_l(rank=0.5, method="sketched")  # error
direction = functools.partial(npo.scale_by_muon, nesterov=False)
npo.with_adamw(direction, 1e-3, norm_control="hyperball")
npo.with_adamw(npo.scale_by_muon, 1e-3, norm_controls="hyperball")  # error
scale_by_muon(momentum=0.9, nesterovs=True)  # error
npo.hyperball(1e-2, row_norm=1.0)  # error
npo.with_metric(npo.precondition_globally(), 0.5, clip=2.0)
"""


def test_the_stub_is_current_and_has_every_public_name():
    assert stub.FILE.read_text() == stub.stub(), "run python -m tests.stub"
    tree = ast.parse(stub.FILE.read_text())
    functions = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
    imported = {
        name.asname
        for x in tree.body
        if isinstance(x, ast.ImportFrom)
        for name in x.names
    }
    assert set(npo.__all__) <= functions.keys() | imported
    assert {*npo.optimizers(), "normpre", "with_adamw"} <= functions.keys()
    for name, function in functions.items():
        assert ast.get_docstring(function) == inspect.getdoc(getattr(npo, name)).strip()


def test_a_type_checker_finds_wrong_calls_and_no_others(tmp_path):
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        str(file),
        stub.FILE,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert not [x for x in found if x["file"] == str(stub.FILE)]
    errors = {x["range"]["start"]["line"] for x in found if x["severity"] == "error"}
    assert errors == {
        i for i, line in enumerate(CALLS.splitlines()) if line.endswith("# error")
    }
