"""Whether an engine answers, as its supervisor asks it from inside of its own container."""

from prfaas.core.deployment import Deployment, Instance


def health_code(deployment: Deployment, instance: Instance) -> str:
    """Python that fails where an engine does not answer; to one with TLS it shows that engine's own certificate.

    Its certificate names the instance and not its host, which is this container: only who signed it is checked.
    """
    context = ""
    if instance.tls:
        security = deployment.security
        context = (
            f"import ssl; c = ssl.create_default_context(cafile={str(security.ca_file)!r}); c.check_hostname = False; "
            f"c.load_cert_chain({str(security.identity_file(instance.name))!r}); "
        )
    return context + asking_code(f"{instance.url}/health", "u.HTTPSHandler(context=c)" if context else "")


def asking_code(url: str, handler: str = "") -> str:
    """Python that fails where there is no good answer from a URL in time."""
    return f"import urllib.request as u; u.build_opener(u.ProxyHandler({{}}), {handler}).open({url!r}, timeout=3)"
