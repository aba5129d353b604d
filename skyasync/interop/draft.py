"""The state of a translation: the result for each source key, and rules for keys that interact.

A source key is a key of the other framework. Invariant: every key of the recipe is in
``no_counterpart``, ``not_needed``, ``unknown_keys`` or ``first_targets``.
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

# Our settings that several frameworks' rules depend on.
ANCHOR = "trainer.algorithm.ratio_anchor"
CORRECTION = "trainer.algorithm.off_policy_correction"
ESTIMATOR = "trainer.algorithm.advantage_estimator"
KL_COEFFICIENT = "trainer.algorithm.kl_loss_coef"
LOSS = "trainer.algorithm.policy_loss_type"
REDUCTION = "trainer.algorithm.loss_reduction"
PLAN = "trainer.plan"
MINI = "trainer.policy_mini_batch_size"
ENGINE_SIZE = "generator.inference_engine_tensor_parallel_size"
RESPONSE_LENGTH = "generator.sampling_params.max_generate_length"
#: Names of files and folders that a run makes. A shell variable in them would be taken literally.
OUTPUTS = {
    "trainer.run_name",
    "trainer.project_name",
    "trainer.runs_dir",
    "trainer.ckpt_path",
    "trainer.export_path",
}
HUB = re.compile(r"[\w.-]+/[\w.-]+(#[^:]+)?")  # owner/name#config, without a split
#: Settings that have no effect without a KL term.
_KL_SETTINGS = (
    "kl_loss_coef",
    "kl_estimator_type",
    "kl_ctrl.horizon",
    "kl_ctrl.kl_target",
    "kl_ctrl.type",
)
#: Estimators that compare the rewards within a group.
_GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "normalized", "reinforce++_baseline")

#: Correction -> the settings of its lower and upper bound; "" if it has none.
BOUNDS = {
    "token_tis": (
        "trainer.algorithm.token_tis_ratio_clip_low",
        "trainer.algorithm.token_tis_ratio_clip_high",
    ),
    "icepop": ("trainer.algorithm.icepop_low", "trainer.algorithm.icepop_high"),
    "sequence_tis": ("", "trainer.algorithm.sequence_tis_ratio_clip_high"),
    "geometric_tis": ("", "trainer.algorithm.geometric_tis_ratio_clip_high"),
    "segment_tis": ("", "trainer.algorithm.geometric_tis_ratio_clip_high"),
    "sequence_icepop": (
        "trainer.algorithm.product_mask_low",
        "trainer.algorithm.product_mask_high",
    ),
    "sequence_mask_tis": ("trainer.algorithm.geo_mask_low", "trainer.algorithm.geo_mask_high"),
}
BOUND_PATHS = tuple(dict.fromkeys(path for pair in BOUNDS.values() for path in pair if path))


@dataclass
class DraftSetting:
    """A value for a setting of ours, and its origin.

    ``sources`` are the source keys that it came from. ``explicit``: the recipe sets one of them;
    otherwise the value is a default of the framework. ``note``, the comment after the setting, says
    what differs from the framework.
    """

    value: Value
    sources: tuple[str, ...] = ()
    explicit: bool = True
    note: str = ""


@dataclass
class Draft:
    """The translation so far.

    Args:
        settings: our settings by their paths.
        no_counterpart: source key -> why it is not translated.
        not_needed: source key -> why it needs no setting here.
        unknown_keys: keys of the recipe that are in no table.
        first_targets: source key -> the first setting that it set, even if another key decides now.
        remarks: differences from the framework that belong to no single key.
    """

    system: System
    recipe: SourceRecipe
    keys: Keys = field(default_factory=lambda: Keys.of(Config))
    settings: dict[str, DraftSetting] = field(default_factory=dict)
    no_counterpart: dict[str, str] = field(default_factory=dict)
    not_needed: dict[str, str] = field(default_factory=dict)
    unknown_keys: list[str] = field(default_factory=list)
    first_targets: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def source_keys(self) -> dict[str, Value]:
        """The keys that the recipe sets, with their values."""
        return self.recipe.keys

    def value(self, path: str) -> Value:
        """The value of our setting: the draft's, else our default."""
        if path in self.settings:
            return self.settings[path].value
        return self.keys[path].default

    def number(self, path: str) -> float:
        """``value`` of a numeric setting; our default if a shell fills the value in."""
        value = self.value(path)
        if not isinstance(value, int | float):
            value = self.keys[path].default
        assert isinstance(value, int | float), path
        return value

    def updates_per_batch(self) -> int:
        """The optimizer steps for one batch: its mini-batches times the passes over it."""
        batch = self.number(BATCH)
        mini_batch = self.number(MINI) or batch  # 0 stands for the full batch
        passes = int(self.number("trainer.update_epochs_per_batch"))
        return ceil(batch / mini_batch) * passes

    def source_value(self, *names: str) -> Value:
        """The value of a source key with these names: the recipe's, else the framework's default.

        The first name that the recipe sets decides.
        """
        for name in names:
            if name in self.source_keys:
                return self.source_keys[name]
        exact = self.system.table.exact
        for name in names:
            if name in exact:
                row = exact[name]
                return value_of(row.default) if row.default else None
        return None

    def present_names(self, *names: str) -> list[str]:
        """The names among these that the recipe sets."""
        return [name for name in names if name in self.source_keys]

    def origin(self, path: str) -> tuple[str, ...]:
        """The source keys of our setting."""
        if path in self.settings:
            return self.settings[path].sources
        return ()

    def put(self, path: str, value: Value, *sources: str, note: str = "") -> None:
        """Set our setting; it is explicit if the recipe sets any of its source keys."""
        explicit = bool(self.present_names(*sources))
        self.settings[path] = DraftSetting(value, sources, explicit, note)

    def change(self, path: str, value: Value, *sources: str, note: str = "") -> None:
        """Set another value of our setting; it keeps its source keys and gets these in addition."""
        self.put(path, value, *self.origin(path), *sources, note=note)

    def drop(self, path: str, why: str) -> None:
        """Leave our setting at its default.

        Source keys of the recipe that set nothing else get ``why`` in ``no_counterpart``.
        """
        sources = self.origin(path)
        self.settings.pop(path, None)
        for name in self.present_names(*sources):
            # A source key may set several of our settings: it is translated while one is left.
            if not any(name in setting.sources for setting in self.settings.values()):
                self.no_counterpart[name] = why

    def drop_default(self, path: str) -> None:
        """Leave our setting at our default if it came from a default of the framework."""
        if path in self.settings and not self.settings[path].explicit:
            self.settings.pop(path)

    def drop_group(self, prefix: str, why: str) -> None:
        """``drop`` for each of our settings with this prefix."""
        for path in list(self.settings):
            if path.startswith(prefix):
                self.drop(path, why)

    def context(self) -> ConversionContext:
        """The settings that conversions may depend on."""
        settings = {path: setting.value for path, setting in self.settings.items()}
        defaults = {key.path: key.default for key in self.keys}
        return ConversionContext(settings, self.source_keys, defaults)

    # Rules that the ``finish`` functions of several frameworks share.

    def set_one_of(self, path: str, name: str) -> None:
        """Let the source key ``name`` decide if two source keys have the same setting of ours."""
        origin = self.origin(path)
        if not origin or name in origin:
            return
        for other_name in self.present_names(*origin):
            self.no_counterpart[other_name] = f"it has no effect there: {name} decides"
        value = self.source_value(name)
        if value is None:
            self.settings.pop(path)
            return
        result = converted(self.system.table.exact[name], value, self.context())
        self.settings.pop(path)
        if result:
            self.put(path, result[path], name)

    def set_correction(self, enabled: bool, bounds: Value, *names: str) -> None:
        """Set the correction and its bounds, or ``none`` if the framework's is off.

        ``none`` is written out because our default corrects in asynchronous plans.

        Args:
            bounds: the lower and the upper bound; anything but a list leaves them as they are.
            names: the source keys of the correction and its bounds.
        """
        # A table row fills in the bounds of one kind of correction. They are set again below.
        for path in BOUND_PATHS:
            if not {*names}.isdisjoint(self.origin(path)):
                self.settings.pop(path)
        correction = str(self.value(CORRECTION))
        if not enabled:
            for name in self.present_names(*names):
                self.no_counterpart.setdefault(name, "the correction is off")
            self.put(CORRECTION, "none")
        elif isinstance(bounds, list):
            paths = BOUNDS.get(correction, ("", ""))
            for path, bound in zip(paths, bounds, strict=True):
                if path and isinstance(bound, int | float):
                    self.put(path, float(bound), *self.present_names(*names))

    def set_kl(self, in_loss: bool, coefficient: float) -> None:
        """Put the KL term into the loss or into the reward; a coefficient of 0 is no KL term."""
        for path in ("trainer.algorithm.use_kl_loss", "trainer.algorithm.use_kl_in_reward"):
            sources = self.origin(path)
            enabled = bool(coefficient) and in_loss == path.endswith("use_kl_loss")
            self.settings.pop(path, None)
            if enabled or self.present_names(*sources):
                self.put(path, enabled, *sources)
        if not coefficient:
            self.drop_default("trainer.ref.model.dtype")
            for name in _KL_SETTINGS:
                self.drop(f"trainer.algorithm.{name}", "there is no KL term")

    def set_kl_clamp(self, *estimators: str) -> None:
        """Clamp the KL estimate to plus or minus 10, as the framework does for these estimators."""
        in_loss = self.value("trainer.algorithm.use_kl_loss")
        in_reward = self.value("trainer.algorithm.use_kl_in_reward")
        estimator = self.value("trainer.algorithm.kl_estimator_type")
        if (in_loss or in_reward) and estimator in estimators:
            self.put("trainer.algorithm.kl_clamp", 10.0)

    def remark_warm_up(self, section: str = "policy") -> None:
        """Note which step of the warm-up is the first with a learning rate above 0."""
        prefix = f"trainer.{section}.optimizer_config."
        for path in (f"{prefix}num_warmup_steps", f"{prefix}warmup_ratio"):
            if path in self.settings and self.value(path):
                setting = self.settings[path]
                note = "of W steps, step k has k/W of the rate here, (k-1)/W there"
                self.settings[path] = replace(setting, note=note)

    def remark_kl_in_reward(self) -> None:
        """Note how a group-based estimator treats a KL penalty in the reward."""
        estimator = self.value(ESTIMATOR)
        if self.value("trainer.algorithm.use_kl_in_reward") and estimator in _GROUP_ESTIMATORS:
            self.remarks.append(
                "trainer.algorithm.use_kl_in_reward: the penalty is part of the reward that a group is compared by; "
                "there each token's advantage loses the penalties from it on, behind that comparison"
            )

    def remark_filters(self) -> None:
        """Note that the framework's log-probabilities are of all tokens, if sampling filters."""
        top_p = self.number("generator.sampling_params.top_p")
        top_k = self.number("generator.sampling_params.top_k")
        min_p = self.number("generator.sampling_params.min_p")
        if top_p < 1 or top_k > 0 or min_p > 0:
            self.remarks.append(
                "trained log-probabilities are of the tokens that generator.sampling_params leaves, there of all: "
                "trainer.algorithm.filter_logprobs=false computes them so"
            )

    def set_staleness(self, name: str) -> None:
        """Bound the staleness by the batches that are generated ahead, rounded up."""
        ratio = self.value("trainer.async_generation_ratio")
        if not isinstance(ratio, int | float) or not ratio:
            return
        if self.value(PLAN) == "fully_async":
            # With a sync every n steps, samples of the last step are n - 1 steps old in any case.
            oldest = ceil(self.number("trainer.sync_interval")) - 1
            staleness = max(ceil(ratio), oldest)
            self.put("trainer.max_staleness", staleness, name)

    def set_prompts(self, path: str, responses: int, *names: str) -> None:
        """Set a setting that counts prompts from a number of responses.

        A number that is not a multiple of the group size goes to ``no_counterpart``.
        """
        samples = self.number(N)
        present_names = self.present_names(*names)
        if responses % samples or responses < samples:
            why = f"{responses} responses are not a multiple of the group size {samples:g}"
            for name in present_names:
                self.no_counterpart.setdefault(name, why)
            return
        prompts = int(responses // samples)
        if path == MINI and prompts >= self.number(BATCH):
            prompts = 0  # one update with the full batch
        self.put(path, prompts, *present_names)
        for name in present_names:
            self.no_counterpart.pop(name, None)

    def set_split(self, path: str, *names: str) -> None:
        """Add the split, which is a source key there, to the names of data sets without one."""
        datasets = self.value(path)
        present_names = self.present_names(*names)
        split = self.source_keys[present_names[0]] if present_names else None
        # Without a split our loader takes train.
        if split and split != "train" and isinstance(datasets, list):
            with_split: list[Value] = []
            for name in datasets:
                if HUB.fullmatch(str(name)):
                    name = f"{name}:{split}"
                with_split.append(name)
            self.change(path, with_split, *present_names)
        for name in present_names:
            self.no_counterpart.pop(name, None)
            self.not_needed.setdefault(name, "the split is written with the data set's name")


def begin(system: System, recipe: SourceRecipe) -> Draft:
    """Translate each key by its row, and the framework's defaults that differ from ours."""
    draft = Draft(system, recipe)
    order = {id(row): position for position, row in enumerate(system.table.rows)}
    rows: list[tuple[str, TableRow]] = []
    for name in draft.source_keys:
        row = system.table.find(name)
        if row is None:
            row = _setting_row(draft, name)
        if row is None:
            draft.unknown_keys.append(name)
        else:
            rows.append((name, row))
    recipe_rows = {id(row) for _, row in rows}

    # In the table's order, so that the order of flags does not matter. Keys that are ours come last.
    def rank(entry: tuple[str, TableRow]) -> int:
        _, row = entry
        return order.get(id(row), len(order))

    rows.sort(key=rank)
    # Rows with a function depend on other settings (units, group sizes): they are second.
    for has_function in (False, True):
        for name, row in rows:
            if bool(row.function) == has_function:
                _carry(draft, name, row, draft.source_keys[name], explicit=True)
        for row in system.table.rows:
            if not row.default or row.kind != "key" or id(row) in recipe_rows:
                continue
            if bool(row.function) == has_function:
                _carry(draft, row.names[0], row, value_of(row.default), explicit=False)
    return draft


def _setting_row(draft: Draft, name: str) -> TableRow | None:
    """A row for a key that the table lacks: one of our settings, or an entry of a mapping."""
    if draft.system.has_our_keys and name in draft.keys:
        path = name
    else:
        group, _, entry = name.rpartition(".")
        row = draft.system.table.exact.get(group)
        if row is None or len(row.free) != 1:
            return None
        path = f"{row.free[0].path}.{entry}"
        if not draft.keys.holder(path):
            return None
    return TableRow((name,), (name,), "", "key", (Target(path),))


def _needs_shell(entry: Value, key: Key) -> bool:
    """Whether the value has a shell variable or command where we need the result.

    That is a number, a switch, one of our names, or a path that a run writes to.
    """
    if "$" not in str(entry) and "`" not in str(entry):
        return False
    if key.path in OUTPUTS or key.type in (int, float, bool):
        return True
    return bool(key.options())


def _carry(draft: Draft, name: str, row: TableRow, value: Value, *, explicit: bool) -> None:
    """Carry one source key into the draft.

    Args:
        explicit: the recipe sets the key; otherwise the value is the framework's default, which
            changes no setting and needs no explanation.
    """
    if row.kind == "=":
        draft.not_needed[name] = row.note
        return
    try:
        settings = converted(row, value, draft.context())
    except NoCounterpartError as reason:
        if explicit:
            why = str(reason) or row.note or f"there is no {written(value)} here"
            draft.no_counterpart[name] = why
        return
    if settings is None:
        if explicit:
            draft.not_needed[name] = row.note or "our default"
        return
    for path, entry in settings.items():
        key = draft.keys.holder(path)
        if explicit and key and _needs_shell(entry, key):
            draft.no_counterpart[name] = "a shell fills it in: write it by hand"
            continue
        target = Target.read(path)
        draft.first_targets.setdefault(name, target.path)
        previous = draft.settings.get(target.path)
        if previous and not explicit and (previous.explicit or target.index is None):
            continue
        if target.index is None:
            draft.settings[path] = DraftSetting(entry, (name,), explicit)
        else:
            _carry_entry(draft, target, name, entry, explicit)


def _carry_entry(draft: Draft, target: Target, name: str, entry: Value, explicit: bool) -> None:
    """Set one entry of a list, such as one of AdamW's betas; the other entries stay."""
    assert target.index is not None
    current = draft.value(target.path)
    assert isinstance(current, list)
    entries = list(current)  # the default is shared: it is not changed in place
    if target.index < len(entries):
        entries[target.index] = entry
    sources: tuple[str, ...] = (name,)
    previous = draft.settings.get(target.path)
    if previous:
        sources = (*previous.sources, name)
        explicit = explicit or previous.explicit
    draft.settings[target.path] = DraftSetting(entries, sources, explicit)
