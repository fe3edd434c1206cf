"""`python -m prfaas.serving.engines.synthetic DEPLOYMENT INSTANCE…`: stand-in engines, all in this process."""

import argparse
import logging
import sys
from pathlib import Path

import uvloop

from prfaas.core.deployment import DeploymentError, load_deployment
from prfaas.serving.descriptors import raise_descriptor_limit
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.preparation import ensure_certificates, ensure_key, ensure_model
from prfaas.serving.engines.synthetic.node import run_nodes
from prfaas.serving.logs import LogSettings, set_up_logging
from prfaas.serving.secret_files import KeyFileError, TlsFileError, load_key

# Many threads move bytes beside the event loop: at Python's 5 ms each of them could hold it up for long.
_SWITCH_S = 0.001


def main() -> int:
    """Run until a signal comes; 1 when the engines can't start."""
    parser = argparse.ArgumentParser(prog="python -m prfaas.serving.engines.synthetic", description=__doc__)
    parser.add_argument("deployment", type=Path)
    parser.add_argument("instances", nargs="+", metavar="instance")
    parser.add_argument("--state-dir", type=Path, help="where models, keys and logs are kept")
    options = parser.parse_args()
    set_up_logging(LogSettings.of_environment(), whole_process=True)
    sys.setswitchinterval(_SWITCH_S)
    logging.getLogger("prfaas.synthetic").info("file descriptors: %d at most", raise_descriptor_limit())
    try:
        deployment = load_deployment(options.deployment, state_dir=options.state_dir)
        ensure_model(deployment, weights=False)
        ensure_key(deployment)
        ensure_certificates(deployment, options.instances)
        key = load_key(deployment.security.key_file)
        uvloop.run(run_nodes(deployment, options.instances, key))
    except (DeploymentError, EngineError, KeyFileError, TlsFileError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
