"""MergeState: the only thing that remembers: where the denoising loop stands, each group's maps, and anchors.

Compiled code must not see any of this, or it would be compiled again at every step. So denoiser calls are observed
outside of it, and inside an opaque operator, `refresh`, brings a group's tensors up to date in place. Traced code only
ever reads those tensors, the gaps that anchors keep, and the mode of the step: merged, full or anchor.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..holding.controller import Anchors
from ..families.calls import DenoiserCall, grid_at_level, grids_of_ids
from .clock import Clock
from ..config import MergeConfig
from ..errors import TokenMergeError
from ..merging.grid import TokenGrid
from ..merging.groups import MergeGroup
from ..merging.methods import Method, method_for
from .noise import adds_noise
from ..merging.slots import MAX_CALLS
from .listening import watch

# Where `apply` keeps its record, on the denoiser itself so that both live and die together.
RECORD = "_tokenmerge"
# Of a scheduler's step: how much noise it adds, where it adds none by itself.
_NOISE_ARGUMENTS = ("eta", "s_churn")


class MergeState:
    """Everything one `apply` remembers. Sites and hooks refer to it; it knows none of them."""

    def __init__(self, config: MergeConfig, scheduler: Callable[[], Any], way_out_of_noise: str = "") -> None:
        self.config = config
        self._way_out_of_noise = way_out_of_noise  # where a scheduler that adds noise is refused
        self.clock = Clock()
        self.groups: list[MergeGroup] = []
        self.mode = "merged"  # or full, or anchor: merged and full both
        self.anchors = Anchors(config, self.clock)
        self._begun = -1  # the last image whose first call could be entered
        self._timestep: Tensor | None = None  # of the first call of the step
        self._place: int | None = None  # of that timestep among the scheduler's, where it is one of those itself
        self._stepped: Any = None  # the timestep that the scheduler stepped from last
        self._inside = False  # whether a call has begun and not ended: one that fails does not
        self.steps: Counter[str] = Counter()  # of the last image, by mode, or "skipped" by a cache
        self._cached = False  # whether a cache may skip blocks in this image
        self.at_image_start: Callable[[], bool] = lambda: False  # says whether there is one
        self._scheduler = scheduler
        self._stop_watching: Callable[[], None] | None = None
        self._watched: Callable[[], Any] = lambda: None
        try:
            self.follow_scheduler()
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> Any:
        raise TokenMergeError("a model cannot be copied or pickled while merging is applied; call remove first")

    def add_group(
        self,
        name: str,
        level: int = 0,
        method: Method[Any] | None = None,
        *,
        ratio: float | None = None,
        shared: bool = False,
    ) -> MergeGroup:
        config = self.config if ratio is None else self.config.replace(ratio=ratio, block_ratios=None)
        group = MergeGroup(name, len(self.groups), method or method_for(config), config, self.clock, level, shared)
        self.groups.append(group)
        return group

    def enter(self, call: DenoiserCall) -> None:
        """At the start of a denoiser call: learn the step and the grids, and lay out tensors of their size."""
        self.follow_scheduler()
        scheduler = self._watched()
        if scheduler is None:
            if self.config.needs_length:
                raise TokenMergeError(
                    "the scheduler that merging follows is gone, and what a step does depends on how many there are; "
                    "apply to the pipeline that runs"
                )
            self.clock.follow_timestep(float(call.timestep.flatten()[0]))
        else:
            self._follow_calls(scheduler, call)
        # One that failed may be made again, and is the same call of its step.
        self.clock.call += self.clock.call < 0 or not self._inside
        self._inside = True
        self._set_mode()
        if self.mode == "merged" and self.anchors.exist:
            self.mode = self.anchors.mode(call)
        # Not only in the first call of an image: that may have been refused, and made again.
        begins = self._begun != self.clock.image
        if begins:
            self._cached = self.at_image_start()
            self.anchors.forget()
            self.steps.clear()
        self._see_grids(call, begins)
        for group in self.groups:
            group.enter(call, mode=self.mode)
        self.anchors.enter(call, self.mode)
        ratios = {group.ratio for group in self.groups}
        if any(ratios) and not self._merges:
            raise TokenMergeError(
                f"at this size ratio {max(ratios)} removes no token in regions {self.config.regions!r}; "
                "use larger regions or a larger image, or remove merging"
            )
        self._begun = self.clock.image

    def leave(self) -> None:
        """At the end of a call that did not fail."""
        self._inside = False
        # Guidance may take several calls to a step.
        if self.clock.call == 0:
            self.steps[self._did] += 1
        self.anchors.settle(self.groups)

    @property
    def _did(self) -> str:
        """What the call that ends now did: its mode, but where it removed nothing, or a cache let no layer run."""
        if self.mode == "full" or not self._merges:
            return "full"
        skipped = self._cached and not any(group.done[0] for group in self.groups)
        return "skipped" if skipped else self.mode

    @property
    def _merges(self) -> bool:
        """Whether this call removes tokens anywhere, if its step merges."""
        return any(group.slot is not None and group.slot.merges for group in self.groups)

    def _follow_calls(self, scheduler: Any, call: DenoiserCall) -> None:
        """Learn from a call what the scheduler does not tell."""
        if self.clock.is_over:
            # Loops of one's own may set the timesteps once, for many images.
            self.timesteps_set(scheduler)
        if self.clock.call < 0:
            self._see_place(scheduler, call.timestep)
            self._timestep = call.timestep
            if self.clock.step == 0:
                self.clock.begin = self._begin(scheduler, call.timestep)
        elif self.clock.call >= MAX_CALLS - 1 and not _same_time(call.timestep, self._timestep):
            # Not at the first calls, since reading timesteps waits for the device.
            raise _driven_by_another(f"{MAX_CALLS + 1} calls came without a step of the scheduler that merging follows")

    def _see_place(self, scheduler: Any, timestep: Tensor) -> None:
        """See from where the timestep of a step's first call lies, without reading it, whether the loop still is that
        of the image before."""
        timesteps = getattr(scheduler, "timesteps", None)
        before, place = self._place, _place_in(timesteps, timestep)
        if before is not None and place is not None and place <= before:
            # Back to an earlier one, or to that of the step before: an image was broken off, and timesteps had been
            # set for many. Past its first step, parts of one that take turns look alike, and are still refused.
            turns = self._stepped if place == before and self.clock.step > 1 else None
            self.timesteps_set(scheduler)
            self._stepped = turns
        elif before is not None and place is None and isinstance(timesteps, Tensor):
            following = timesteps[before + 1 : before + 2]
            if not len(following) or not _same_time(timestep, following):
                raise _driven_by_another("a call came that is no step of the scheduler that merging follows")
        self._place = place

    def _see_grids(self, call: DenoiserCall, begins: bool) -> None:
        """Tell every group how its image tokens lie."""
        if call.ids is None:
            for group in self.groups:
                group.grids = (TokenGrid(*grid_at_level(call, group.level)),)
            return
        # Reading ids waits for the device, so only once per image.
        known = self.groups[0].grids
        waits = self._watched() is None or self.clock.call >= MAX_CALLS
        if begins or waits or sum(grid.count for grid in known) != call.tokens:
            known = grids_of_ids(call.ids)
            for group in self.groups:
                group.grids = known

    @property
    def phase(self) -> str:
        """What the last call to enter does: full, reuse, reweigh or select; the last three also at an anchor."""
        merging = [group for group in self.groups if group.slot is not None and group.slot.merges]
        if self.mode == "full" or not merging:
            return "full"
        phase = max((group.phase for group in merging), key=("reuse", "reweigh", "select").index)
        phase = f"anchor, {phase}" if self.mode == "anchor" else phase
        return f"{phase} at {self.groups[0].ratio:g}" if self.config.step_ratios else phase

    def kind(self) -> tuple[Any, ...] | None:
        """Equal for denoiser calls that launch the same work on the same tensors; None if it cannot be recorded."""
        if self.mode == "full":
            return (self.mode,)
        kinds = tuple(group.kind() for group in self.groups)
        gaps = tuple(map(id, self.anchors.gaps))
        return None if None in kinds else (self.mode, gaps, *kinds)

    def done(self) -> list[tuple[int, int]]:
        """What this call has renewed so far, by group."""
        return [group.done for group in self.groups]

    def set_done(self, done: list[tuple[int, int]]) -> None:
        """Take it that this call has renewed this."""
        for group, each in zip(self.groups, done, strict=True):
            group.done = each

    def owners(self) -> list[Any]:
        """What owns the tensors of this call."""
        return [*(group.slot for group in self.groups), *self.anchors.gaps]

    def still_owns(self, owners: list[Any]) -> bool:
        """Whether no tensor of an earlier call has been given up since."""
        slots, gaps = owners[: len(self.groups)], owners[len(self.groups) :]
        owned = all(group.owns(slot) for group, slot in zip(self.groups, slots, strict=True))
        return owned and self.anchors.owns(gaps)

    def follow_scheduler(self) -> None:
        """Listen to the scheduler in use, also after the user has put another one into the pipeline."""
        scheduler = self._scheduler()
        # A pipeline may be gone and its denoiser and scheduler live on in another one.
        if scheduler is None or scheduler is self._watched():
            return
        if self._way_out_of_noise and adds_noise(scheduler):
            raise self._noisy(scheduler)
        self._forget_scheduler()
        self._watched = weakref.ref(scheduler)
        self._stop_watching = watch(scheduler, self)
        self.timesteps_set(scheduler)
        # Merging may be applied on the way, as by a callback of a pipeline.
        self.clock.begin = getattr(scheduler, "begin_index", None) or 0
        self.clock.step = max(0, (getattr(scheduler, "step_index", None) or 0) - self.clock.begin)

    def close(self) -> None:
        """Merge no more, also where somebody has kept the forward of a site."""
        self._forget_scheduler()
        self.mode = "full"

    def _forget_scheduler(self) -> None:
        if self._stop_watching is not None:
            self._stop_watching()
            self._stop_watching = None

    def timesteps_set(self, scheduler: Any, *_: Any, **__: Any) -> None:
        self._place, self._stepped = None, None
        timesteps = getattr(scheduler, "timesteps", None)
        sigmas = getattr(scheduler, "sigmas", None)
        # Some schedulers keep them on the device, for which reading them waits.
        levels = sigmas.tolist() if isinstance(sigmas, Tensor) and self.config.gap == "sigma" else None
        if levels is None:
            check_levels(self.config, scheduler)
        self.clock.start_image(None if timesteps is None else len(timesteps), levels)
        self._set_mode()

    def begin_set(self, scheduler: Any, *_: Any, **__: Any) -> None:
        self.clock.begin = scheduler.begin_index or 0
        self._set_mode()

    def stepped(self, scheduler: Any, *arguments: Any, **named: Any) -> None:
        timestep = named.get("timestep", arguments[1] if len(arguments) > 1 else None)
        # The very same tensor: to compare values would wait for the device, and some schedulers repeat those.
        if isinstance(timestep, Tensor) and timestep is self._stepped:
            raise TokenMergeError(
                "the scheduler was stepped twice from one timestep: parts of a picture, or several, take turns, and "
                "their calls cannot be told apart; let one call have all of them (view_batch_size), or remove first"
            )
        if self._way_out_of_noise and any(named.get(name) for name in _NOISE_ARGUMENTS):
            raise self._noisy(scheduler)
        self._stepped = timestep
        self.clock.next_step()
        self._set_mode()

    def _noisy(self, scheduler: Any) -> TokenMergeError:
        return TokenMergeError(
            f"{type(scheduler).__name__} adds noise at its steps; between anchors nothing that runs would see it, and "
            f"it would stay in the picture: {self._way_out_of_noise}"
        )

    def _begin(self, scheduler: Any, timestep: Tensor) -> int:
        """Where in the schedule an image begins. Old schedulers do not say; then the timestep is looked up."""
        if hasattr(scheduler, "begin_index"):
            return scheduler.begin_index or 0
        if not self.config.needs_length:
            return 0
        places = (scheduler.timesteps.cpu() == timestep.flatten()[0].cpu()).nonzero()
        return int(places[0]) if len(places) else 0

    def _set_mode(self) -> None:
        self.mode = "merged" if self.config.schedule.merges(self.clock.position) else "full"


def check_levels(config: MergeConfig, scheduler: Any) -> None:
    """Refuse to extrapolate in noise levels that a scheduler, or none, does not tell."""
    if config.gap == "sigma" and config.schedule.anchor_every and getattr(scheduler, "sigmas", None) is None:
        named = "there is none" if scheduler is None else f"{type(scheduler).__name__} has none"
        raise TokenMergeError(f"gap='sigma' follows the sigmas of a scheduler, and {named}; use gap='linear'")


def _place_in(timesteps: Any, timestep: Tensor) -> int | None:
    """Which of the timesteps this one is, if it is a view of them, as pipelines pass it on."""
    if not isinstance(timesteps, Tensor) or timesteps.device != timestep.device:
        return None
    if timesteps.untyped_storage().data_ptr() != timestep.untyped_storage().data_ptr():
        return None
    return int(timestep.storage_offset()) - int(timesteps.storage_offset())


def _driven_by_another(fact: str) -> TokenMergeError:
    return TokenMergeError(
        f"{fact}: another loop drives this denoiser; apply to the pipeline that runs, give scheduler=, or apply to the "
        "denoiser alone, with start=0 and anchor_every=0"
    )


def _same_time(one: Tensor, other: Tensor | None) -> bool:
    """Whether two calls have the same timestep, given once or for each sample of their batch."""
    return other is not None and one.device == other.device and bool(one.flatten()[0] == other.flatten()[0])
