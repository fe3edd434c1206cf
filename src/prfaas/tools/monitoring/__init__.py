"""Files for Grafana and Prometheus: dashboards, alert rules, scrape configurations."""

from pathlib import Path


def dashboards() -> list[Path]:
    """The JSON files that Grafana imports or is provisioned with; edit them there, and export them to here."""
    return sorted((Path(__file__).parent / "dashboards").glob("*.json"))
