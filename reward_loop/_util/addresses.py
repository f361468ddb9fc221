"""Addresses of model servers and services: ``host:port``, or a base URL; and the proxy for them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from reward_loop.errors import ConfigError

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
"""The name of a host, or an IPv4 address."""

_OTHER_ENDPOINT = re.compile(r"((?<!/chat)/completions|/v1/(chat|models)|/(responses|messages|embeddings))$")
"""The ends of paths that are not those of a base URL: endpoints that the library does not use."""


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
        shown = re.sub(r"^([^/]*//)?.*@", r"\1...@", address, flags=re.DOTALL)  # a password
        shown = shown.partition("?")[0]
        return ConfigError(f"{shown}: this is not a valid address{why}; give `host:port` or a base URL")

    has_scheme = "://" in address
    text = address.strip()
    # `urlsplit` removes tabs and line breaks silently.
    if re.search(r"[\s\x00-\x1f]", text):
        raise invalid(": it contains white space")
    try:
        # Without a scheme, `urlsplit` takes the host of `host:port` for the scheme.
        parts = urlsplit(text if has_scheme else f"http://{text}")
        port = parts.port
    except ValueError as error:
        # Its text may quote a password.
        raise invalid("" if "@" in text else f" ({error})") from None
    if parts.scheme not in ("http", "https"):
        raise invalid(f": the scheme {parts.scheme!r} is not http or https")
    # `urlsplit` accepts `host:` as a host without a port.
    if not parts.hostname or port == 0 or parts.netloc.endswith(":"):
        raise invalid(": it has no host or no port" if has_scheme or parts.hostname else "")
    if ":" not in parts.hostname and not _NAME.fullmatch(parts.hostname):
        raise invalid(f": {parts.hostname!r} is not the name of a host")
    if port is None and not has_scheme:
        raise invalid(": it has no port")
    if parts.fragment:
        raise invalid(": it has a fragment (#)")
    path = parts.path.rstrip("/")
    if has_scheme and (end := _OTHER_ENDPOINT.search(path)):
        raise invalid(f": a base URL does not include {end[0]}")
    if not has_scheme:
        if path not in ("", "/v1") or parts.query:
            raise invalid(
                f": {parts.netloc.rpartition('@')[2]} is followed by {parts.path}. A base URL begins with http:// or https://"
            )
        path = ""
    return parts._replace(path=path)


def proxy_of(url: str) -> str | None:
    """Return the proxy from ``http_proxy``, ``https_proxy`` and ``no_proxy``; ``None`` for loopback addresses.

    ``no_proxy`` is read as in `urllib.request`; its entries may also be networks, such as ``10.0.0.0/8``.

    Raises:
        ConfigError: the proxy is not an HTTP proxy.
    """
    parts = urlsplit(url)
    host, authority, proxies = (parts.hostname or "").rstrip("."), parts.netloc.rpartition("@")[2], getproxies()
    with contextlib.suppress(ValueError):  # a name
        ip = ip_address(host.partition("%")[0])
        # The IPv6 form of an IPv4 address is in no network of IPv4 addresses.
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if ip.is_loopback or any(ip in network for network in _networks(proxies.get("no", ""))):
            return None
    if host == "localhost" or host.endswith(".localhost") or proxy_bypass(authority, proxies):
        return None
    proxy = proxies.get(parts.scheme, "").strip()
    scheme = proxy.partition("://")[0].lower() if "://" in proxy else "http"
    if scheme not in ("http", "https"):
        raise ConfigError(f"{parts.scheme}_proxy names a proxy of type {scheme}; only HTTP proxies are supported")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


def _networks(no_proxy: str) -> Iterator[IPv4Network | IPv6Network]:
    for entry in no_proxy.split(","):
        with contextlib.suppress(ValueError):
            yield ip_network(entry.strip(), strict=False)
