"""The state of a worker process that a call may change, and that would change the results of later calls."""

from __future__ import annotations

import decimal
import functools
import gc
import importlib
import json
import locale
import logging
import operator
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

_MODULES: tuple[ModuleType, ...] = tuple(map(importlib.import_module, (
    "builtins",  # first: to restore classes needs builtins
    "os", "sys", "subprocess", "shutil", "signal",
    "contextvars", "decimal", "fractions", "functools", "io", "json", "math", "pickle", "random", "re", "time",
    "collections", "datetime", "importlib", "itertools", "pathlib", "resource", "socket", "struct", "tempfile",
    "threading",
)))  # fmt: skip
"""Modules in which graders of generated code, and the code itself, replace functions or set them to ``None``. To
compare the names of all modules would take too long."""

_CLASSES: tuple[type, ...] = (
    subprocess.Popen, pathlib.PurePath, pathlib.Path, type(pathlib.Path()), threading.Thread, socket.socket,
    random.Random, json.JSONEncoder,
)  # fmt: skip
"""Classes whose attributes are compared. Classes written in C cannot be changed."""

_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE,
           resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_STACK)  # fmt: skip
_SIGNALS = (signal.SIGALRM, signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGXCPU)
"""The signals whose handlers are compared."""

_MAX_NEW_THREADS = 64
"""A worker whose calls have left more threads behind is replaced."""


