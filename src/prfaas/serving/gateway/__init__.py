"""The OpenAI-compatible front of a deployment: tokenize, decide, drive prefill and decode, relay the
answer."""

from prfaas.serving.gateway.context import Draining, GatewayOptions
from prfaas.serving.gateway.server import GatewayProcess, serve_gateway

__all__ = ["Draining", "GatewayOptions", "GatewayProcess", "serve_gateway"]
