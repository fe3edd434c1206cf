"""The KVCache of a model of which nobody has written what its layers keep: its engines tell it while they run."""

import logging
from collections.abc import Mapping
from typing import Any

from prfaas.core.kv import CompressedAttention, KvModel
from prfaas.core.kv.told import read_told_layers
from prfaas.serving.control.cluster_state import ClusterState
from prfaas.serving.control.planning_inputs import LiveFacts, kv_facts
from prfaas.serving.control.prefix_knowledge import PrefixKnowledge
from prfaas.serving.running_deployment import RunningDeployment

logger = logging.getLogger(__name__)


class KvShape:
    """Has routing and planning count in what the engines tell, the most of any of them.

    Until the first one has, the model counts for the largest published one, and for a hybrid.
    """

    def __init__(
        self,
        running: RunningDeployment,
        state: ClusterState,
        facts: LiveFacts,
        prefixes: PrefixKnowledge,
        *,
        is_known: bool,
    ) -> None:
        """`is_known`: the model's own file says it, so nothing that engines tell is taken."""
        self._running = running
        self._state = state
        self._facts = facts
        self._prefixes = prefixes
        self._is_known = is_known
        self.model: KvModel | None = None
        """As told; None: not yet, or there is no need."""

    def learn_stats(self, name: str, stats: Mapping[str, Any]) -> None:
        """Take what a rank of an engine answers."""
        instance = next((each for each in self._running.current.instances if each.name == name), None)
        if self._is_known or instance is None:
            return
        try:
            told = read_told_layers(
                stats.get("kv_layers"), self._running.current.model.served_name, instance.kv_ranks
            )
        except ValueError as error:
            logger.debug("%s does not tell what it keeps: %s", name, error)
            return
        if self.model is not None and told.compared_bytes() <= self.model.compared_bytes():
            return
        self.model = told
        logger.info("%s tells what it keeps: %s", name, told.describe())
        pages = [each.page_tokens for each in told.groups if isinstance(each, CompressedAttention)]
        self._state.view.kv = kv_facts(told, max(pages, default=1))
        self._facts.learn_model(told)
        self._prefixes.learn_model(told)
