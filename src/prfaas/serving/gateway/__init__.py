"""The OpenAI-compatible front of a deployment: tokenize, decide, drive prefill and decode, relay the
answer."""

from prfaas.serving.gateway.context import GatewayOptions
from prfaas.serving.gateway.draining import Draining
from prfaas.serving.gateway.server import serve_gateway

__all__ = ["Draining", "GatewayOptions", "serve_gateway"]
