"""The prefix-cache pools of a simulated deployment: which machine has which, and what loading from them takes."""

from array import array
from collections.abc import Callable, Mapping, Sequence

from prfaas.core.deployment.pool import pool_names
from prfaas.core.prefix.index import NOTHING, PoolHit, PrefixHit
from prfaas.core.scheduling.decision import CacheTransfer, RoutingRequest
from prfaas.core.scheduling.tiers import with_pools
from prfaas.core.scheduling.view import PoolView, View
from prfaas.core.units import BITS_PER_BYTE
from prfaas.lab.simulator.columns import Columns
from prfaas.lab.simulator.instance import Job
from prfaas.lab.simulator.machine_pool import LoadedBytes, MachinePool
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.simulated_cluster import SimulatedCluster

TIERS = ("memory", "ssd", "machine", "cluster")
"""Whence an instance loads: its machine's memory or SSD, another machine of its cluster, another cluster."""


class _Channel:
    """Serves one after the other, each with its full bandwidth."""

    def __init__(self, bits_per_s: float) -> None:
        self._bits_per_s = bits_per_s
        self._free_s = 0.0

    def end_s(self, num_bytes: int, from_s: float) -> float:
        """When bytes are through that are asked for at `from_s`."""
        if not num_bytes:
            return from_s
        self._free_s = max(self._free_s, from_s) + BITS_PER_BYTE * num_bytes / self._bits_per_s
        return self._free_s


class _Machine:
    def __init__(self, view: PoolView, pool: MachinePool) -> None:
        self.view = view
        self.pool = pool
        self.memory = _Channel(view.memory_bits_per_s)
        self.ssd = _Channel(view.ssd_bits_per_s)
        self.network = _Channel(view.network_bits_per_s)


