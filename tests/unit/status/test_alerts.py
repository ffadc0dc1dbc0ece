"""The alerts, as Prometheus itself evaluates them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

RULES = Path(__file__).parents[3] / "conf/prometheus/alerts.yaml"
CASES = Path(__file__).with_name("alerts.test.yaml")
_MISSING = "the alerts' test needs promtool: apt-get install prometheus"


@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        if os.environ.get("CI"):
            pytest.fail(_MISSING)
        pytest.skip(_MISSING)
    for file in (RULES, CASES):
        shutil.copy(file, tmp_path)
    done = subprocess.run([promtool, "test", "rules", CASES.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_in_which_it_fires() -> None:
    alerts = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
