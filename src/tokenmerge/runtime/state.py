"""State: what one `apply` remembers, and how it decides what every denoiser call does.

Compiled code must not see any of this, or it would recompile at every step. So calls are observed outside of it. Traced
code only reads tensors, which are overwritten in place, and what each technique does in this call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from ..families.calls import DenoiserCall
from .clock import MAX_CALLS, Clock
from .installing import Uncopied
from .timeline import FULL, HELD, MERGED, Kept, Step, Timeline

# The attribute of the denoiser that keeps what `apply` knows, so that both live and die together.
APPLIED = "_tokenmerge"


class Host(Protocol):
    """What the state needs of a follower, which knows where the denoising loop stands."""

    clock: Clock

    @property
    def scheduler(self) -> Any:
        """The diffusers scheduler that drives the denoiser; None without one."""

    @property
    def waits(self) -> bool:
        """Whether calls wait for the device anyway."""

    def enter(self, call: DenoiserCall) -> None:
        """At the start of a denoiser call: bring the clock up to date."""

    def close(self) -> None: ...


class Merging(Protocol):
    """What the state needs of merging."""

    def begin_image(self) -> None: ...

    def enter(self, call: DenoiserCall, step: Step, *, waits: bool) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...

    def past(self) -> Any:
        """The maps of this call, for a backward pass that runs its blocks once more."""

    def recall(self, past: Any) -> None:
        """Merge by the maps of a past call, until `close`."""

    @property
    def visits(self) -> int:
        """How many merged layers ran in this call."""

    @property
    def renews(self) -> bool:
        """Whether this call changes a map."""

    def kind(self) -> Hashable | None: ...

    def done(self) -> Any: ...

    def set_done(self, done: Any) -> None: ...

    def owners(self) -> list[Any]: ...


class Holding(Protocol):
    """What the state needs of holding."""

    def begin_image(self) -> None: ...

    def known(self, call: DenoiserCall) -> Kept | None:
        """What earlier calls like this one have shown in this image."""

    def enter(self, call: DenoiserCall, step: Step, *, restart: bool) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...

    @property
    def learning(self) -> bool:
        """Whether no call has shown yet what can be held."""

    def kind(self) -> Hashable | None: ...

    def owners(self) -> list[Any]: ...


class State(Uncopied):
    """Everything one `apply` remembers. The techniques do not know each other; the state directs both."""

    def __init__(
        self, timeline: Timeline, follower: Host, merging: Merging | None = None, holding: Holding | None = None
    ) -> None:
        self.timeline = timeline
        self.follower = follower
        self.merging = merging
        self.holding = holding
        self.step = Step(FULL)  # what the current call does
        self.steps: Counter[str] = Counter()  # steps of the last image by kind, or "skipped" by a cache
        # Checks the model. If a cache may skip blocks in this image, returns how many merged layers run all the same.
        self.at_image_start: Callable[[], int | None] = lambda: None
        self._begun = -1  # the last image whose first call was entered without an error
        self._anyway: int | None = None  # result of `at_image_start` for this image
        self._held_from: int | None = None  # in a held step, the number of the kept step before it
        self._kinds: dict[Hashable, str] = {}  # the kind of the last kept step, for each part of a step's calls
        self._parts: list[Hashable] = []  # parts of the current call, see `DenoiserCall.parts`
        self._came: Counter[Hashable] = Counter()  # how often each condition has come in this step

    def enter(self, call: DenoiserCall) -> None:
        """At the start of a denoiser call: update the clock, decide the kind of the step, and direct the techniques."""
        self.follower.enter(call)
        clock = self.follower.clock
        if call.conditions:
            call = call._replace(conditions=self._numbered(call.conditions))
        # Not `clock.call == 0`: the first call of an image may have been refused, and be made again.
        if self._begun != clock.image:
            self._anyway = self.at_image_start()
            self.steps.clear()
            self._kinds.clear()
            for technique in (self.merging, self.holding):
                if technique is not None:
                    technique.begin_image()
        self._parts = [part for part, _ in call.parts(clock.call)]
        self.step = self._decide(call)
        if self.merging is not None:
            self.merging.enter(call, self.step, waits=self.follower.waits)
        if self.holding is not None:
            self.holding.enter(call, self.step, restart=self._runs_differently)
        self._begun = clock.image

    def leaves_out(self, call: DenoiserCall) -> bool:
        """At the start of an evaluation: whether it is held, so that the host makes none of its calls.

        call: stands for all calls of the evaluation. If held, it counts as the step's only call.
        """
        kept = self.holding.known(call) if self.holding is not None else None
        if self.timeline.step(self.follower.clock.place(), kept).kind != HELD:
            return False
        self.enter(call)
        self.leave()
        return True

    def _numbered(self, conditions: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        """Number repeats of a condition within a step: guidance may ask for one again, with other layers."""
        if self.follower.clock.call == 0:
            self._came.clear()
        numbered = tuple((condition, self._came[condition]) for condition in conditions)
        self._came.update(conditions)
        return numbered

    def _decide(self, call: DenoiserCall) -> Step:
        """What a call does. All calls of a step do the same, but a call with another last kept step runs."""
        clock = self.follower.clock
        if call.trains:
            return self.timeline.step(clock.place(), None, may_hold=False)
        kept = self.holding.known(call) if self.holding is not None else None
        if clock.call == 0:
            self._held_from = None
            decided = self.timeline.step(clock.place(), kept)
            if decided.kind == HELD and kept is not None:
                self._held_from = kept.last.number
            return decided
        # Without conditions, only the first calls of a step have residuals of their own.
        may_hold = bool(call.conditions) or clock.call < MAX_CALLS
        if kept is not None and kept.last.number == self._held_from and may_hold:
            return Step(HELD)
        step = self.timeline.step(clock.place(), None, may_hold=may_hold)
        return step._replace(keeps=step.keeps or (self.step.keeps and may_hold))

    def leave(self) -> None:
        """At the end of a call that did not fail."""
        clock = self.follower.clock
        clock.end_call()
        # Count steps, not calls: guidance may take several.
        if clock.call == 0:
            self.steps[self._did] += 1
        if self.holding is not None:
            if self.step.keeps:
                self._kinds.update(dict.fromkeys(self._parts, self.step.kind))
            self.holding.leave()
        if self.merging is not None:
            self.merging.leave()

    @property
    def _runs_differently(self) -> bool:
        """Whether a changed map, or an edge of Merge's window, lies between the last kept step and this call."""
        kind = self.step.kind
        changed = self.merging is not None and kind == MERGED and self.merging.renews
        return changed or any(self._kinds.get(part, kind) != kind for part in self._parts)

    @property
    def _did(self) -> str:
        """What the current call did: the kind of its step, unless a cache skipped its merged layers."""
        if self._anyway is None or self.merging is None or self.step.kind != MERGED:
            return self.step.kind
        return "skipped" if self.merging.visits <= self._anyway else MERGED

    def close(self) -> None:
        """Stop acting, even if somebody has kept the forward of a site."""
        self.follower.close()
        self.step = Step(FULL)
        for technique in (self.merging, self.holding):
            if technique is not None:
                technique.close()

    # For CUDA graphs, see `compiling/graphs.py`.

    @property
    def _acting(self) -> list[Merging | Holding]:
        """The techniques that take part in this call."""
        found: list[Merging | Holding] = []
        if self.merging is not None and self.step.kind == MERGED:
            found.append(self.merging)
        if self.holding is not None and (self.step.keeps or self.step.kind == HELD):
            found.append(self.holding)
        return found

    def kind(self) -> Hashable | None:
        if self.holding is not None and self.holding.learning:
            return None
        kinds = [technique.kind() for technique in self._acting]
        return None if None in kinds else (self.step.kind, self.step.keeps, *kinds)

    def done(self) -> Any:
        return self.merging.done() if self.merging is not None and self.step.kind == MERGED else None

    def set_done(self, done: Any) -> None:
        if self.merging is not None and self.step.kind == MERGED:
            self.merging.set_done(done)

    def owners(self) -> list[Any]:
        return [owner for technique in self._acting for owner in technique.owners()]
