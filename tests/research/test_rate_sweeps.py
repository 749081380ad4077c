# SPDX-License-Identifier: Apache-2.0
"""Sweeps of learning rates in many settings."""

import pytest

from examples.pretrain import configs
from examples.pretrain.config import RunError
from examples.research import rate_sweeps


@pytest.mark.parametrize(
    "setting", rate_sweeps.SETTINGS, ids=lambda setting: setting.name
)
def test_a_setting_is_a_variation_of_nano(setting):
    config = configs.parse(setting.flags)
    assert (config.steps, config.batch_size) == (setting.steps, setting.sequences)
    assert config.model.width == setting.width
    assert config.model.layers == setting.layers
    assert config.model.width // config.model.heads == rate_sweeps.NANO_HEAD_WIDTH
    assert config.model.mlp_width == 4 * setting.width


def test_three_rates_a_factor_of_two_apart_with_both_seeds(monkeypatch):
    found = []
    monkeypatch.setattr(rate_sweeps.decide, "main", found.extend)
    options = rate_sweeps.Options(optimizer="muon,norm_control=hyperball")
    rate_sweeps.sweep(rate_sweeps.Setting(375, 64, 4.4e-2), options)
    arms = found[found.index("--optimizers") + 1].split(";")
    start = "muon,norm_control=hyperball,adam_learning_rate=0.016,learning_rate="
    assert arms == [start + rate for rate in ("0.022", "0.044", "0.088")]
    assert found[found.index("--seeds") + 1] == "91-92"
    name = "muon,norm_control=hyperball-steps375-sequences64-width64-layers3"
    assert found[found.index("--name") + 1] == name


def test_an_unknown_setting_is_named():
    with pytest.raises(RunError, match="--only steps1: settings are steps375-"):
        rate_sweeps.main(["--only", "steps1"])
