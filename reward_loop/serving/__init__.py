"""Starts, supervises and stops reward model servers."""

from __future__ import annotations

from reward_loop._util import lazy_exports

# On demand: the processes of servers and tunnels do not need the manager.
__all__, __getattr__, __dir__ = lazy_exports.face(__name__, __file__)
