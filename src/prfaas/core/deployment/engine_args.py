"""Options of vLLM's server that the deployment file has fields for."""

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dp": "--data-parallel-",
}

# The command line builder sets these from other fields, where a second value would silently win; or instances can't be
# started so. An entry that ends with a dash stands for all options that begin with it.
OWNED_ARGS = {
    "--kv-transfer-config": "it is made from clusters, links and transfer",
    "--host": "give the instance's host",
    "--port": "give the instance's http_port",
    "--model": "give model.path, model.hub, model.trained or model.tiny",
    "--served-model-name": "give model.served_name",
    "--tensor-parallel-size": "give the instance's tensor_parallel",
    "--pipeline-parallel-size": "KVCache of a pipeline's stages is not moved: give the instance's tensor_parallel",
    "--decode-context-parallel-size": "KVCache that is divided by tokens is not moved",
    "--prefill-context-parallel-size": "KVCache that is divided by tokens is not moved",
    "--data-parallel-": "start each replica as an instance of its own",
    "--nnodes": "an instance is on one machine: give its tensor_parallel",
    "--enable-dbo": "layers tell that they are computed when half of a batch is",
    "--ubatch-size": "layers tell that they are computed when part of a batch is",
    "--enable-sleep-mode": "transfers use blocks where they lay when the engine started",
    "--kv-offloading-": "vLLM would put another connector in the place of the one for transfers; give clusters[].pool",
    "--kv-events-config": "it is made from the instance's host and events_port",
    "--lora-modules": "give model.adapters",
    "--ssl-keyfile": "give security.engine_tls and security.certificates",
    "--ssl-certfile": "give security.engine_tls and security.certificates",
    "--ssl-ca-certs": "give security.engine_tls and security.certificates",
    "--ssl-cert-reqs": "give security.engine_tls and security.certificates",
    "--dtype": "give model.dtype",
    "--kv-cache-dtype": "give model.kv_cache_dtype, or clusters[].kv_cache_dtype for one cluster",
    "--max-model-len": "give model.max_model_len",
    "--max-num-batched-tokens": "give engine.max_num_batched_tokens",
    "--max-num-seqs": "give engine.max_num_seqs",
    "--prefix-cache-retention-interval": "give engine.prefix_cache_retention_tokens",
    "--otlp-traces-endpoint": "give gateway.tracing",
    "--config": "give its options here",
    "--uds": "give the instance's host and http_port",
    "--kv-cache-dtype-skip-layers": "all layers keep the dtype of model.kv_cache_dtype or clusters[].kv_cache_dtype",
}


def free_arg(arg: str) -> str:
    """`arg` where no field of the file stands for it.

    Raises:
        ValueError: one does; the text names it.
    """
    owned = _owned_arg(arg)
    if owned is not None:
        raise ValueError(f"{arg!r} can't be given here; {OWNED_ARGS[owned]}")
    return arg


def _owned_arg(arg: str) -> str | None:
    name = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if len(name) <= 2 or not name.startswith("--"):
        return next((owned for short, owned in _SHORT.items() if name.startswith(short)), None)
    # argparse takes any unambiguous beginning of an option's name for the whole one.
    families = (owned for owned in OWNED_ARGS if owned.endswith("-") and name.startswith(owned))
    return next((owned for owned in OWNED_ARGS if owned.startswith(name)), next(families, None))
