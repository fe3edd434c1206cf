"""`python -m prfaas.serving.pool DEPLOYMENT NAME`: the daemon of one pool of this machine."""

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.serving.descriptors import raise_descriptor_limit
from prfaas.serving.engines.preparation import ensure_certificates, ensure_key
from prfaas.serving.logs import LogSettings, set_up_logging
from prfaas.serving.pool.arena import ArenaError
from prfaas.serving.pool.daemon import PoolError
from prfaas.serving.pool.node import serve_pool
from prfaas.serving.secret_files import KeyFileError, TlsFileError

logger = logging.getLogger("prfaas.pool")


def main() -> int:
    """Run until a signal comes; 1 when the pool can't start."""
    parser = argparse.ArgumentParser(prog="python -m prfaas.serving.pool", description=__doc__)
    parser.add_argument("deployment", type=Path)
    parser.add_argument("name")
    parser.add_argument("--state-dir", type=Path, help="where keys, sockets and logs are kept")
    parser.add_argument(
        "--keep-memory", action="store_true", help="leave the pages in memory to the next one"
    )
    options = parser.parse_args()
    set_up_logging(LogSettings.of_environment(), whole_process=True)
    raise_descriptor_limit()
    try:
        deployment = load_deployment(options.deployment, state_dir=options.state_dir)
        node = deployment.pool_named(options.name)
        ensure_key(deployment)
        ensure_certificates(deployment, [node.name])
        uvloop.run(serve_pool(deployment, node, keep_memory=options.keep_memory))
    except (DeploymentError, KeyFileError, TlsFileError, PoolError, ArenaError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
