"""``python -m skyasync.interop`` prints ``docs/coming_from.md``: other systems' keys, and ours for them."""

from __future__ import annotations

from skyasync.interop.system import systems

_INTRODUCTION = """\
# Migrating settings

Settings of SkyRL, OpenRLHF, ROLL, AReaL, verl and TRL, and their counterparts. The tables describe the frameworks'
versions of 2026. Code is on [another page](bring_your_code.md). This page is generated from
`skyasync/interop/*/settings.tsv`, with `python -m skyasync.interop > docs/coming_from.md`.

## Translate a recipe

A whole recipe is a shell script, flags, YAML, or a program or notebook of TRL:

<!-- covered: tests/interop/test_translate.py -->
```bash
python -m skyasync translate run.sh > ours.yaml
python -m skyasync plan --config ours.yaml
```

Each line of the result names the original setting. Settings without a counterpart are listed below as comments. A
setting that the recipe omits has its framework's default.

Single settings are recognised everywhere: `python -m skyasync train.batch_size=1024` is an error that names the
counterpart. Check what a batch size counts: `trainer.train_batch_size` counts prompts, and other frameworks may count
responses.

## Notation

| notation | meaning |
|---|---|
| `{a,b}`, `*` | either a or b; any text |
| `a=b` | the framework's value `a` is skyasync's `b` |
| `a=~` | the framework's value `a` is skyasync's default |
| `a=-` | the framework's value `a` has no counterpart |
| not needed | handled without a setting |
"""


def markdown() -> str:
    """The page, ending in one newline."""
    lines = [_INTRODUCTION]
    for system in systems().values():
        lines += [f"## {system.title}", "", f"| {system.title} | skyasync | notes |", "|---|---|---|"]
        for row in system.table.rows:
            theirs = ", ".join(f"`{name}`" for name in row.spelled)
            ours = {"-": "none", "=": "not needed"}.get(row.kind) or ", ".join(
                f"`{target}`" if target.fixed is None else f"`{target}={target.fixed}`" for target in row.targets
            )
            aliases = " ".join(f"`{a}={b}`" for a, b in row.aliases.items())
            notes = "; ".join(filter(None, (row.note, aliases)))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (theirs, ours, notes)) + " |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
