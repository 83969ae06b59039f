"""Listen to the calls of a scheduler: the one reliable sign of where a denoising loop stands.

Schedulers run eagerly in every pipeline, whatever else is compiled. We wrap methods of the instance, and unwrap them
when the last listener leaves.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Listener(Protocol):
    """Hears every call after it is done, with its arguments; a step also before it."""

    def timesteps_set(self, scheduler: Any, *arguments: Any, **named: Any) -> None: ...

    def begin_set(self, scheduler: Any, *arguments: Any, **named: Any) -> None: ...

    def stepping(self, scheduler: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Before a step: returns the positional and named arguments to step with."""

    def stepped(self, scheduler: Any, *arguments: Any, **named: Any) -> None: ...


_EVENTS = {"set_timesteps": "timesteps_set", "set_begin_index": "begin_set", "step": "stepped"}


class _Heard:
    """A wrapped method of a scheduler, which also notifies listeners."""

    def __init__(self, scheduler: Any, method: str) -> None:
        self.method = method
        self.before = vars(scheduler).get(method)  # the instance attribute that it replaces, if any
        self.listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._original = getattr(scheduler, method)
        self._scheduler = weakref.ref(scheduler)
        # Keeps the signature: pipelines inspect it to learn what a scheduler accepts.
        functools.update_wrapper(self, self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.method == "step":
            for listener in tuple(self.listeners):
                args, kwargs = listener.stepping(self._scheduler(), args, kwargs)
        result = self._original(*args, **kwargs)
        for listener in tuple(self.listeners):
            getattr(listener, _EVENTS[self.method])(self._scheduler(), *args, **kwargs)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copied scheduler must step itself, without listeners, and not the original.
        copied = memo.get(id(self._scheduler()))
        if copied is None:
            # Somebody copies the attributes alone, to put them back later.
            return self
        return types.MethodType(getattr(type(copied), self.method), copied)

    def unwrap(self) -> None:
        """Restore the method, unless somebody has wrapped it again: then this one stays, and only passes calls on."""
        scheduler = self._scheduler()
        if scheduler is None or vars(scheduler).get(self.method) is not self:
            return
        if self.before is None:
            delattr(scheduler, self.method)
        else:
            setattr(scheduler, self.method, self.before)


def listen(scheduler: Any, listener: Listener) -> Callable[[], None]:
    """Notify `listener` of every call, until the returned function is called or the listener is gone."""
    methods = [_heard(scheduler, method) for method in _EVENTS if hasattr(scheduler, method)]
    for method in methods:
        method.listeners.add(listener)
    # References to `stop` must not keep the scheduler or the listener alive.
    heard = [weakref.ref(method) for method in methods]
    weak_listener = weakref.ref(listener)

    def stop() -> None:
        for method in (each() for each in heard):
            if method is not None:
                method.listeners.discard(weak_listener())
                if not method.listeners:
                    method.unwrap()

    return stop


def _heard(scheduler: Any, method: str) -> _Heard:
    present = vars(scheduler).get(method)
    if isinstance(present, _Heard):
        return present
    heard = _Heard(scheduler, method)
    setattr(scheduler, method, heard)
    return heard
