"""Addresses of model servers and services: ``host:port``, or a base URL; and the proxy for them."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import getproxies

from reward_loop.errors import ConfigError

__all__ = ["checked_address", "proxy_of", "url_of"]

_NO_BRACKETS = str.maketrans("", "", "[]")

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

    Entries of ``no_proxy``, between commas or spaces, are ``*``, names, which include their subdomains (also written
    ``.name`` or ``*.name``), addresses, or networks such as ``10.0.0.0/8``; a name or an address may have a port.

    Raises:
        ConfigError: the proxy is not an HTTP proxy.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    ip = _ip(host)
    if host == "localhost" or host.endswith(".localhost") or (ip and ip.is_loopback):
        return None
    proxies = getproxies()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    # Not urllib's `proxy_bypass`, which supports neither networks nor `*.name`.
    if any(_includes(entry, host, ip, port) for entry in re.split(r"[,\s]+", proxies.get("no", "")) if entry):
        return None
    proxy = proxies.get(parts.scheme, "").strip()
    scheme = proxy.partition("://")[0].lower() if "://" in proxy else "http"
    if scheme not in ("http", "https"):
        raise ConfigError(f"{parts.scheme}_proxy names a proxy of type {scheme}; only HTTP proxies are supported")
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy or None


def _includes(entry: str, host: str, ip: IPv4Address | IPv6Address | None, port: int) -> bool:
    """Return whether an entry of ``no_proxy`` includes a host; `ip` is the host's address, if the host is one."""
    if entry == "*":
        return True
    if with_port := re.fullmatch(r"(\[.*\]|[^:]*):(\d+)", entry):
        if int(with_port[2]) != port:
            return False
        entry = with_port[1]
    if ip is not None:
        try:
            return ip in ip_network(entry.translate(_NO_BRACKETS), strict=False)
        except ValueError:
            return False
    name = entry.lower().removeprefix("*").strip(".")
    return bool(name) and (host == name or host.endswith(f".{name}"))


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    """Return the IP address that a host is, an IPv4 address in IPv6 form as IPv4; ``None`` for a name."""
    try:
        ip = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    # Its IPv6 form is in no network of IPv4 addresses, and older versions of Python do not take it for loopback.
    return ip.ipv4_mapped or ip if isinstance(ip, IPv6Address) else ip
