"""A judge that is away for some time in the middle of a run: its address refuses connections."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

AWAY_S = float(os.environ.get("REWARD_TEST_AWAY_S", "4"))
"""Seconds for which the judge is away. An outage of less than 2 s is not logged."""

REPLY = b'{"choices": [{"message": {"content": "1"}}]}'


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256


@contextlib.contextmanager
def judge_that_goes_away(after: int, seconds: float = AWAY_S) -> Iterator[str]:
    """Serve a judge in a thread; yields its address.

    Args:
        after: the number of answers after which it goes away, once.
        seconds: for how long.
    """
    lock, answers = threading.Lock(), 0
    due, over = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal answers
            self.rfile.read(int(self.headers["content-length"]))
            if due.is_set() and self.server is first:  # it is about to close its socket
                return
            with lock:
                answers += 1
                if answers == after:
                    due.set()
            self.send_response(200)
            self.send_header("content-length", str(len(REPLY)))
            self.end_headers()
            self.wfile.write(REPLY)

        def log_message(self, *_: object) -> None:
            pass

    def run(server: _Server) -> None:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        due.wait()
        server.shutdown()
        server.server_close()
        if not over.wait(seconds):
            with _Server(server.server_address, Handler) as again:
                threading.Thread(target=again.serve_forever).start()
                over.wait()
                again.shutdown()
        serving.join()

    first = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=run, args=(first,))
    thread.start()
    try:
        yield f"127.0.0.1:{first.server_address[1]}"
    finally:
        over.set()
        due.set()
        thread.join()
