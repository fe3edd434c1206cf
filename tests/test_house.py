"""The measures of the house: no circle of files, few and short files, one meaning for every class name."""

import ast
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
# 240 was the aim of the rebuilding. Since then: the public API and `prfaas init`; then judging engines, admission, the
# operators' port, logs, supervision, page digests, shadow requests and two more APIs, a noun each; then certificates,
# sealed connections, signs of life, the order of chunks, compression, how links are judged and shared; then the pool;
# then policies as plug-ins, prices of egress, roles by predicted latency and by forecast, the order of prefills; what a
# request would wait, for gateways and simulated ones. Then runs of a study that differ only in their seed, the search
# for the largest rate, other models, and five studies. Then sites, open ports, containers, drafts of files and their
# questions; and what is emitted: blueprint, writing, unit, service, pod, its plan and volumes, policy, monitor. Then
# dashboards, alert rules, series that leave, certificates' ends. Then what fits a terminal, what shells complete, the
# demo's form, vLLM's load test and a gateway's counts beside it, and values for llm-d. Then traces: their collector,
# their spans, the queue of these, a request's trace, and a hop's. Then changes while everything runs: difference, what
# is applied, rosters on the wire and of the control plane, membership, reloading, engines that follow, the load of a
# link. Then the console: a ring, frames, changes, alarms, their history, the page's answers, scenarios, and
# explanations in words. Then a fleet of gateways: its store, etcd, members, messages, shares, turns, metrics, its
# section of the file, the control plane that leads or follows, reloads that are told; prefill queues for themselves.
# Then dtypes of caches, their options, the model of a deployment and the one it is planned with, options of engines.
# Then what a link has cost, and first tokens from the prefill: the token, who may have it, the answer that begins with
# it; prefills elsewhere. Then columns of traces, ranks that refuse each other, relays and who decides on them, MLPs and
# experts of families. Then what moves KV inside a cluster: the file's word, NIXL beside our connector, what is handed
# over, and the hop whose KV is pulled. Then kinds of values in the file, and what stages do with some roles. Then
# relays in simulations: who is relayed, batches of changing pace, their world; a simulated cluster, and relays in
# plans. Then unlike engines: how pages are laid out, what travels of them, wire pages cut from others; sentences about
# peers. Then instances that are taken away: their section of the file, what kills cost, what is begun before, who is
# closed, who is told; and what is left of a transfer that broke: in staging, in memory of those that are over, and as a
# failure. Then what has arrived over all connections. Then ranks that share heads, and states that ranks divide. Then
# turns of transfers, and flows and queues of the simulated link. Then tasks that end together. Then the template of
# engines on CPUs: its handle, the process, its standby; and what an engine is asked by HTTP. Then checkpoints: how
# often, and those that have come; and the check of an OPEN. Then runs of bytes in pages, and sums of pages as they lie.
# Then the columns of a simulation, and what reads a service curve. Then what is kept of prefills in a simulation. Then
# events that are held back before a pause; sends that wait until two engines have met; the rates of all thresholds;
# prefills behind a cached prefix, their curves, and what prefixes add in plans. Then steps of prompts and answers in
# simulations, and which kind of world a scenario has. Then from where a broken transfer can go on. Then
# streams that follow chunks, slow machines, and a world of them in simulations. Then handshakes on asyncio streams.
# Then compiled loops over host memory, copies of runs that lie apart in it, and pages that are converted. Then extras.
# Then models that are fetched: what a file names, folders that are made whole, what is told meanwhile (and shown), the
# hub and its revision in emitted files; trained models: their wheels, recipes, weights, tokenizers and checkpoints.
# Then the demo's gateway, line, warm-up and answers; and its burst: the requests, how they go live, what is found, its
# chart, when it would not pay. Then what a producer says of a transfer. Then what ranks of an engine keep alike: how
# they meet, what they tell each other, lend and borrow, and parts of a load.
MOST_FILES = 599
MOST_LINES = 430


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((SOURCE / "prfaas").rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """Not before a test asks: every worker collects this file, and to parse the house takes seconds."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imported(tree: ast.Module) -> set[str]:
    """The modules of the house that a file imports anywhere: in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            for alias in node.names:
                submodule = f"{module}.{alias.name}"
                found.add(submodule if submodule in FILES else module)
    return found & FILES.keys()


def test_no_circle_of_files() -> None:
    graph = {name: imported(tree) - {name} for name, tree in trees().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"files import each other in a circle: {' <- '.join(error.args[1])}") from None


def test_the_house_is_small() -> None:
    assert len(FILES) <= MOST_FILES


def test_no_file_is_long() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_class_name_means_one_thing() -> None:
    """Private ones are of their file alone, and so may stand in several."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
