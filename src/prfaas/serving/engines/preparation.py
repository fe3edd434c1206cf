"""Checks before an engine or the gateway starts on this machine: vLLM, model, key, certificates, free ports."""

import errno
import importlib.util
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

from prfaas.core.deployment import CERTIFICATE_NAMES, Cluster, Deployment, Instance, ModelSource, is_loopback
from prfaas.core.extras import how_to_install
from prfaas.core.kv.layers import FullAttention, LinearState
from prfaas.serving.engines import EngineError
from prfaas.serving.engines.fetching import FetchReport, LoggedFetch
from prfaas.serving.secret_files import KeyFileError, TlsFileError, create_key, load_key, make_private_folder


def port_problem(host: str, port: int) -> str | None:
    """Why `host:port` can't be listened on here, as the end of a sentence; None if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        return f"{host} can't be resolved ({error.strerror})"
    with socket.socket(family, kind, protocol) as probe:
        # As servers do it: a connection that lingers after its server ended doesn't count as one.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"{host}:{port} is already in use"
            if error.errno == errno.EADDRNOTAVAIL:
                return f"{host} is not an address of this machine"
            return f"{host}:{port} can't be listened on ({error.strerror})"
    return None


def is_here(host: str) -> bool:
    """True if a host is an address of this machine, or a name of one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def ensure_vllm() -> None:
    """Refuse to go on without vLLM, without importing it (that takes seconds).

    Raises:
        EngineError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "vLLM is not installed in this environment; "
            "`make setup` installs its CPU build, `pip install vllm` the one for GPUs"
        )


def ensure_nixl(deployment: Deployment, instances: Iterable[Instance]) -> None:
    """Refuse to go on without NIXL where one of these engines needs it, without importing it.

    Raises:
        EngineError: the package is not installed here.
    """
    needing = [instance.name for instance in instances if deployment.uses_nixl(instance)]
    if needing and importlib.util.find_spec("nixl") is None:
        raise EngineError(
            f"engine {needing[0]} needs the package nixl, since engine.local_transfer is nixl; "
            f"install it here ({how_to_install('nixl')}), or leave engine.local_transfer out"
        )


def ensure_model(
    deployment: Deployment, report: FetchReport | None = None, *, weights: bool = True, update: bool = False
) -> None:
    """Make or fetch the deployment's model (once) if the file names one; otherwise see that its checkpoint is there.

    Args:
        deployment: whose model.
        report: told what is fetched; default: lines on stderr.
        weights: false where only the tokenizer is needed: then no weights are fetched from the hub.
        update: of the hub: move on to the commit that the branch is at now.

    Raises:
        EngineError: there is no checkpoint, or it can't be made or fetched.
    """
    model, source = deployment.model, deployment.model.source
    if source is not None:
        try:
            make_model(source, model.path, report or LoggedFetch(), weights=weights, update=update)
        except (ValueError, OSError) as error:
            raise EngineError(f"model.{source.kind} of {deployment.path}: {error}") from error
    elif not (model.path / "config.json").is_file():
        raise EngineError(
            f"model.path of {deployment.path}: {model.path} has no config.json; name a Hugging Face checkpoint"
        )


def make_model(
    source: ModelSource,
    path: Path,
    report: FetchReport,
    *,
    weights: bool = True,
    update: bool = False,
) -> None:
    """Put a model at `path`, unless it is there.

    Args:
        source: what it is made or fetched from.
        path: of its directory, as `ModelSource.directory` gives it.
        report: told what is fetched.
        weights: as in `ensure_model`.
        update: as in `ensure_model`.

    Raises:
        EngineError: it can't be fetched.
        OSError: it can't be written.
    """
    # Late: they bring numpy and the like.
    if source.kind == "tiny":
        from prfaas.serving.engines.tiny import tiny_model

        tiny_model(source.name, path.parent)
    elif source.kind == "trained":
        from prfaas.serving.engines.trained import trained_model

        trained_model(source.name, path.parent, report=report)
    else:
        from prfaas.serving.engines.hub_model import hub_model

        hub_model(source, path, report, weights=weights, update=update)


_AVX_512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_CPU_INFO = Path("/proc/cpuinfo")


def ensure_dtypes(deployment: Deployment, instances: Collection[Instance]) -> None:
    """Refuse dtypes that vLLM's CPU backend lacks: engines would end while they start, or with their first request.

    As in vLLM 0.32: `_get_attn_isa` in v1/attention/backends/cpu_attn.py, `CPUMLABackend` in mla/cpu_mla.py,
    `cpu_gdn_attention_core` in model_executor/layers/mamba/ops/cpu/gdn_attention.py. What GPUs have, vLLM says itself:
    it depends on the device.

    Args:
        deployment: its model must be there.
        instances: those that start on this machine.

    Raises:
        EngineError: this machine's CPU, or CPUs with this model, don't have a dtype that the file names.
    """
    for name in dict.fromkeys(each.cluster for each in instances):
        cluster = deployment.cluster(name)
        if cluster.hardware == "cpu":
            _ensure_cpu_has_dtypes(deployment, cluster)


def _ensure_cpu_has_dtypes(deployment: Deployment, cluster: Cluster) -> None:
    model, kept = deployment.model, deployment.cache_dtypes(cluster.name).kv_cache
    is_fp8 = kept.startswith("fp8")
    is_other = model.dtype not in ("auto", "bfloat16")
    if not (is_fp8 or is_other):
        return
    kv_model = model.known_kv_model(kept)
    groups = () if kv_model is None else kv_model.groups
    if is_other and any(isinstance(group, LinearState) and group.kind == "GDN" for group in groups):
        raise EngineError(
            f"model.dtype of {deployment.path}: on cpu vLLM computes Gated DeltaNet in bfloat16 only, not in "
            f"{model.dtype}; take the field out"
        )
    section = "model" if cluster.kv_cache_dtype is None else f"clusters[{cluster.name}]"
    where = f"{section}.kv_cache_dtype of {deployment.path}"
    if is_fp8 and any(isinstance(group, FullAttention) and group.is_mla for group in groups):
        raise EngineError(
            f"{where}: on cpu vLLM keeps the latents of MLA in the model's dtype, not in {kept}; take the field out"
        )
    if is_fp8 and not _has_avx_512():
        raise EngineError(
            f"{where}: on cpu vLLM has {kept} caches only with AVX-512, which this machine lacks; take the field out, "
            "or use other machines"
        )


def _has_avx_512() -> bool:
    """What `torch.cpu._is_avx512_supported` says, without importing torch."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(set(line.split()) >= _AVX_512 for line in lines if line.startswith("flags"))


