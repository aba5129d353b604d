"""``python -m skyasync.config`` prints ``docs/configuration.md``: all keys."""

from __future__ import annotations

import re

from skyasync.config.command_line import meaning
from skyasync.config.keys import MISSING, Keys
from skyasync.config.schema import Config
from skyasync.config.values import type_name, written
from skyasync.other_frameworks import other_frameworks

_INTRODUCTION = """\
# Configuration

Every program takes the same arguments:

```text
skyasync [--config FILE.yaml ...] [--help [GROUP]] [key=value ...]
```

- Settings are layered: defaults, then a preset, then `--config` files in the order given, then `key=value`; later
  values override earlier ones, and a key that is repeated on the command line prints a notice.
- Values are typed: `1e-6`, `true`, `null`, `[a,b]`, `{size: 4}`, `"quoted text"`. Text needs no quotes unless it
  starts with a quote or bracket, or is `null`. A single string is accepted for a list of strings:
  `data.train_data=train.parquet`.
- A new list or mapping replaces the old one completely; `environment.env_config.size=4` sets one entry of a mapping.
- `${trainer.seed}` refers to another key (OmegaConf's syntax); a literal `${` is written `\\${`.
- Unknown keys, wrong types, values out of bounds and contradictions are rejected before anything is loaded, one
  line each with the nearest right key, and exit status 2.
- Evaluation samples as training does, with the entries of `generator.eval_sampling_params` instead. It is greedy
  unless they have a temperature: with several samples per prompt set one above 0, or `null` for that of training.
- A run writes its resolved configuration; `--config` on that file repeats it.
- After the experiment's `prepare()` the configuration is read-only: changing it is an error that names the key. Copies
  (`copy.deepcopy`, `dataclasses.replace`) can be changed.

To add settings of your own, subclass the dataclasses and pass the class as `schema`:

```python
from dataclasses import dataclass, field

from skyasync.config import Config, key, load_config


@dataclass
class MyGroup:
    strength: float = key(0.5, "How much of it.", low=0.0)


@dataclass
class MyConfig(Config):
    mine: MyGroup = field(default_factory=MyGroup)


cfg = load_config(["mine.strength=0.7"], schema=MyConfig)
```
"""


def markdown(keys: Keys) -> str:
    """The page, ending in one newline."""
    lines = [_INTRODUCTION]
    for group in keys.groups:
        members = [key for key in keys if key.group == group]
        if members:
            lines += [
                "",
                f"## `{group}`",
                "",
                "| key | type | default | meaning |",
                "|---|---|---|---|",
            ]
        for key in members:
            if key.default == MISSING:
                default = "required"
            else:
                default = written(key.default)
            cells = (f"`{key.name}`", type_name(key.type), f"`{default}`", meaning(key))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    *other_titles, last_title = other_frameworks().titles()
    lines += [
        "",
        "## Coming from another library",
        "",
        f"Keys and values of {', '.join(other_titles)} and {last_title} are recognised and answered with ours: see",
        "[coming_from.md](coming_from.md). `skyasync translate run.sh` turns a whole recipe into ours.",
        "",
        "<!-- python -m skyasync.config > docs/configuration.md -->",
    ]
    return linked("\n".join(lines) + "\n")


def linked(page: str) -> str:
    """The page with links in place of the files that help texts name: ``(docs/judges.md)``."""
    return re.sub(r"\bdocs/([\w/]+)\.md(?=\))", r"[\1](\1.md)", page)


if __name__ == "__main__":
    print(markdown(Keys.of(Config)), end="")
