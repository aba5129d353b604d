"""Pages of the documentation: ``python -m skyasync.interop`` prints all settings of other frameworks with their
counterparts (``docs/coming_from.md``), and with a framework's name its guide (``docs/migration/NAME.md``)."""

from __future__ import annotations

import sys

from skyasync.interop.system import System, TableRow, systems

_INTRODUCTION = """\
# Migrating settings

Settings of SkyRL, OpenRLHF, ROLL, AReaL, verl and TRL, and their counterparts. The tables describe the frameworks'
versions of 2026. Code is on [another page](bring_your_code.md). This page is generated from
`skyasync/interop/*/settings.tsv`, with `python -m skyasync.interop > docs/coming_from.md`.

## Translate a recipe

A whole recipe is a shell script, flags, YAML, or a program or notebook of TRL:

<!-- covered: tests/interop/test_translate.py -->
```bash
skyasync translate run.sh > ours.yaml
skyasync plan --config ours.yaml
```

Each line of the result names the original setting. Settings without a counterpart are listed below as comments. A
setting that the recipe omits has its framework's default.

Single settings are recognised everywhere: `skyasync train.batch_size=1024` is an error that names the
counterpart. Check what a batch size counts: `trainer.train_batch_size` counts prompts, and other frameworks may count
responses.

Guides of one page: [SkyRL](migration/skyrl.md), [OpenRLHF](migration/openrlhf.md), [ROLL](migration/roll.md),
[AReaL](migration/areal.md), [verl](migration/verl.md), [TRL](migration/trl.md).

## Notation

| notation | meaning |
|---|---|
| `{a,b}`, `*` | either a or b; any text |
| `a=b` | the framework's value `a` is skyasync's `b` |
| `a=~` | the framework's value `a` is skyasync's default |
| `a=-` | the framework's value `a` has no counterpart |
| not needed | handled without a setting |
"""


#: Of a guide: what nearly every recipe sets.
_COMMON = """
trainer.policy.model.path data.train_data data.val_data environment.reward_funcs environment.env_class
trainer.train_batch_size generator.n_samples_per_prompt trainer.policy_mini_batch_size trainer.epochs
trainer.max_training_steps trainer.policy.optimizer_config.lr trainer.max_prompt_length
generator.sampling_params.max_generate_length generator.sampling_params.temperature
trainer.algorithm.advantage_estimator trainer.algorithm.policy_loss_type trainer.algorithm.eps_clip_low
trainer.algorithm.eps_clip_high trainer.algorithm.use_kl_loss trainer.algorithm.kl_loss_coef
trainer.algorithm.off_policy_correction trainer.plan trainer.max_staleness generator.num_inference_engines
generator.inference_engine_tensor_parallel_size generator.gpu_memory_utilization trainer.placement.colocate_all
trainer.ckpt_interval trainer.eval_interval trainer.logger trainer.policy.lora.rank
"""
_CODE = {
    "skyrl": (
        "skyrl-changed-imports",
        "Environments, generators, losses, estimators, callbacks and trainers need only "
        "changed imports: `from skyasync.interop.skyrl import ...`.",
    ),
    "openrlhf": ("openrlhf-no-changes", "Reward files, remote reward models and agent files run unchanged."),
    "areal": ("areal-no-changes", "Its documented forms of rewards and agents run unchanged."),
    "trl": ("trl-and-verl-reward-functions", "Reward functions run unchanged."),
    "verl": ("trl-and-verl-reward-functions", "Reward functions run unchanged."),
    "roll": ("roll", "The linked page has what runs, and what to convert by hand."),
}
_GUIDE = """\
# Migrating from {title}

This page is generated with `python -m skyasync.interop {name} > docs/migration/{name}.md`.

## Steps

1. Convert the recipe. Each line of the result names the original setting, and settings without a counterpart are
   listed below as comments.
2. Estimate memory and devices. Nothing is started.
3. Play a few prompts, and read what the model reads and how it is rewarded.
4. Train.

<!-- covered: tests/interop/test_translate.py -->
```bash
skyasync translate --from {name} run.sh > ours.yaml
skyasync plan --config ours.yaml
skyasync rollout --config ours.yaml
skyasync --config ours.yaml
```

A single setting of {title} on the command line is an error that names its counterpart.

## Common settings

| {title} | skyasync | notes |
|---|---|---|
{rows}

The full table has {count} rows: [all settings](../coming_from.md#{name}).

## Differences

- `trainer.train_batch_size` counts prompts, each with `generator.n_samples_per_prompt` samples. Check what a batch size
  of {title} counts.
- How generation and training overlap is one setting, `trainer.plan`. Begin with `sync`, then read
  [which plan](../which_plan.md).
- Asynchronous plans correct stale samples by default ([formulas](../staleness.md)). To train without a correction needs
  `trainer.allow_uncorrected=true`.
- A setting that has no effect is an error, and so is a wrong name or type, before anything starts.

## Code

{code} See [migrating code](../bring_your_code.md{anchor}).
"""


def guide(system: System) -> str:
    """A page about moving from a framework, ending in one newline."""
    rows: dict[str, TableRow] = {}
    common = _COMMON.split()
    for row in system.table.rows:
        for target in row.targets:
            if target.path in common:
                rows.setdefault(target.path, row)
    anchor, code = _CODE[system.name]
    shown = dict.fromkeys(_line(rows[path]) for path in common if path in rows)
    return _GUIDE.format(
        name=system.name,
        title=system.title,
        rows="\n".join(shown),
        count=len(system.table.rows),
        code=code,
        anchor=anchor and f"#{anchor}",
    )


def markdown() -> str:
    """The page, ending in one newline."""
    lines = [_INTRODUCTION]
    for system in systems().values():
        lines += [f"## {system.title}", "", f"| {system.title} | skyasync | notes |", "|---|---|---|"]
        lines += map(_line, system.table.rows)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _line(row: TableRow) -> str:
    """A row as one of a table."""
    theirs = ", ".join(f"`{name}`" for name in row.spelled)
    ours = {"-": "none", "=": "not needed"}.get(row.kind) or ", ".join(
        f"`{target}`" if target.fixed is None else f"`{target}={target.fixed}`" for target in row.targets
    )
    aliases = " ".join(f"`{a}={b}`" for a, b in row.aliases.items())
    notes = "; ".join(filter(None, (row.note, aliases)))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (theirs, ours, notes)) + " |"


if __name__ == "__main__":
    print(guide(systems()[sys.argv[1]]) if len(sys.argv) > 1 else markdown(), end="")
