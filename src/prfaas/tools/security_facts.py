"""The deployment's key and certificates on this machine, as `prfaas doctor` judges them."""

import asyncio
from typing import Any

from prfaas.core.deployment import TOOLS, Deployment
from prfaas.serving.certificates import CertificateFolder, identity_of
from prfaas.serving.engines.preparation import is_on_one_machine
from prfaas.serving.kv_ports import KvPorts
from prfaas.serving.secret_files import KeyFileError, TlsFileError, load_key
from prfaas.serving.transport.io.observer import Observer
from prfaas.serving.transport.io.tls_identity import TlsIdentity
from prfaas.tools.finding import Finding, ok, problem


def check_key(deployment: Deployment) -> Finding:
    """The key is there and private."""
    path = deployment.security.key_file
    if not path.exists() and is_on_one_machine(deployment):
        return ok("key", f"will be made at {path} when the first engine starts")
    try:
        load_key(path)
    except KeyFileError as error:
        if path.exists():
            mend = f"chmod 600 {path}, or remove it and make a new one with `prfaas key {deployment.path}`"
        else:
            mend = f"make it with `prfaas key {deployment.path}` and copy it to every machine"
        return problem("key", str(error), mend)
    return ok("key", f"{path} is private")


def check_certificates(deployment: Deployment) -> list[Finding]:
    """Those that are in this machine's folder can be used, and for long enough."""
    folder = CertificateFolder(deployment)
    needing = [each.name for each in folder.members if deployment.needs_certificate(each.name)]
    if not needing:
        return []
    mend = f"make them with `prfaas certs {deployment.path}` where the CA's key is, and copy the new files"
    if not folder.ca_file.exists() and is_on_one_machine(deployment):
        return [ok("certificates", f"will be made in {folder.path} when the first engine starts")]
    try:
        authorities, states = folder.authorities(), folder.states(needing)
    except TlsFileError as error:
        return [problem("certificates", str(error), mend)]
    if not is_on_one_machine(deployment):
        # A machine has the files of what runs there; these checks themselves need the tools' one.
        states = tuple(each for each in states if each.member.file.exists() or each.member.name == TOOLS)
    found = [
        problem("certificates", f"{each.member.name} {each.problem}", mend)
        for each in states
        if each.problem is not None
    ]
    found += [
        problem("certificates", f"{each.member.name} has one that ends on {each.expires:%Y-%m-%d}", mend)
        for each in states
        if each.expires_soon
    ]
    if authorities[0].ends_soon:
        change = f"change it: prfaas certs {deployment.path} --rotate-ca"
        found.append(problem("certificates", f"the CA ends on {authorities[0].expires:%Y-%m-%d}", change))
    if found or not states:
        return found
    first = min(each.expires for each in states if each.expires is not None)
    return [
        ok("certificates", f"{len(states)} in {folder.path} can be used, the first ends on {first:%Y-%m-%d}")
    ]


def check_encryption(deployment: Deployment) -> list[Finding]:
    """What `security.encrypt_inside` does not reach is said."""
    clusters = dict.fromkeys(each.cluster for each in deployment.instances if deployment.uses_nixl(each))
    if not (deployment.security.encrypt_inside and clusters):
        return []
    where = ", ".join(clusters)
    text = f"what NIXL moves inside of {where} is as safe as its backend makes it, and UCX encrypts nothing"
    return [ok("encryption", f"{text}; everything else inside of clusters is encrypted")]


def tools_identity(deployment: Deployment) -> TlsIdentity | None:
    """The tools' TLS identity; None where they need no certificate, or have none that can be used."""
    try:
        return identity_of(deployment, TOOLS)
    except TlsFileError:
        return None


def tools_ports(deployment: Deployment) -> KvPorts | None:
    """KV ports as tools ask them from this machine; None without the key, of which `check_key` tells."""
    try:
        return KvPorts(TOOLS, load_key(deployment.security.key_file), tools_identity(deployment))
    except KeyFileError:
        return None


async def reported(observer: Observer, timeout_s: float) -> dict[str, Any]:
    """What a KV port says of itself, once. Raises OSError and TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            return await observer.stats()
    finally:
        await observer.close()
