"""Pages of the documentation, made from the tables of settings.

``python -m skyasync.interop`` prints all settings of other frameworks with their counterparts
(``docs/coming_from.md``). With a framework's name it prints its guide (``docs/migration/NAME.md``).
"""

from __future__ import annotations

import sys
from pathlib import Path

from skyasync.interop.system import System, TableRow, systems

PAGES = Path(__file__).parent / "pages"

#: The settings in a guide: those of nearly all recipes.
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
#: Framework -> the heading in ``docs/bring_your_code.md`` about its code, and a sentence about it.
_CODE = {
    "skyrl": (
        "skyrl-environments",
        "Environments need only changed imports: `from skyasync.interop.skyrl import ...`. "
        "The class of the tutorial on asynchronous training runs with `from skyasync import ...`.",
    ),
    "openrlhf": (
        "openrlhf-no-changes",
        "Reward files, remote reward models and agent files run unchanged.",
    ),
    "areal": ("areal", "Its documented forms of rewards and agents run unchanged."),
    "trl": ("trl-and-verl-reward-functions", "Reward functions run unchanged."),
    "verl": ("trl-and-verl-reward-functions", "Reward functions run unchanged."),
    "roll": ("roll", "The linked page has what runs, and what to convert by hand."),
}


def guide(system: System) -> str:
    """A page about moving from a framework, ending in one newline."""
    common = _COMMON.split()
    rows: dict[str, TableRow] = {}
    for row in system.table.rows:
        for target in row.targets:
            if target.path in common:
                rows.setdefault(target.path, row)
    lines = []
    for path in common:
        line = _line(rows[path]) if path in rows else ""
        if line and line not in lines:  # a row may have several of these settings
            lines.append(line)
    anchor, code = _CODE[system.name]
    template = (PAGES / "guide.md").read_text(encoding="utf-8")
    return template.format(
        name=system.name,
        title=system.title,
        rows="\n".join(lines),
        count=len(system.table.rows),
        code=code,
        anchor=f"#{anchor}",
    )


def markdown() -> str:
    """The page, ending in one newline."""
    lines = [(PAGES / "introduction.md").read_text(encoding="utf-8")]
    for system in systems().values():
        lines += [
            f"## {system.title}",
            "",
            f"| {system.title} | skyasync | notes |",
            "|---|---|---|",
        ]
        lines += map(_line, system.table.rows)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _line(row: TableRow) -> str:
    """A row of a settings table as one of a Markdown table."""
    source_names = ", ".join(f"`{name}`" for name in row.spelled)
    if row.kind == "-":
        settings = "none"
    elif row.kind == "=":
        settings = "not needed"
    else:
        spelled = []
        for target in row.targets:
            fixed = "" if target.fixed is None else f"={target.fixed}"
            spelled.append(f"`{target}{fixed}`")
        settings = ", ".join(spelled)
    aliases = [f"`{source}={target}`" for source, target in row.aliases.items()]
    notes = [row.note] if row.note else []
    if aliases:
        notes.append(" ".join(aliases))
    cells = []
    for cell in (source_names, settings, "; ".join(notes)):
        cells.append(cell.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        page = guide(systems()[sys.argv[1]])
    else:
        page = markdown()
    print(page, end="")
