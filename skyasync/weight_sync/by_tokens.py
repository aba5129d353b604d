"""A weight sync proven by the tokens that were sampled after it, which cost nothing.

Invariant: tokens say something only once they have been as close as the probe was, after the same sync. Where they are
not, something is done to them that the probe knows nothing of (a sampling of the environment's own), and they never do.
"""

from __future__ import annotations

from skyasync.weight_sync.update import WeightSyncError


class ByTokens:
    """Attributes: shown: the last sync that tokens have proven."""

    def __init__(self) -> None:
        self.shown = -1
        self._comparable: bool | None = None  # not known yet

    def judge(
        self, version: int, gap: float, *, floor: float, limit: float, sync: int, engines: int, probed: bool
    ) -> None:
        """Note what they say.

        Args:
            gap: mean over the tokens of all engines; where one of them is off, its share alone counts.
            probed: the probe has found nothing after this sync.

        Raises:
            WeightSyncError: for a gap beyond the limit, where tokens have been within it before.
        """
        within = gap <= limit / engines
        if probed:
            self._comparable = within and self._comparable is not False
        if not self._comparable:
            return
        if not gap <= limit:
            raise WeightSyncError(
                f"what the engines sampled by version {version} and the trainer differ by {gap:.3g} in log-probability "
                f"(mean over the batch's tokens of this version); at start-up they differed by {floor:.3g}, and "
                f"allowed is {limit:.3g} (generator.weight_sync_tolerance)"
            )
        if within:
            self.shown = sync