class ProcessState:
    """The state of the process before its first call, to which `restore` returns.

    Covered are resource limits, environment, umask, signal handlers and mask, the names of `_MODULES`, the attributes
    of `_CLASSES`, ``sys.path``, settings of the interpreter (`_settings`), decimal context, time zone and warning
    filters. Global random generators that a call has seeded, of Python and NumPy, get a new seed. A process with
    another user or priority is replaced. The worker itself restores working directory, timers and streams. Not covered
    are files, child processes, other modules and classes, constants of ``socket``, and other random generators.

    The functions that `restore` uses are kept here: a call may set them to ``None``.

    Args:
        watch: records changes of what takes long to compare.
    """

    def __init__(self, watch: Watch) -> None:
        with suppress(OSError):
            tempfile.NamedTemporaryFile().close()  # what it finds out, it keeps in names of the module
        self._names = [*map(_Names, _MODULES), *map(_Names, _CLASSES)]
        self._loaded = operator.itemgetter(*(module.__name__ for module in _MODULES))
        self._modules = dict(sys.modules)
        lists: list[list[Any]] = [sys.path, sys.meta_path, sys.path_hooks]
        self._lists = [(found, list(found)) for found in lists]
        self._watch = watch
        self._getrlimit, self._setrlimit = resource.getrlimit, watch.setrlimit
        self._limits = self._current_limits()
        # The mask can only be read by setting it.
        self._umask, self._mask = os.umask, os.umask(0)
        self._umask(self._mask)
        self._getsignal, self._signal, self._sigmask = signal.getsignal, watch.signal, signal.pthread_sigmask
        self._handlers = [self._getsignal(number) for number in _SIGNALS]
        self._blocked = self._sigmask(signal.SIG_BLOCK, ())
        self._environment, self._unsetenv = dict(os.environ), watch.unsetenv
        self._getcontext, self._decimal = decimal.getcontext, decimal.getcontext().copy()
        self._decimal_fields = _fields(self._decimal)
        self._settings = _settings()
        self._values = [get() for get, _ in self._settings]
        self._catching, self._filters = _catch_warnings()
        self._identity, self._owner = _identity, _identity()
        self._active_threads, self._threads = threading.active_count, threading.active_count()
        self._tzset = time.tzset
        watch.watch_numpy()
        watch.changed.clear()  # by imports

    def restore(self) -> bool:
        """Undo what a call has changed; return false if the process must be replaced instead.

        A function that limits its CPU time expects a new process: the limit counts the time of all calls before.
        """
        changed = True in [names.restore() for names in self._names]  # all of them
        try:
            is_loaded = self._loaded(sys.modules) == _MODULES
        except KeyError:
            is_loaded = False
        if not is_loaded:
            changed = True
            sys.modules.update((module.__name__, module) for module in _MODULES)
        for found, before_list in self._lists:
            if found != before_list:
                changed = True
                found[:] = before_list
        # Only then: to compare thousands of modules takes too long after each call.
        if changed or len(sys.modules) < len(self._modules):
            for name, module in self._modules.items():
                if sys.modules.get(name) is None:
                    sys.modules[name] = module
        self._umask(self._mask)
        self._sigmask(signal.SIG_SETMASK, self._blocked)
        if "handlers" in self._watch.changed:
            for number, handler in zip(_SIGNALS, self._handlers, strict=True):
                if handler is not None and self._getsignal(number) != handler:  # None: it is not set by Python
                    self._signal(number, handler)
        if "environment" in self._watch.changed:
            self._restore_environment()
        if _fields(self._getcontext()) != self._decimal_fields:
            decimal.setcontext(self._decimal.copy())
        for (get, set_), value in zip(self._settings, self._values, strict=True):
            if get() != value:
                set_(value)
        if warnings.filters != self._filters:
            self._catching.__exit__(None, None, None)
            self._catching, self._filters = _catch_warnings()
        if self._watch.watch_numpy() or "random" in self._watch.changed:
            self._watch.seed()
        is_restored = "limits" not in self._watch.changed or self._restore_limits()
        self._watch.changed.clear()
        is_restored = is_restored and self._identity() == self._owner
        return is_restored and self._active_threads() - self._threads <= _MAX_NEW_THREADS

    def _current_limits(self) -> list[tuple[int, int]]:
        return [self._getrlimit(limit) for limit in _LIMITS]

    def _restore_limits(self) -> bool:
        limits = self._current_limits()
        if limits == self._limits:
            return True
        for limit, now, before in zip(_LIMITS, limits, self._limits, strict=True):
            if now != before:
                if limit == resource.RLIMIT_CPU:
                    return False
                try:
                    self._setrlimit(limit, before)
                except (OSError, ValueError):  # only root may raise a hard limit
                    return False
        return True

    def _restore_environment(self) -> None:
        zone = os.environ.get("TZ")
        for name in {*self._watch.variables}:
            os.environ.pop(name, None)
            self._unsetenv(name)  # `putenv` changes only what child processes get
            if name in self._environment:
                os.environ[name] = self._environment[name]
        self._watch.variables.clear()
        if zone != self._environment.get("TZ"):
            self._tzset()


