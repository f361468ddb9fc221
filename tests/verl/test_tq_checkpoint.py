"""TransferQueue's part of a checkpoint, with a real TransferQueue whose storage stops to answer."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import interface
from transfer_queue.storage.managers import simple_storage_manager

from reward_loop.errors import RewardLoopError
from reward_loop.verl.tq_checkpoint import MAX_ATTEMPTS, logger, repeating_requests
from tests.local_ray import local_ray

pytestmark = pytest.mark.integration

KEYS = ["a_0_0", "a_1_0"]


@pytest.fixture(scope="module")
def storage() -> Iterator[int]:
    """The process of the only storage unit."""
    with pytest.MonkeyPatch.context() as patch, local_ray():
        patch.setattr(simple_storage_manager, "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", 1)
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        (unit,) = interface._TQ_STORAGE["SimpleStorage"].values()
        yield ray.get(unit.__ray_call__.remote(lambda unit: os.getpid()))
        tq.close()


@pytest.fixture
def checkpoint(storage: int, tmp_path: Path) -> Path:
    """A checkpoint with two rows, which are no longer in TransferQueue."""
    fields = TensorDict({"ids": torch.arange(4).reshape(2, 2)}, batch_size=2)
    tq.kv_batch_put(keys=KEYS, partition_id="train", fields=fields, tags=[{"status": "success"}] * 2)
    tq.save_checkpoint(tmp_path / "transfer_queue")
    tq.kv_clear(keys=KEYS, partition_id="train")
    return tmp_path / "transfer_queue"


@contextmanager
def stopped(storage: int, *, until_repeated: bool = False) -> Iterator[list[str]]:
    """Stop the storage within the block; if `until_repeated`, at most until a request is repeated.

    Yields what is logged.
    """
    logged: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            if until_repeated:
                os.kill(storage, signal.SIGCONT)

    handler = Handler()
    logger.addHandler(handler)
    os.kill(storage, signal.SIGSTOP)
    try:
        yield logged
    finally:
        os.kill(storage, signal.SIGCONT)
        logger.removeHandler(handler)


def rows() -> list[list[int]]:
    ids = tq.kv_batch_get(keys=KEYS, partition_id="train", select_fields=["ids"])["ids"]
    return [row.tolist() for row in ids.unbind()]


def test_transfer_queue_itself_does_not_repeat_these_requests(storage: int, checkpoint: Path) -> None:
    message = "Error restoring for storage unit .*: Resource temporarily unavailable"
    with stopped(storage), pytest.raises(RuntimeError, match=message):
        tq.load_checkpoint(checkpoint)


def test_a_load_that_gets_no_answer_is_repeated(storage: int, checkpoint: Path) -> None:
    with stopped(storage, until_repeated=True) as logged, repeating_requests():
        tq.load_checkpoint(checkpoint)
    assert rows() == [[0, 1], [2, 3]]
    assert len(logged) == 1
    assert "got no answer" in logged[0]


def test_a_save_that_gets_no_answer_is_repeated(storage: int, checkpoint: Path, tmp_path: Path) -> None:
    tq.load_checkpoint(checkpoint)
    with stopped(storage, until_repeated=True), repeating_requests():
        tq.save_checkpoint(tmp_path / "second", metadata={"global_steps": 2})
    tq.kv_clear(keys=KEYS, partition_id="train")
    tq.load_checkpoint(tmp_path / "second")
    assert rows() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("call", [tq.save_checkpoint, tq.load_checkpoint])
def test_a_storage_that_never_answers_ends_the_run_and_the_message_says_what_to_do(
    storage: int, checkpoint: Path, call: Callable[[Path], None]
) -> None:
    with stopped(storage) as logged, repeating_requests(), pytest.raises(RewardLoopError) as raised:
        getattr(tq, call.__name__)(checkpoint)
    assert len(logged) == MAX_ATTEMPTS - 1
    for words in (f"{call.__name__}({checkpoint})", "Run the command again", "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT"):
        assert words in str(raised.value)
    tq.load_checkpoint(checkpoint)
    assert rows() == [[0, 1], [2, 3]]
    assert getattr(tq, call.__name__) is call


def test_other_errors_are_not_repeated(storage: int, tmp_path: Path) -> None:
    with repeating_requests(), pytest.raises(FileNotFoundError):
        tq.load_checkpoint(tmp_path / "none")