class MachinePools:
    """All pools of a scenario.

    An instance that loads waits for it, then computes. What lies on SSD comes into memory first, then all of it into
    the engine. What the decode instance loads while another prefills takes no time. A pool outlives the engines of its
    machine.

    Args:
        scenario: With pools of at least one cluster.
        view: Of the policies; the pools are put into it.
        block_tokens: Of the traffic's prefix blocks.
        columns: Those of the tiers are put among them: what each request loads from there.
    """

    def __init__(self, scenario: Scenario, view: View, block_tokens: int, columns: Columns) -> None:
        self._view = view
        self._tokens = columns.tier_tokens = {tier: array("i") for tier in TIERS}
        self.on_place: Callable[[Job], None] = lambda _job: None
        self._machines: dict[str, _Machine] = {}
        self._of: dict[str, _Machine] = {}
        for cluster in scenario.clusters:
            if cluster.name in scenario.pools:
                self._add(scenario, cluster, block_tokens)

    def request(
        self,
        number: int,
        tokens: int,
        blocks: Sequence[int],
        held: Mapping[str, PrefixHit],
        first_from_prefill: bool = False,
    ) -> RoutingRequest:
        """A prompt as policies see it, given what the engines themselves hold of it."""
        hits: dict[str, PoolHit] = {}
        for name, machine in self._machines.items():
            # The last token is always computed.
            hit = machine.pool.hit(blocks, tokens - 1)
            if hit is not None:
                hits[name] = hit
        return with_pools(tokens, held, hits, self._view, number, first_from_prefill=first_from_prefill)

    def place(self, job: Job, held: Mapping[str, PrefixHit]) -> None:
        """A job was routed: what its decision says of pools comes true."""
        decision = job.decision
        self.settle(job, held, job.tokens - decision.prefill_tokens, decision.load_s)
        self.on_place(job)

    def settle(self, job: Job, held: Mapping[str, PrefixHit], reused_tokens: int, load_s: float) -> None:
        """Set the tokens that a job reuses at its prefill instance, and the load from its machine's pool.

        Its service takes `load_s` longer.
        """
        for column in self._tokens.values():
            column[job.number] = 0
        job.own_tokens = min(held.get(job.engine.name, NOTHING).reusable_tokens, reused_tokens)
        job.reused_tokens = reused_tokens
        job.load, job.load_s = None, load_s
        job.service_s += load_s
        machine = self._of.get(job.engine.name)
        if machine is not None and load_s and job.decision.cache_transfer is None:
            job.load = loaded = machine.pool.load(job.blocks, job.own_tokens, reused_tokens)
            self._tokens["memory"][job.number] = loaded.memory_tokens
            self._tokens["ssd"][job.number] = loaded.ssd_tokens

    def keep(self, pool: str, blocks: Sequence[int], num_tokens: int) -> None:
        """A prefix has come to a pool."""
        self._machines[pool].pool.store(blocks, num_tokens, 0, is_received=True)

    def source_cluster(self, transfer: CacheTransfer) -> str:
        """Where the pool is that a transfer comes from."""
        return self._machines[transfer.source].view.cluster

    def read(self, job: Job, transfer: CacheTransfer, now_s: float) -> float:
        """When another machine has read a prefix from the pool that holds it, over their cluster's network."""
        source = self._machines[transfer.source]
        loaded = self._used(source, job, transfer)
        return source.network.end_s(transfer.kv_bytes, source.ssd.end_s(loaded.ssd_bytes, now_s))

    def send(self, job: Job, transfer: CacheTransfer) -> None:
        """A prefix leaves a pool for another cluster; what it takes is up to the link."""
        self._used(self._machines[transfer.source], job, transfer)

    def receive(self, job: Job, transfer: CacheTransfer) -> None:
        """A prefix has come to the pool of the prefill instance's machine, which the instance will load from."""
        target = self._of[job.engine.name]
        target.pool.store(job.blocks, transfer.num_tokens, 0, is_received=True)
        is_near = self.source_cluster(transfer) == target.view.cluster
        spared = job.reused_tokens - job.own_tokens
        self._tokens["machine" if is_near else "cluster"][job.number] = spared
        hit = target.pool.hit(job.blocks, job.reused_tokens)
        if hit is not None and hit.every_tier.reusable_tokens >= job.reused_tokens:
            job.load = target.pool.load(job.blocks, job.own_tokens, job.reused_tokens)

    def service_s(self, job: Job, now_s: float) -> float:
        """Seconds of a job's load, beside all other loads of its machine, and of its prefill."""
        if job.load is None:
            return job.service_s
        machine = self._of[job.engine.name]
        in_memory_s = machine.ssd.end_s(job.load.ssd_bytes, now_s)
        loaded_s = machine.memory.end_s(job.load.memory_bytes + job.load.ssd_bytes, in_memory_s)
        return job.service_s - job.load_s + loaded_s - now_s

    def computed(self, job: Job) -> None:
        """A prompt's KV is in its prefill instance, whose machine keeps it."""
        machine = self._of.get(job.engine.name)
        if machine is not None:
            machine.pool.store(job.blocks, job.tokens, job.reused_tokens)

    def arrived(self, job: Job) -> None:
        """A prompt's KV has come to its decode instance, whose machine keeps it."""
        machine = self._of.get(job.target.name)
        if machine is not None and machine is not self._of.get(job.engine.name):
            machine.pool.store(job.blocks, job.tokens, 0, is_received=True)

    def check(self) -> None:
        """No pool holds more than it may; an AssertionError says which."""
        for machine in self._machines.values():
            machine.pool.check()

    def _used(self, source: _Machine, job: Job, transfer: CacheTransfer) -> LoadedBytes:
        return source.pool.load(
            job.blocks, min(transfer.skip_tokens, transfer.num_tokens), transfer.num_tokens
        )

    def _add(self, scenario: Scenario, cluster: SimulatedCluster, block_tokens: int) -> None:
        options = scenario.pools[cluster.name]
        names = [instance.name for instance in self._view.clusters[cluster.name].instances]
        together = options.instances_per_machine
        groups = [tuple(names[start : start + together]) for start in range(0, len(names), together)]
        for name, instances in zip(pool_names(cluster.name, len(groups)), groups, strict=True):
            view = PoolView(
                name,
                cluster.name,
                instances,
                options.memory_bits_per_s,
                options.ssd_bits_per_s,
                network_bits_per_s=options.network_bits_per_s,
            )
            pool = MachinePool(
                options, cluster.kv_model or scenario.kv_model, block_tokens, cluster.curve.between_s
            )
            self._view.pools[name] = view
            self._machines[name] = machine = _Machine(view, pool)
            self._of.update(dict.fromkeys(instances, machine))
