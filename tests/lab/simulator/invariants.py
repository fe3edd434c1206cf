"""What must hold in a simulated deployment at every moment."""

from prfaas.lab.simulator.instance import Job, JobStage
from prfaas.lab.simulator.world import World

_SLACK_S = 1e-6
_SLACK_BYTES = 1.0


class Invariants:
    """Checks a world after each event: `simulate(..., on_event=Invariants())`. An AssertionError says what is wrong."""

    def __init__(self) -> None:
        self._before_s = 0.0

    def __call__(self, world: World) -> None:
        """Time, requests, queues, links and caches."""
        now_s = world.events.now_s
        assert now_s >= self._before_s, f"time went back from {self._before_s} to {now_s}"
        self._before_s = now_s
        _check_requests(world)
        _check_engines(world)
        _check_links(world)
        if world.pools is not None:
            world.pools.check()


def _check_requests(world: World) -> None:
    """Every request is open once, or done once."""
    assert all(not job.is_void and job.number == number for number, job in world.open.items()), (
        "a void job is open"
    )
    ended = sum(value == value for value in world.columns.e2e_s)
    assert ended == world.answers.count, f"{world.answers.count} requests are done, {ended} have an end"
    for number in world.open:
        assert world.columns.e2e_s[number] != world.columns.e2e_s[number], f"{number} is open and done"


def _check_engines(world: World) -> None:
    now_s = world.events.now_s
    jobs = list(world.open.values())
    for engine in world.engines.values():
        here = [job for job in jobs if job.engine is engine]
        decoding = sum(job.target is engine for job in jobs)
        assert engine.view.decoding == decoding, (
            f"{engine.name} decodes {engine.view.decoding}, not {decoding}"
        )
        open_here = decoding + sum(job.target is not engine and _prefills(job) for job in here)
        assert engine.view.in_flight == open_here, (
            f"{engine.name} has {engine.view.in_flight}, not {open_here}"
        )
        waiting_s = sum(job.service_s for job in here if job.stage in (JobStage.QUEUED, JobStage.MOVING))
        assert abs(waiting_s - engine.waiting_s) < _SLACK_S, (
            f"{engine.name}: {engine.waiting_s} != {waiting_s} s"
        )
        at_work = sum(job.stage is JobStage.PREFILLING for job in here)
        assert engine.at_work >= at_work, f"{engine.name} works on {engine.at_work}, not {at_work}"
        assert engine.at_work <= 1
        if engine.at_work:
            assert engine.free_at_s >= now_s - _SLACK_S, f"{engine.name} ended at {engine.free_at_s}"
            assert engine.view.busy_until_s >= engine.free_at_s - _SLACK_S
        if not engine.at_work and engine.view.healthy:
            assert not engine.queue, f"{engine.name} has room and a queue"
        clock = engine.clock
        if clock is not None:
            assert clock.batch <= engine.view.decode_slots
            there = sum(job.stage is JobStage.DECODING and job.target is engine for job in jobs)
            assert clock.batch + clock.waiting == there, (
                f"{engine.name}: {clock.batch} + {clock.waiting} != {there}"
            )
    for name, pool in world.prefill_pools.items():
        pooled = [job for job in jobs if job.stage is JobStage.POOLED and job.engine.cluster.name == name]
        assert abs(sum(job.service_s for job in pooled) - pool.waiting_s) < _SLACK_S, (
            f"{name}: {pool.waiting_s}"
        )
        idle = [
            engine.name
            for engine in world.engines.values()
            if engine.cluster.name == name
            and not engine.at_work
            and engine.view.prefills
            and engine.view.healthy
            and not engine.view.draining
            and engine.has_time(world.events.now_s)
        ]
        assert not (idle and pooled), f"{idle} idle while {len(pooled)} wait for {name}"


def _check_links(world: World) -> None:
    for link in world.links.values():
        promised = sum(job.promised_bytes for job in world.open.values() if job.link is link)
        assert link.promised_bytes == promised, (
            f"{link.fluid.name}: {link.promised_bytes} != {promised} bytes"
        )
        capacity = link.fluid.capacity_bits_per_s
        assert link.fluid.rate_bits_per_s <= capacity * (1 + 1e-9) + 1, f"{link.fluid.name} carries too much"
        assert link.fluid.residual_bytes >= -_SLACK_BYTES


def _prefills(job: Job) -> bool:
    return job.stage <= JobStage.SHARING
