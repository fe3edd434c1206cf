"""What the model's KV cache allows, as policies need it."""

import logging

from prfaas.deployment import Deployment
from prfaas.kvmodel import ConfigError, KvModel, model_from_directory
from prfaas.scheduling import KvFacts

logger = logging.getLogger(__name__)


def kv_model_of(deployment: Deployment) -> KvModel | None:
    """The model's layers by its config; None, with a warning, where that can't be read."""
    try:
        return model_from_directory(deployment.model.path, name=deployment.model.served_name)
    except ConfigError as error:
        logger.warning("the KV cache's shape is unknown, so it is taken for a hybrid one: %s", error)
        return None


def kv_facts(model: KvModel | None) -> KvFacts:
    """Without a model: hybrid (the kind that limits most), and transfers that take no time."""
    if model is None:
        return KvFacts(is_hybrid=True, can_skip=False, bytes_to_move=lambda _tokens, _skip: 0)
    known = model

    def bytes_to_move(num_tokens: int, skip_tokens: int) -> int:
        return known.bytes_to_move(num_tokens, min(skip_tokens, num_tokens))

    return KvFacts(is_hybrid=model.is_hybrid, can_skip=not model.has_window, bytes_to_move=bytes_to_move)
