"""Prometheus and Grafana beside a gateway of Compose: scraped, with the alert rules, the dashboards loaded."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from prfaas.core.deployment import Deployment
from prfaas.tools.emit.document import yaml_text
from prfaas.tools.emit.template import Fields
from prfaas.tools.monitoring import dashboards
from prfaas.tools.monitoring.alerts import rules
from prfaas.tools.monitoring.scrape import scrape_configs

FOLDER = "monitoring"
"""Beside `compose.yaml`."""
PROMETHEUS_PORT, GRAFANA_PORT = 9090, 3000
"""Both on loopback alone: forward them, as the console's."""

_MOUNTED = "/etc/monitoring"
# What the queries of the dashboards and rules were tried with is older; both read them.
_PROMETHEUS_IMAGE, _GRAFANA_IMAGE = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.1"
_KEPT = "15d"


def monitoring_services(home: Path) -> list[Fields]:
    """The two services, for the template. Their data lie in folders of the deployment's own, which is their user's."""
    return [
        {
            "name": "prometheus",
            "image": _PROMETHEUS_IMAGE,
            "command": [
                f"--config.file={_MOUNTED}/prometheus.yaml",
                f"--storage.tsdb.path={home}/prometheus",
                f"--storage.tsdb.retention.time={_KEPT}",
                f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
            ],
            "environment": {},
            "mounted": _MOUNTED,
        },
        {
            "name": "grafana",
            "image": _GRAFANA_IMAGE,
            "command": None,
            "environment": {
                "GF_SERVER_HTTP_ADDR": "127.0.0.1",
                "GF_SERVER_HTTP_PORT": str(GRAFANA_PORT),
                "GF_PATHS_DATA": f"{home}/grafana",
                "GF_PATHS_PROVISIONING": f"{_MOUNTED}/grafana",
                "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{_MOUNTED}/dashboards/prfaas-overview.json",
                # Whoever reaches loopback may look; to change something takes the password of `admin`.
                "GF_AUTH_ANONYMOUS_ENABLED": "true",
                "GF_ANALYTICS_REPORTING_ENABLED": "false",
                "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
            },
            "mounted": _MOUNTED,
        },
    ]


def monitoring_files(deployment: Deployment) -> Iterator[tuple[PurePosixPath, str]]:
    """Path below `FOLDER` and text of what the two services read."""
    prometheus = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
        "rule_files": ["prfaas.rules.yaml"],
        **scrape_configs(deployment),
    }
    source = {"name": "Prometheus", "type": "prometheus", "url": f"http://127.0.0.1:{PROMETHEUS_PORT}"}
    provider = {"name": "prfaas", "type": "file", "options": {"path": f"{_MOUNTED}/dashboards"}}
    yield PurePosixPath("prometheus.yaml"), yaml_text(prometheus)
    yield PurePosixPath("prfaas.rules.yaml"), yaml_text(rules())
    yield (
        PurePosixPath("grafana/datasources/prometheus.yaml"),
        yaml_text({"apiVersion": 1, "datasources": [source | {"isDefault": True}]}),
    )
    yield (
        PurePosixPath("grafana/dashboards/prfaas.yaml"),
        yaml_text({"apiVersion": 1, "providers": [provider]}),
    )
    for path in dashboards():
        yield PurePosixPath("dashboards", path.name), path.read_text(encoding="utf-8")
