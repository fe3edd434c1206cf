"""The pools of a deployment as child processes of this one."""

import sys
from collections.abc import Collection, Iterable

from prfaas.core.deployment import Deployment, PoolNode
from prfaas.serving.engines.child_processes import ChildProcesses
from prfaas.serving.engines.command import EngineCommand
from prfaas.serving.engines.preparation import ensure_certificates, ensure_key
from prfaas.serving.pool.client import PoolClient

_ANSWER_S = 2.0


def pool_command(deployment: Deployment, node: PoolNode, *, keep_memory: bool = False) -> EngineCommand:
    """How to start the daemon of one pool. `keep_memory`: its pages stay in shared memory when it ends."""
    argv = [
        *(sys.executable, "-m", "prfaas.serving.pool"),
        *("--state-dir", str(deployment.state_dir)),
        *(("--keep-memory",) if keep_memory else ()),
        str(deployment.path.absolute()),
        node.name,
    ]
    return EngineCommand(tuple(argv), {})


class RunningPools(ChildProcesses):
    """Pools of one deployment on this machine.

    Their pages stay on disk, and in memory until the machine is restarted.
    """

    kind = "pool"

    def restart(self, names: Collection[str]) -> None:
        """Start daemons, as `ChildProcesses.restart`. They read the deployment's file themselves."""
        nodes = [self.deployment.pool_named(name) for name in self.names if name in names]
        if not nodes:
            return
        for node in nodes:
            self._check_startable(node.name, node.host, (node.kv_port,))
        ensure_key(self.deployment)
        ensure_certificates(self.deployment, [node.name for node in nodes])
        for node in nodes:
            self._spawn((node.name,), pool_command(self.deployment, node))

    def _all_names(self) -> Iterable[str]:
        return (node.name for node in self.deployment.pools)

    def answers(self, name: str) -> bool:
        """True if a pool's daemon takes a session at its socket."""
        path = self.deployment.pool_socket(self.deployment.pool_named(name))
        if not path.exists():
            return False
        client = PoolClient(path, "tool", None, timeout_s=_ANSWER_S)
        try:
            return client.connect()
        finally:
            client.close()

    def _address(self, name: str) -> str:
        return str(self.deployment.pool_socket(self.deployment.pool_named(name)))