class Watch:
    """Records whether the environment, resource limits, signal handlers or random generators may have changed.

    To compare them after each call would take 30 microseconds. Create it before the user's function is imported, which
    may keep the functions that are watched.
    """

    def __init__(self) -> None:
        self.changed: set[str] = set()
        """Of ``environment``, ``limits``, ``handlers`` and ``random``, those that may have changed."""
        self.variables: set[str] = set()
        """The names of the environment variables that may have changed."""
        self.setrlimit, self.signal, self.unsetenv = resource.setrlimit, signal.signal, os.unsetenv
        self._seeds: list[Callable[[], Any]] = [random.seed]
        self._watches_numpy = False
        for name in ("putenv", "unsetenv"):  # `os.environ` calls them, too
            setattr(os, name, self._named(getattr(os, name)))
        for module, name, what in (
            (resource, "setrlimit", "limits"),
            (resource, "prlimit", "limits"),
            (signal, "signal", "handlers"),
            (random, "seed", "random"),
            (random, "setstate", "random"),
        ):
            setattr(module, name, self._watched(getattr(module, name), what))

    def watch_numpy(self) -> bool:
        """Watch NumPy's global random generator once NumPy is imported; return whether that has just begun."""
        module: Any = sys.modules.get("numpy.random")
        # A call may import it in vain, or replace it.
        if self._watches_numpy or not (hasattr(module, "seed") and hasattr(module, "set_state")):
            return False
        self._seeds.append(module.seed)
        for name in ("seed", "set_state"):
            setattr(module, name, self._watched(getattr(module, name), "random"))
        self._watches_numpy = True
        return True

    def seed(self) -> None:
        """Give the global random generators new seeds: a seed of one call would make the next calls draw the same."""
        for seed in self._seeds:
            seed()

    def _watched(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self.changed.add(what)
            return function(*arguments, **options)

        return call

    def _named(self, function: Callable[..., None]) -> Callable[..., None]:
        decode = os.fsdecode

        @functools.wraps(function)
        def call(name: str | bytes, *value: str | bytes) -> None:
            self.changed.add("environment")
            self.variables.add(decode(name))
            function(name, *value)

        return call


class _Names:
    """The names of a module or class. To compare lists of their values takes half as long as to compare dicts."""

    def __init__(self, owner: ModuleType | type) -> None:
        self._owner, self._names, self._before = owner, vars(owner), dict(vars(owner))
        self._class_setattr = setattr if isinstance(owner, type) else None
        self._read: Callable[[Any], Any] | None = None
        if owner is socket:  # most of its names are constants
            self._before = {name: value for name, value in self._before.items() if callable(value)}
            self._read = operator.itemgetter(*self._before)
        self._values = self._current()

    def _current(self) -> Any:
        return [*self._names.values()] if self._read is None else self._read(self._names)

    def restore(self) -> bool:
        """Restore the names; return whether any had changed."""
        try:
            # Without a call of `_current`, which would take a quarter of the time.
            if ([*self._names.values()] if self._read is None else self._read(self._names)) == self._values:
                return False
        except KeyError:  # a name was deleted
            pass
        names, before = self._names, self._before
        for name, value in before.items():
            # `before` stands for a deleted name: no name has this dict as its value.
            if names.get(name, before) is not value:
                if self._class_setattr is None:
                    names[name] = value
                else:
                    self._class_setattr(self._owner, name, value)
        # Names that are new stay, since modules that a call imports may need them; but not in place of inherited ones.
        for name in names.keys() - before.keys() if self._read is None else ():
            if isinstance(self._owner, type) and any(name in vars(base) for base in self._owner.__mro__[1:]):
                delattr(self._owner, name)
            else:
                before[name] = names[name]
        self._values = self._current()
        return True


def _identity(
    # As defaults, which a call cannot replace, unlike the names in `os`.
    getpriority: Callable[[int, int], int] = os.getpriority,
    geteuid: Callable[[], int] = os.geteuid,
    getegid: Callable[[], int] = os.getegid,
) -> tuple[int, ...]:
    return geteuid(), getegid(), getpriority(0, 0)


def _fields(context: decimal.Context) -> tuple[Any, ...]:
    return (context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp, context.traps)


def _catch_warnings() -> tuple[warnings.catch_warnings[None], list[Any]]:
    # Not an assignment to `warnings.filters`: `__exit__` also makes modules forget which warnings they have shown.
    catching = warnings.catch_warnings()
    catching.__enter__()
    return catching, list(warnings.filters)


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return the functions that read and write settings of the interpreter."""
    return [
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (sys.get_int_max_str_digits, sys.set_int_max_str_digits),
        (sys.getswitchinterval, sys.setswitchinterval),
        (sys.gettrace, sys.settrace),
        (sys.getprofile, sys.setprofile),
        (socket.getdefaulttimeout, socket.setdefaulttimeout),
        (gc.isenabled, lambda on: (gc.enable if on else gc.disable)()),
        (gc.get_threshold, lambda threshold: gc.set_threshold(*threshold)),
        (lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
        (lambda: logging.root.manager.disable, logging.disable),
    ]