def ensure_events_folder(deployment: Deployment) -> None:
    """Make sure that engines of this machine can publish their events where no other user hears them.

    Raises:
        EngineError: the folder is another user's, or others can enter it.
    """
    try:
        make_private_folder(deployment.events_folder)
    except OSError as error:
        raise EngineError(str(error)) from error


def ensure_key(deployment: Deployment) -> None:
    """Make sure that the key is there and private; make one if the whole deployment is on this machine.

    Elsewhere a new key would only shut this machine out: all machines need the same one.

    Raises:
        KeyFileError: the key is missing or open to others.
    """
    path = deployment.security.key_file
    if not path.exists():
        if not is_on_one_machine(deployment):
            raise KeyFileError(
                f"key file {path} is missing: make one with `prfaas key {deployment.path}` and copy it to this "
                "path on every machine of the deployment"
            )
        try:
            create_key(path)
        except KeyFileError:
            # Another engine of this deployment may have been first.
            if not path.exists():
                raise
    load_key(path)


def ensure_certificates(deployment: Deployment, names: Collection[str]) -> None:
    """Make sure that the certificates of those that run here are there and good, as far as they need any.

    Where all of it is on this machine, what is missing or about to expire is made. Elsewhere only the machine with the
    CA's key could make them.

    Args:
        deployment: whose certificates.
        names: of instances, or `GATEWAY` or `TOOLS`.

    Raises:
        TlsFileError: one is missing, expired or of another CA.
    """
    needing = [name for name in names if deployment.needs_certificate(name)]
    if not needing:
        return
    from prfaas.serving.certificates import CertificateFolder  # late: it brings the library for X.509

    folder = CertificateFolder(deployment)
    if is_on_one_machine(deployment):
        everyone_here = {*needing, *CERTIFICATE_NAMES}
        if not folder.ca_file.exists() or not all(state.is_fit for state in folder.states(everyone_here)):
            folder.make()
        return
    for state in folder.states(needing):
        if state.problem is not None:
            raise TlsFileError(
                f"{state.member.name} {state.problem}: make certificates with `prfaas certs {deployment.path}`, and "
                f"copy {state.member.file.name} and {folder.ca_file.name} to {folder.path} on this machine"
            )


def is_on_one_machine(deployment: Deployment) -> bool:
    """True if every instance is reached by a loopback address."""
    return all(is_loopback(instance.host) for instance in deployment.instances)
