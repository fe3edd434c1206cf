"""Alert rules: Prometheus' own tool runs each over series that it is told for, and over others."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.core.shipped import page
from prfaas.tools.monitoring.alerts import rules, rules_yaml

from .alert_cases import CASES, Case
from .catalogue import TARGET_LABELS, catalogue
from .promql import result_labels

RUNBOOKS = page("guides/alerts")
PAGE = Path(RUNBOOKS).read_text(encoding="utf-8")
SAMPLES = {**catalogue().samples, "up": TARGET_LABELS}
(GROUP,) = rules()["groups"]
ALERTS = GROUP["rules"]
BY_NAME = {alert["alert"]: alert for alert in ALERTS}
WORDS = {"critical": "Critical", "warning": "Warning"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not there: Debian's package prometheus has it"
)


def promtool(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def promtool_test(alert: dict[str, Any], case: Case) -> dict[str, Any]:
    """In the form of `promtool test rules`."""
    expected = {
        "exp_labels": alert["labels"] | case.told,
        "exp_annotations": {
            "summary": case.sentence,
            "description": alert["annotations"]["description"],
            "runbook_url": f"{RUNBOOKS}#{alert['alert'].lower()}",
        },
    }
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{case.at_min}m",
                "alertname": alert["alert"],
                "exp_alerts": [expected] if case.sentence else [],
            }
        ],
    }


def judged(folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    (folder / "prfaas.rules.yaml").write_text(rules_yaml(), encoding="utf-8")
    document = {"rule_files": ["prfaas.rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return promtool("test", "rules", "tests.yaml", folder=folder)


@needs_promtool
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    (tmp_path / "prfaas.rules.yaml").write_text(rules_yaml(), encoding="utf-8")
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", "prfaas.rules.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@needs_promtool
@pytest.mark.parametrize("name", BY_NAME)
def test_an_alert_is_told_when_it_should_be_and_else_not(name: str, tmp_path: Path) -> None:
    cases = CASES[name]
    assert {bool(case.sentence) for case in cases} == {True, False}
    done = judged(tmp_path, [promtool_test(BY_NAME[name], case) for case in cases])
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_a_wrong_expectation_is_found(tmp_path: Path) -> None:
    """The tool does compare."""
    told, silent = CASES["PrfaasLinkDown"][:2]
    swapped = Case(told.series, told.at_min)
    assert judged(tmp_path, [promtool_test(BY_NAME["PrfaasLinkDown"], swapped)]).returncode == 1
    swapped = Case(silent.series, silent.at_min, told.told, told.sentence)
    assert judged(tmp_path, [promtool_test(BY_NAME["PrfaasLinkDown"], swapped)]).returncode == 1


def test_every_alert_has_cases() -> None:
    assert CASES.keys() == BY_NAME.keys()
    assert len(BY_NAME) == len(ALERTS)


@pytest.mark.parametrize("name", BY_NAME)
def test_expressions_name_series_and_labels_that_there_are(name: str) -> None:
    alert = BY_NAME[name]
    labels = result_labels(alert["expr"], SAMPLES)
    assert labels is not None
    assert set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])) <= labels


def test_the_guide_has_a_section_for_each_alert() -> None:
    """In this order; it says how bad the alert is, and after how long it is told."""
    sections = re.findall(
        r"^### (\w+)\n\n(Critical|Warning), (at once|after (\d+) minutes?)\.", PAGE, re.MULTILINE
    )
    assert re.findall(r"^### (\w+)", PAGE, re.MULTILINE) == [*BY_NAME]
    assert [
        (name, severity, f"{minutes}m" if minutes else None) for name, severity, _, minutes in sections
    ] == [(name, WORDS[alert["labels"]["severity"]], alert.get("for")) for name, alert in BY_NAME.items()]


def test_each_alert_links_to_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRFAAS_DOCS", "https://docs.example")
    (group,) = rules()["groups"]
    links = [rule["annotations"]["runbook_url"] for rule in group["rules"]]
    assert links == [f"https://docs.example/guides/alerts.html#{name.lower()}" for name in BY_NAME]
