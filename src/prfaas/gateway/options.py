"""Times and bounds of the gateway that a deployment file does not need to say."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Defaults are generous: they end what is stuck, they do not race what is slow."""

    connect_timeout_s: float = 3.0
    prefill_timeout_s: float = 600.0
    # After the prefill has answered: the queue of bytes still on the link, besides what bandwidth explains.
    transfer_grace_s: float = 30.0
    announce_grace_s: float = 3.0
    # A ticket outlives the prefill, the transfer and the decode engine's queue.
    ticket_lifetime_s: float = 1800.0
    tokenize_timeout_s: float = 60.0
    abandon_timeout_s: float = 5.0
    suspect_s: float = 3.0
    probe_interval_s: float = 1.0
    probe_healthy_interval_s: float = 5.0
    probe_timeout_s: float = 2.0
    max_body_bytes: int = 128 << 20
    # JSON below this size costs less than the hop to a thread and back.
    inline_json_bytes: int = 256 << 10
    inline_text_chars: int = 4096
    tokenizer_threads: int = 2
    # vLLM's server closes idle connections after 5 s: ours must be gone before, or a request meets a closing
    # one.
    engine_keepalive_s: float = 2.0
