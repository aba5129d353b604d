"""The state of a translation: what each of their keys became, and what several of them decide
together.

Invariant: every key that was given is in ``left``, ``silent``, ``unknown`` or ``carried``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from math import ceil

from skyasync.config.keys import Key, Keys
from skyasync.config.schema import Config
from skyasync.config.values import Value, value_of, written
from skyasync.interop.conversion import BATCH, ConversionContext, N, NoCounterpartError, converted
from skyasync.interop.recipe import SourceRecipe
from skyasync.interop.system import System, TableRow, Target

A = "trainer.algorithm."
CORRECTION = f"{A}off_policy_correction"
PLAN = "trainer.plan"
PLACEMENT = "trainer.placement."
MINI = "trainer.policy_mini_batch_size"
SAMPLING = "generator.sampling_params"
#: Names and folders that a run makes: what a shell would fill in would become part of a file's name.
OUTPUTS = {
    f"trainer.{name}"
    for name in ("run_name", "project_name", "runs_dir", "ckpt_path", "export_path")
}
HUB = re.compile(r"[\w.-]+/[\w.-]+(#[^:]+)?")  # a data set of the hub, named without a split

#: The bounds of each correction, low and high.
BOUNDS = {
    "token_tis": (f"{A}token_tis_ratio_clip_low", f"{A}token_tis_ratio_clip_high"),
    "icepop": (f"{A}icepop_low", f"{A}icepop_high"),
    "sequence_tis": ("", f"{A}sequence_tis_ratio_clip_high"),
    "geometric_tis": ("", f"{A}geometric_tis_ratio_clip_high"),
    "segment_tis": ("", f"{A}geometric_tis_ratio_clip_high"),
    "sequence_icepop": (f"{A}product_mask_low", f"{A}product_mask_high"),
    "sequence_mask_tis": (f"{A}geo_mask_low", f"{A}geo_mask_high"),
}


@dataclass
class DraftSetting:
    """A value for a key of ours, whose keys it came from, and whether they were given or are
    defaults there.

    ``note`` says what differs from theirs; it stands behind the setting.
    """

    value: Value
    theirs: tuple[str, ...] = ()
    given: bool = True
    note: str = ""


@dataclass
class Draft:
    """What became of every key so far.

    ``left``: key -> why it has no counterpart; ``silent``: key -> why it needs no setting;
    ``unknown``: in no table; ``carried``: key -> the first of ours that it set, whatever decided in
    the end. ``remarks``: what differs from theirs, and no key says.
    """

    system: System
    recipe: SourceRecipe
    keys: Keys = field(default_factory=lambda: Keys.of(Config))
    ours: dict[str, DraftSetting] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    carried: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def given(self) -> dict[str, Value]:
        return self.recipe.keys

    def value(self, path: str) -> Value:
        """What our key is, or will be."""
        if path in self.ours:
            return self.ours[path].value
        return self.keys[path].default

    def number(self, path: str) -> float:
        """``value`` of a key that is a number; its default where a shell fills the value in."""
        value = self.value(path)
        if isinstance(value, int | float):
            value = value
        else:
            value = self.keys[path].default
        assert isinstance(value, int | float), path
        return value

    def theirs(self, *names: str) -> Value:
        """The value of their key: of the first of its names that is given, else the default
        there."""
        for name in self.named(*names):
            return self.given[name]
        row = next((row for name in names if (row := self.system.table.exact.get(name))), None)
        if row and row.default:
            return value_of(row.default)
        return None

    def named(self, *names: str) -> list[str]:
        """Their keys among these that were given."""
        return [name for name in names if name in self.given]

    def origin(self, path: str) -> tuple[str, ...]:
        """Their keys that our key came from."""
        if path in self.ours:
            return self.ours[path].theirs
        return ()

    def put(self, path: str, value: Value, *theirs: str, note: str = "") -> None:
        """Set our key; it counts as given if any of theirs is."""
        self.ours[path] = DraftSetting(value, theirs, bool(self.named(*theirs)), note)

    def drop(self, path: str, why: str = "") -> None:
        """Leave our key at its default; their keys that were given go to ``left`` with ``why``."""
        theirs = self.origin(path)
        self.ours.pop(path, None)
        for name in self.named(*theirs):
            if not any(name in other.theirs for other in self.ours.values()):
                self.left[name] = why or "it has no effect here next to the other settings"

    def drop_unasked(self, path: str) -> None:
        """Leave our key at its default if it was not given."""
        if path in self.ours and not self.ours[path].given:
            self.ours.pop(path)

    def drop_group(self, prefix: str, why: str) -> None:
        """``drop`` for every key of ours that begins so."""
        for path in [path for path in self.ours if path.startswith(prefix)]:
            self.drop(path, why)

    def context(self) -> ConversionContext:
        """What conversions may depend on."""
        ours = {path: setting.value for path, setting in self.ours.items()}
        return ConversionContext(ours, self.given, {key.path: key.default for key in self.keys})

    # What the systems' ``finish`` have in common.

    def set_one_of(self, path: str, name: str) -> None:
        """Let one of their two keys for one of ours decide."""
        origin = self.origin(path)
        if not origin or name in origin:
            return
        self.left |= dict.fromkeys(self.named(*origin), f"it has no effect there: {name} decides")
        value = self.theirs(name)
        if value is not None:
            result = converted(self.system.table.exact[name], value, self.context())
        else:
            result = None
        self.ours.pop(path)
        if result:
            self.put(path, result[path], name)

    def set_correction(self, enabled: bool, bounds: Value, *names: str) -> None:
        """The correction and its bounds; ``none`` where theirs is off, in asynchronous plans
        too."""
        for path in {
            path for pair in BOUNDS.values() for path in pair if {*self.origin(path)} & {*names}
        }:
            self.ours.pop(path)
        chosen = self.value(CORRECTION)
        if not enabled:
            for name in self.named(*names):
                self.left.setdefault(name, "the correction is off")
            self.put(CORRECTION, "none")
        elif isinstance(bounds, list):
            for path, value in zip(BOUNDS.get(str(chosen), ("", "")), bounds, strict=True):
                if path and isinstance(value, int | float):
                    self.put(path, float(value), *self.named(*names))

    def set_kl(self, in_loss: bool, coefficient: float) -> None:
        """The KL term where their keys put it; none where its weight is 0."""
        for path in (f"{A}use_kl_loss", f"{A}use_kl_in_reward"):
            theirs = self.origin(path)
            enabled = bool(coefficient) and in_loss == path.endswith("use_kl_loss")
            self.ours.pop(path, None)
            if enabled or self.named(*theirs):
                self.put(path, enabled, *theirs)
        if not coefficient:
            self.drop_unasked("trainer.ref.model.dtype")
            for name in (
                "kl_loss_coef",
                "kl_estimator_type",
                "kl_ctrl.horizon",
                "kl_ctrl.kl_target",
                "kl_ctrl.type",
            ):
                self.drop(f"{A}{name}", "there is no KL term")

    def set_kl_clamp(self, *estimators: str) -> None:
        """Clamp the KL estimate to plus or minus 10, as they do for these estimators."""
        in_use = self.value(f"{A}use_kl_loss") or self.value(f"{A}use_kl_in_reward")
        if in_use and self.value(f"{A}kl_estimator_type") in estimators:
            self.put(f"{A}kl_clamp", 10.0)

    def remark_warm_up(self, section: str = "policy") -> None:
        """Say which step of the warm-up is the first that learns."""
        prefix = f"trainer.{section}.optimizer_config."
        for path in (f"{prefix}num_warmup_steps", f"{prefix}warmup_ratio"):
            if path in self.ours and self.value(path):
                setting = self.ours[path]
                note = "of W steps, step k has k/W of the rate here, (k-1)/W there"
                self.ours[path] = replace(setting, note=note)

    def remark_kl_in_reward(self) -> None:
        """Say how a KL penalty in the reward meets an estimator that compares the rewards of a
        group."""
        compared = ("grpo", "dr_grpo", "rloo", "normalized", "reinforce++_baseline")
        if self.value(f"{A}use_kl_in_reward") and self.value(f"{A}advantage_estimator") in compared:
            self.remarks.append(
                f"{A}use_kl_in_reward: the penalty is part of the reward that a group is compared by; "
                f"there each token's advantage loses the penalties from it on, behind that comparison"
            )

    def remark_filters(self) -> None:
        """Say that their log-probabilities are of all tokens, if sampling leaves some out."""
        top_p, top_k, min_p = (
            self.number(f"{SAMPLING}.{name}") for name in ("top_p", "top_k", "min_p")
        )
        if top_p < 1 or top_k > 0 or min_p > 0:
            self.remarks.append(
                f"trained log-probabilities are of the tokens that {SAMPLING} leaves, there of all: "
                f"{A}filter_logprobs=false computes them so"
            )

    def set_staleness(self, name: str) -> None:
        """The whole number above a ratio of batches bounds the staleness."""
        ratio = self.value("trainer.async_generation_ratio")
        if self.value(PLAN) == "fully_async" and isinstance(ratio, int | float) and ratio:
            self.put(
                "trainer.max_staleness",
                max(ceil(ratio), ceil(self.number("trainer.sync_interval")) - 1),
                name,
            )

    def set_prompts(self, path: str, responses: int, *names: str) -> None:
        """Set a key that counts prompts from a number of responses, if it is one of whole
        groups."""
        samples = self.number(N)
        if responses % samples or responses < samples:
            for name in self.named(*names):
                self.left.setdefault(
                    name, f"{responses} responses are not a multiple of the group size {samples:g}"
                )
            return
        prompts = int(responses // samples)
        whole = path == MINI and prompts >= self.number(BATCH)
        self.put(path, 0 if whole else prompts, *self.named(*names))
        for name in self.named(*names):
            self.left.pop(name, None)

    def set_split(self, path: str, *names: str) -> None:
        """The split of data sets that are named without one, from their keys for it."""
        sources = self.value(path)
        given = self.named(*names)
        split = self.given[given[0]] if given else None
        if split and split != "train" and isinstance(sources, list):
            whole: list[Value] = [
                f"{name}:{split}" if HUB.fullmatch(str(name)) else name for name in sources
            ]
            self.put(path, whole, *self.origin(path), *given)
        for name in given:
            self.left.pop(name, None)
            self.silent.setdefault(name, "the split is written with the data set's name")


def begin(system: System, recipe: SourceRecipe) -> Draft:
    """Every key by its row, and the defaults that differ from ours. Units that depend on other keys
    come last."""
    draft = Draft(system, recipe)
    order = {id(row): at for at, row in enumerate(system.table.rows)}
    given: list[tuple[str, TableRow]] = []
    for name in draft.given:
        row = system.table.find(name)
        if row:
            given.append((name, row))
        elif name in draft.keys and system.has_our_keys:
            given.append((name, TableRow((name,), (name,), "", "key", (Target(name),))))
        elif entry := _entry_row(draft, name):
            given.append((name, entry))
        else:
            draft.unknown.append(name)
    given_rows = {id(row) for _, row in given}
    given.sort(
        key=lambda entry: order.get(id(entry[1]), len(order))
    )  # keys that are ours come last
    for later in (False, True):
        for name, row in given:
            if bool(row.function) == later:
                _carry(draft, name, row, draft.given[name], given=True)
        for row in system.table.rows:
            if (
                row.default
                and row.kind == "key"
                and bool(row.function) == later
                and id(row) not in given_rows
            ):
                _carry(draft, row.names[0], row, value_of(row.default), given=False)
    return draft


def _entry_row(draft: Draft, name: str) -> TableRow | None:
    """The row of an entry of their mapping, where the mapping is one of ours; None for any other
    key."""
    group, _, entry = name.rpartition(".")
    row = draft.system.table.exact.get(group)
    if row is None or len(row.free) != 1:
        return None
    target = f"{row.free[0].path}.{entry}"
    if draft.keys.holder(target):
        return TableRow((name,), (name,), "", "key", (Target(target),))
    return None


def _is_filled_in(entry: Value, key: Key) -> bool:
    """Whether a shell fills in what cannot stand as it is written: a number, a switch, one of our
    names, an output."""
    if "$" not in str(entry) and "`" not in str(entry):
        return False
    return bool(key.options()) or key.type in (int, float, bool) or key.path in OUTPUTS


def _carry(draft: Draft, name: str, row: TableRow, value: Value, *, given: bool) -> None:
    """Carry one of their keys into the draft."""
    if row.kind == "=":
        draft.silent[name] = row.note
        return
    try:
        settings = converted(row, value, draft.context())
    except NoCounterpartError as reason:
        if given:
            draft.left[name] = str(reason) or row.note or f"there is no {written(value)} here"
        return
    if settings is None:
        if given:
            draft.silent[name] = row.note or "our default"
        return
    for path, entry in settings.items():
        key = draft.keys.holder(path)
        if given and key and _is_filled_in(entry, key):
            draft.left[name] = "a shell fills it in: write it by hand"
            continue
        target = Target.read(path)
        before = draft.ours.get(target.path)
        draft.carried.setdefault(name, target.path)
        if not given and before and (before.given or target.index is None):
            continue
        if target.index is None:
            draft.ours[path] = DraftSetting(entry, (name,), given)
            continue
        entries = draft.value(target.path)
        assert isinstance(entries, list)
        entries = [entry if at == target.index else other for at, other in enumerate(entries)]
        theirs = (*(before.theirs if before else ()), name)
        draft.ours[target.path] = DraftSetting(
            entries, theirs, given or bool(before and before.given)
        )
