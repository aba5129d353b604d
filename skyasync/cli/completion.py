"""Completion of the command in a shell: subcommands, options, keys group by group, and the values of a key.

The words come from the tables that the command itself reads (``SUBCOMMANDS`` and the schema), so that what is
completed is accepted. A shell asks ``skyasync complete SHELL LINE`` at each key press; nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from skyasync.cli.commands import LISTED, SUBCOMMANDS, Arguments
from skyasync.errors import UserError, unknown

if TYPE_CHECKING:
    from skyasync.config.keys import Key

# bash takes "=" and ":" for the end of a word; so what stands before the last one is cut off what it is given.
_BASH = """\
_skyasync() {
    local line="${COMP_LINE:0:COMP_POINT}" found cut
    local word="${line##*[[:space:]]}"
    mapfile -t found < <(skyasync complete bash "$line" 2>/dev/null)
    cut="${word%"${word##*[=:]}"}"
    COMPREPLY=("${found[@]#"$cut"}")
    [[ ${#found[@]} -eq 1 && "${found[0]}" == *[=./] ]] && compopt -o nospace
}
complete -o default -F _skyasync skyasync
"""
_ZSH = """\
#compdef skyasync
_skyasync() {
    local -a found open
    local word
    for word in "${(@f)$(skyasync complete zsh "${LBUFFER}" 2>/dev/null)}"; do
        [[ -z "$word" ]] && continue
        if [[ "$word" == *[=./] ]]; then open+=("$word"); else found+=("$word"); fi
    done
    (( ${#open} )) && compadd -S '' -- "${open[@]}"
    (( ${#found} )) && compadd -- "${found[@]}"
    (( ${#open} + ${#found} )) || _files
}
compdef _skyasync skyasync
"""
_FISH = """\
complete -c skyasync -f -a '(skyasync complete fish (commandline -cp))'
complete -c skyasync -n '__fish_prev_arg_in --config --out --model --of' -F
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

HELP = """\
usage: skyasync completion bash|zsh|fish

Prints shell code that completes subcommands, options, settings (trainer.al<Tab>) and their values (trainer.plan=<Tab>):

    source <(skyasync completion bash)                                  in ~/.bashrc
    source <(skyasync completion zsh)                                   in ~/.zshrc, after compinit
    skyasync completion fish > ~/.config/fish/completions/skyasync.fish
"""


def completion(argv: Arguments) -> int | None:
    """Print a shell's script."""
    if not argv or argv[0] in ("--help", "-h"):
        print(HELP, end="")
        return None
    if argv[0] not in SCRIPTS or len(argv) > 1:
        raise UserError(unknown("shell", " ".join(argv), SCRIPTS))
    print(SCRIPTS[argv[0]], end="")
    return None


def complete(argv: Arguments) -> None:
    """Print what may stand where a line ends, one word a line: ``complete SHELL LINE``."""
    if len(argv) == 2 and argv[0] in SCRIPTS:
        for word in candidates(argv[1]):
            print(word)


def candidates(line: str) -> list[str]:
    """The words that may stand at the end of ``line``, which begins with the command's name."""
    *before, current = line.split(" ")
    words = [word for word in before[1:] if word]
    subcommand = SUBCOMMANDS.get(words[0]) if words else None
    if subcommand is None and words and "=" not in words[0] and not words[0].startswith("-"):
        return []
    if words[:1] == ["completion"]:
        return _beginning(SCRIPTS, current)
    if words and words[-1] in ("--help", "-h"):
        return _groups(current)
    known = subcommand or SUBCOMMANDS["train"]
    found = [] if words else _beginning(LISTED, current)
    if current.startswith("-"):
        found += _beginning([option for option in known.options if option not in words], current)
    elif known.settings and (current or not known.runs):
        found += _settings(current) or ([] if found else _by_name(current))
    if known.runs:
        found += _runs(current)
    return found


def _beginning(words: Iterable[str], current: str) -> list[str]:
    return [word for word in words if word.startswith(current)]


def _settings(current: str) -> list[str]:
    """Keys, group by group; after ``=`` the possible values, if they are few."""
    from skyasync.config.keys import Keys
    from skyasync.config.schema import Config

    keys = Keys.of(Config)
    path, equals, text = current.partition("=")
    if equals:
        values = _values(keys[path]) if path in keys else []
        return [f"{path}={value}" for value in values if value.startswith(text)]
    group = path.rpartition(".")[0]
    found = [f"{name}." for name in keys.groups if name.rpartition(".")[0] == group and name.startswith(path)]
    return found + [f"{key.path}=" for key in keys if key.group == group and key.path.startswith(path)]


def _by_name(current: str) -> list[str]:
    """Keys whose own name begins so, wherever they live."""
    from skyasync.config.keys import Keys
    from skyasync.config.schema import Config

    if not current or "." in current or "=" in current:
        return []
    return [f"{key.path}=" for key in Keys.of(Config) if key.name.startswith(current)]


def _values(key: Key) -> list[str]:
    from skyasync.config.values import written

    try:
        options = [written(value) for value in key.options()]
    except UserError:  # completion does not fail because a part is broken
        options = [written(value) for value in key.choices]
    return options or (["true", "false"] if key.type is bool else [])


def _groups(current: str) -> list[str]:
    from skyasync.config.keys import Keys
    from skyasync.config.schema import Config

    keys = Keys.of(Config)
    return [name for name in [*keys.groups, *keys.by_path] if name.startswith(current)]


def _runs(current: str) -> list[str]:
    """Folders of runs, below ``runs`` or wherever the word leads."""
    at = Path(current)
    parent = at if current.endswith("/") else at.parent
    if not current:
        parent = Path("runs")
    if not parent.is_dir():
        return []
    found = [path for path in sorted(parent.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return [text for path in found if (text := str(path)).startswith(current)]
