"""The network of libp2p. Nothing else here touches libp2p.

Importing this package loads what it uses of libp2p 0.8.1, and not the rest. The package ``libp2p`` and its host import
QUIC, WebSockets, mDNS, UPnP, DNS over HTTPS, an ACME client and metrics, with 700 modules of other packages: half a
second of processor for each process. A program that has imported libp2p before has all of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from threading import RLock
from types import ModuleType

# What the modules below import and never use in a host with one TCP transport and no metrics. The names are those of
# libp2p 0.8.1, the only version that p2pavg allows; a test compares them with it.
UNUSED = {
    "libp2p.discovery.bootstrap.bootstrap": ("BootstrapDiscovery",),
    "libp2p.discovery.mdns.mdns": ("MDNSDiscovery", "create_mdns_discovery"),
    "libp2p.discovery.upnp.upnp": ("UpnpManager",),
    "libp2p.metrics.swarm": ("SwarmEvent",),
    "libp2p.rcmgr.prometheus_exporter": ("PrometheusExporter", "create_prometheus_exporter"),
    "libp2p.relay.circuit_v2.nat": ("is_private_ip",),
    "libp2p.security.tls.autotls.acme": ("ACMEClient", "compute_b36_peer_id"),
    "libp2p.security.tls.autotls.broker": ("BrokerClient",),
    "libp2p.transport.quic.config": ("QUICTransportConfig",),
    "libp2p.transport.quic.exceptions": ("QUICStreamClosedError", "QUICStreamResetError"),
    "libp2p.transport.quic.stream": ("QUICStream",),
    "libp2p.transport.websocket.transport": ("WebsocketTransport",),
    "multiaddr.resolvers": ("DNSResolver",),
}
# In an order in which libp2p's circles of imports are complete.
_USED = (
    "libp2p.transport.tcp.tcp",
    "libp2p.network.swarm",
    "libp2p.host.basic_host",
    "libp2p.security.noise.transport",
)


def _stand_in(module: str, names: tuple[str, ...]) -> ModuleType:
    """Return a module with a class for each name. An object of it has no methods, and a call with arguments fails."""
    made = ModuleType(module)
    for name in names:
        base = Exception if name.endswith("Error") else object
        setattr(made, name, type(name, (base,), {"__module__": module}))
    return made


def _load() -> None:
    spec = find_spec("libp2p")
    if spec is None:
        raise ImportError("p2pavg needs the package libp2p: install p2pavg with its dependencies")
    package = module_from_spec(spec)
    lock, begun = RLock(), False

    def load_whole(name: str) -> object:
        """Run libp2p's own module when a program first uses a name of it (PEP 562). Its modules can be imported."""
        if name.startswith("__"):
            raise AttributeError(f"module 'libp2p' has no attribute {name!r}")
        nonlocal begun
        assert spec is not None
        assert spec.loader is not None
        # Another thread may ask meanwhile, and has to wait. Libp2p's own modules may, too, and have what is there.
        with lock:
            if "__getattr__" in package.__dict__ and not begun:
                begun = True
                try:
                    spec.loader.exec_module(package)
                finally:
                    begun = False
                del package.__dict__["__getattr__"]
            if name in package.__dict__:
                return package.__dict__[name]
        raise AttributeError(f"module 'libp2p' has no attribute {name!r}")

    package.__dict__["__getattr__"] = load_whole
    stand_ins = {name: _stand_in(name, names) for name, names in UNUSED.items() if name not in sys.modules}
    sys.modules.update({"libp2p": package, **stand_ins})
    try:
        for name in _USED:
            import_module(name)
    except BaseException:
        del sys.modules["libp2p"]
        raise
    finally:
        # A program that imports one of these later gets the real one.
        for name in stand_ins:
            del sys.modules[name]


if "libp2p" not in sys.modules:
    _load()
