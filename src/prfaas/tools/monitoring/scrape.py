"""Where Prometheus finds the gateway and the engines of a deployment."""

from typing import Any
from urllib.parse import urlsplit

import yaml

from prfaas.core.deployment import TOOLS, Deployment, Instance

GATEWAY_JOB, ENGINES_JOB = "prfaas-gateway", "prfaas-engines"


def scrape_configs(deployment: Deployment) -> dict[str, Any]:
    """The `scrape_configs` of a deployment: its gateway, then its engines.

    Targets are as the deployment file has them. The paths of secrets are those of this machine.
    """
    plain = [each for each in deployment.instances if not each.tls]
    encrypted = [each for each in deployment.instances if each.tls]
    jobs = [_gateway(deployment)]
    if plain:
        jobs.append(_engines(ENGINES_JOB, deployment, plain))
    if encrypted:
        identity = str(deployment.security.identity_file(TOOLS))
        jobs.append(
            _engines(f"{ENGINES_JOB}-tls", deployment, encrypted)
            | {
                "scheme": "https",
                "tls_config": {
                    "ca_file": str(deployment.security.ca_file),
                    "cert_file": identity,
                    "key_file": identity,
                },
            }
        )
    return {"scrape_configs": jobs}


def scrape_yaml(deployment: Deployment) -> str:
    """The same as a file for `scrape_config_files` of Prometheus, or to copy from."""
    head = f"# Scrape configuration of the deployment {deployment.name}, by `prfaas monitoring scrape`.\n"
    return head + yaml.safe_dump(scrape_configs(deployment), sort_keys=False, width=110)


def _gateway(deployment: Deployment) -> dict[str, Any]:
    admin = deployment.gateway.admin
    job: dict[str, Any] = {"job_name": GATEWAY_JOB}
    if admin.token_file is not None:
        job["authorization"] = {"type": "Bearer", "credentials_file": str(admin.token_file)}
    # Its `instance` is its address: there may be several gateways.
    labels = {"deployment": deployment.name}
    return job | {"static_configs": [{"targets": [urlsplit(admin.url).netloc], "labels": labels}]}


def _engines(job: str, deployment: Deployment, instances: list[Instance]) -> dict[str, Any]:
    return {
        "job_name": job,
        "static_configs": [
            {
                "targets": [urlsplit(each.url).netloc],
                "labels": {"deployment": deployment.name, "cluster": each.cluster, "instance": each.name},
            }
            for each in instances
        ],
    }
