"""TransferQueue's part of a checkpoint, with requests that are repeated if its storage does not answer.

On a busy machine, a connection may break before the storage has read a request. TransferQueue repeats its reads and
writes on a new connection, but not the requests that save and load a checkpoint: they fail with "Resource temporarily
unavailable" (EAGAIN, a timeout of ZeroMQ), which would end the run.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import transfer_queue as tq

from reward_loop.errors import RewardLoopError
from reward_loop.verl.compat import replaced, uses

uses(__name__, "transfer_queue", "save_checkpoint(checkpoint_dir)", "load_checkpoint(checkpoint_dir)")

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""As many as TransferQueue makes for reads and writes."""


@contextmanager
def repeating_requests() -> Iterator[None]:
    """Have verl save and load TransferQueue's data again, up to `MAX_ATTEMPTS` times, within the block."""
    save, load = _repeated(tq.save_checkpoint), _repeated(tq.load_checkpoint)
    with replaced(tq, "save_checkpoint", save), replaced(tq, "load_checkpoint", load):
        yield


def _repeated(call: Callable[..., None]) -> Callable[..., None]:
    @wraps(call)
    def repeated(folder: str, **options: Any) -> None:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return call(folder, **options)
            except RuntimeError as error:
                # TransferQueue puts the text of the cause into its message, also where another process had the error.
                if os.strerror(errno.EAGAIN) not in str(error):
                    raise
                if attempt == MAX_ATTEMPTS:
                    raise RewardLoopError(
                        f"TransferQueue did not answer to {call.__name__}({folder}), {MAX_ATTEMPTS} times: {error}. "
                        "Run the command again to resume from the last checkpoint. Is the machine overloaded, or the "
                        "file system slow? The environment variable TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT is the timeout "
                        "of each attempt in seconds (200)"
                    ) from error
                logger.warning(
                    "%s(%s) got no answer from TransferQueue and is repeated: %s", call.__name__, folder, error
                )
        return None

    return repeated
