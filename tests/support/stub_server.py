"""A stub server process that starts fast. A POST request returns its body; a GET request returns the process id.

Environment variables:

- ``STUB_DELAY``: seconds to wait before a POST request is answered.
- ``STUB_GATE``: a file; POST requests are answered when it exists.
- ``STUB_HANGS``: a file; while it exists, POST requests wait, as those of a server whose GPU hangs.
- ``STUB_EXIT``: print an error and exit with this status.
- ``STUB_DEAF``: never accept a connection; with the value ``SIGTERM``, ignore that signal, too.
- ``REWARD_LOOP_SERVER_KEY``: POST requests without this API key are answered with 401.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(str(os.getpid()).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        key = os.environ.get("REWARD_LOOP_SERVER_KEY")
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self.answer(b"", 401)
            return
        time.sleep(float(os.environ.get("STUB_DELAY", "0")))
        if gate := os.environ.get("STUB_GATE"):
            while not os.path.exists(gate):
                time.sleep(0.01)
        if hangs := os.environ.get("STUB_HANGS"):
            while os.path.exists(hangs):
                time.sleep(0.01)
        self.answer(body)

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, help="listen on this port, without --fd and --parent-pipe")
    parser.add_argument("--fd", type=int)
    parser.add_argument("--parent-pipe", type=int)
    args = parser.parse_args()

    def exit_with_parent() -> None:
        os.read(args.parent_pipe, 1)
        os._exit(1)

    if args.port is None:
        threading.Thread(target=exit_with_parent, daemon=True).start()
    if status := os.environ.get("STUB_EXIT"):
        print("the stub is told to fail", file=sys.stderr)
        sys.exit(int(status))
    if deaf := os.environ.get("STUB_DEAF"):
        if deaf == "SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("the stub is deaf", flush=True)
        threading.Event().wait()
    server = ThreadingHTTPServer(("127.0.0.1", args.port or 0), Handler, bind_and_activate=args.port is not None)
    if args.port is None:
        server.socket.close()
        server.socket = socket.socket(fileno=args.fd)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
