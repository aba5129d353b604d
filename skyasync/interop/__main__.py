"""``python -m skyasync.interop`` prints ``docs/coming_from.md``: other systems' keys, and ours for them."""

from __future__ import annotations

from skyasync.interop.system import systems

_INTRODUCTION = """\
# Coming from another library

This page is made by `python -m skyasync.interop > docs/coming_from.md` from the tables in
`skyasync/interop/*/settings.tsv`, which hold what the systems' own definitions of their arguments said in 2026.

A whole recipe (a shell script, flags, YAML, or a program or notebook of TRL) is translated by

<!-- covered: tests/interop/test_translate.py -->
```bash
python -m skyasync translate run.sh > ours.yaml
python -m skyasync plan --config ours.yaml
```

The result loads; each line says which key it came from, and keys without a counterpart stand below it as comments. A
key that a system leaves out has that system's default. Single keys and values are answered wherever they are met:
`python -m skyasync train.batch_size=1024` says what to write instead.

In the tables: `{a,b}` is either, `*` is anything, `a=b` is our value `b` for their `a`; `a=~` leaves ours at its
default, `a=-` has no counterpart.
"""


def markdown() -> str:
    """The page, ending in one newline."""
    lines = [_INTRODUCTION]
    for system in systems().values():
        lines += [f"## {system.title}", "", "| theirs | ours | |", "|---|---|---|"]
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
