"""Addresses of model servers and services: ``host:port``, or a base URL; and the proxy for them."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from reward_loop.errors import ConfigError

__all__ = ["checked_address", "proxy_of", "url_of"]


def checked_address(address: str) -> str:
    """Return an address in its plain form: ``host:port`` without a ``/`` or ``/v1`` at its end, or a base URL.

    Raises:
        ConfigError: the address is invalid.
    """
    parts = _parts(address)
    if "://" in address:
        return urlunsplit(parts)
    return parts.netloc


def url_of(address: str | None, path: str) -> str:
    """Return the URL of an endpoint.

    If the address is a base URL with a path, that path replaces the ``/v1`` of the endpoint:
    ``https://api.openai.com/v1`` and ``/v1/models`` give ``https://api.openai.com/v1/models``. Its query stays at the
    end, and a path that ends with the endpoint stays as it is.

    Args:
        address: ``host:port``, or a base URL.
        path: the endpoint, such as ``/v1/chat/completions``.

    Raises:
        ConfigError: the address is missing or invalid.
    """
    if not address:
        raise ConfigError(
            "no address to send the request to: reward_router_address is None, since no reward model is served; "
            "configure one, or name a service by its base URL"
        )
    parts = _parts(address)
    endpoint = path.removeprefix("/v1")
    base = parts.path.removesuffix(endpoint)
    return urlunsplit(parts._replace(path=base + (endpoint if parts.path else path)))


def _parts(address: str) -> SplitResult:
    """Split an address. The path has no ``/`` at its end, and that of ``host:port`` is empty.

    Raises:
        ConfigError: see `checked_address`.
    """

    def invalid(why: str) -> ConfigError:
        shown = re.sub(r"//[^/@]*@", "//...@", address)  # a password
        return ConfigError(f"{shown}: this is not a valid address{why}; give `host:port` or a base URL")

    has_scheme = "://" in address
    text = address.strip()
    if re.search(r"[\s\x00-\x1f]", text):
        raise invalid(": it contains white space")
    try:
        parts = urlsplit(text if has_scheme else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise invalid(f" ({error})") from None
    if parts.scheme not in ("http", "https"):
        raise invalid(f": the scheme {parts.scheme!r} is not http or https")
    if not parts.hostname or port == 0 or parts.netloc.endswith(":"):
        raise invalid(": it has no host or no port" if has_scheme or parts.hostname else "")
    if parts.fragment:
        raise invalid(": it has a fragment (#)")
    path = parts.path.rstrip("/")
    if not has_scheme:
        if path not in ("", "/v1") or parts.query:
            raise invalid(f": {parts.netloc} is followed by {parts.path}. A base URL begins with http:// or https://")
        path = ""
    return parts._replace(path=path)


def proxy_of(url: str) -> str | None:
    """Return the proxy from ``http_proxy``, ``https_proxy`` and ``no_proxy``; ``None`` for loopback addresses.

    Entries of ``no_proxy`` are names, as in the standard library, addresses, or networks such as ``10.0.0.0/8``.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = getproxies()
    if _is_local(host, proxies.get("no", "")) or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = proxies.get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _is_local(host: str, no_proxy: str) -> bool:
    """Return whether a host is loopback, or an address in a network of ``no_proxy``."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if ip.is_loopback:
        return True
    for entry in no_proxy.split(","):
        try:
            if ip in ip_network(entry.strip().strip("[]"), strict=False):
                return True
        except ValueError:  # a name
            continue
    return False
