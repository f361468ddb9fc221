"""Protects the viewer: accepted Host names, the key, and headers that restrict what a page may do."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "host_names"]

COOKIE = "reward_loop_view_key"

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def host_names(listener: socket.socket, host: str) -> frozenset[str]:
    """Return the names that the Host header of a request may contain.

    Other names are rejected, which prevents DNS rebinding. The port is not checked: it differs behind a tunnel.

    Args:
        listener: the listening socket.
        host: the address that the user gave.
    """
    address = listener.getsockname()[0].partition("%")[0]
    names = {"localhost", "127.0.0.1", "::1", address, host}
    if not ipaddress.ip_address(address).is_loopback:
        names |= {socket.gethostname(), socket.getfqdn()}
    return frozenset(name.lower() for name in names)


class Guard:
    """An ASGI middleware that rejects requests with an unknown Host name, or without the key.

    A browser sends the key as a cookie, which the page ``/?key=KEY`` sets. Other clients send it as a bearer token.

    Args:
        app: the app.
        hosts: the accepted names in the Host header; IP addresses are always accepted with `any_address`.
        key: the key; ``None`` if none is needed.
        any_address: whether the server listens on all addresses of the machine.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str], key: str | None, any_address: bool = False) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._key = key
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store" if scope["path"].startswith("/api/") else "no-cache")
            await send(message)

        answer = self._rejected(scope)
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _rejected(self, scope: Scope) -> Response | None:
        """Return the error for a rejected request; ``None`` for an accepted one."""
        headers = Headers(scope=scope)
        if not self._is_known(headers.get("host", "")):
            return JSONResponse({"error": "Unknown host name: open the address that reward-loop view printed."}, 400)
        if self._key is None:
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("key")
        if scope["path"] == "/" and given and self._is_key(given[0]):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self._key, httponly=True, samesite="strict")
            return answer
        kind, _, token = headers.get("authorization", "").partition(" ")
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        if self._is_key(cookie) or (kind.lower() == "bearer" and self._is_key(token)):
            return None
        return JSONResponse({"error": "This server needs its key: open /?key=KEY, or send it as a bearer token."}, 401)

    def _is_known(self, header: str) -> bool:
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
        name = name.strip("[]").lower()
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any_address

    def _is_key(self, given: str) -> bool:
        assert self._key is not None
        return hmac.compare_digest(given.encode(), self._key.encode())
