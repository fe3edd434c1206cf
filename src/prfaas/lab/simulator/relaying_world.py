"""A simulated deployment whose prefill instances decode on while KV travels."""

import numpy as np

from prfaas.lab.simulator.instance import Engine, Job
from prfaas.lab.simulator.relays import Relays, StepTime
from prfaas.lab.simulator.scenario import Scenario
from prfaas.lab.simulator.simulated_cluster import SimulatedCluster
from prfaas.lab.simulator.world import World


class RelayingWorld(World):
    """A `World` with `Relays`, told of what happens to prefills and to their KV.

    Raises:
        ValueError: a cluster without decode times.
    """

    def __init__(self, scenario: Scenario, rng: np.random.Generator, block_tokens: int) -> None:
        super().__init__(scenario, rng, block_tokens)
        steps = {cluster.name: _relay_step_of(cluster) for cluster in scenario.clusters}
        self.relays = Relays(
            scenario.relay, steps, self.engines, self.events, self.answers, self._relayed_all
        )

    def _start(self, engine: Engine, job: Job) -> None:
        super()._start(engine, job)
        self.relays.prefill_begun(job)

    def _prefilled(self, job: Job) -> None:
        super()._prefilled(job)
        self.relays.prefill_ended(job.engine)

    def _computed(self, job: Job) -> None:
        super()._computed(job)
        self.relays.begin(job)

    def _arrived(self, job: Job) -> None:
        self.relays.hand_over(job)
        super()._arrived(job)

    def _give_up(self, job: Job) -> None:
        self.relays.give_up(job)
        super()._give_up(job)

    def _relayed_all(self, job: Job) -> None:
        """Its answer has ended at its prefill instance: nobody needs its KV any more."""
        self.answers.end_early(job)
        job.leave_link(self.events.now_s)
        job.is_void = True


def _relay_step_of(cluster: SimulatedCluster) -> StepTime:
    step_s = cluster.relay_step_s or cluster.decode_step_s
    if step_s is None:
        raise ValueError(f'cluster "{cluster.name}" may relay tokens, and needs decode times (relay_step_s)')
    return step_s
