"""Whether a port can be taken on this machine."""

import errno
import socket


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
