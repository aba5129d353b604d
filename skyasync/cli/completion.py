"""Completion of the command in a shell: subcommands, options, keys group by group, and the values of a key.

The words come from the tables that the command itself reads (``SUBCOMMANDS`` and the schema), so that every completed
word is accepted. A shell calls ``skyasync complete SHELL LINE`` at each key press; nothing heavy is imported.
"""

from __future__ import annotations

from pathlib import Path

from skyasync.cli.commands import LISTED, SUBCOMMANDS, Arguments
from skyasync.errors import UserError, unknown

# bash takes "=" and ":" for the end of a word, so everything before the last one is cut off the answers.
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


def completion(argv: Arguments) -> None:
    """Print a shell's script."""
    if not argv:
        print(HELP, end="")
        return
    if argv[0] not in SCRIPTS or len(argv) > 1:
        raise UserError(unknown("shell", " ".join(argv), SCRIPTS))
    print(SCRIPTS[argv[0]], end="")


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
        return [shell for shell in SCRIPTS if shell.startswith(current)]
    if words and words[-1] in ("--help", "-h"):
        from skyasync.config.keys import Keys
        from skyasync.config.schema import Config

        keys = Keys.of(Config)
        return [name for name in [*keys.groups, *keys.by_path] if name.startswith(current)]
    known = subcommand or SUBCOMMANDS["train"]
    matches = [] if words else [name for name in LISTED if name.startswith(current)]
    if current.startswith("-"):
        matches += [option for option in known.options if option not in words and option.startswith(current)]
    elif known.settings and (current or not known.runs):
        matches += _settings(current, by_name=not matches)
    if known.runs:  # folders of runs, below ``runs`` or in the folder of the word
        folder = Path(current) if current.endswith("/") else Path(current).parent if current else Path("runs")
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        folders = [str(path) for path in paths if path.is_dir() and not path.name.startswith(".")]
        matches += [path for path in folders if path.startswith(current)]
    return matches


def _settings(current: str, *, by_name: bool) -> list[str]:
    """Keys, group by group; after ``=`` the possible values, if they are few.

    Args:
        by_name: a word that begins no group or key may begin a key's own name, in any group.
    """
    from skyasync.config.keys import Keys
    from skyasync.config.schema import Config
    from skyasync.config.values import written

    keys = Keys.of(Config)
    path, equals, text = current.partition("=")
    if equals:
        if path not in keys:
            return []
        key = keys[path]
        try:
            options = list(key.options())
        except UserError:  # completion does not fail because a part is broken
            options = list(key.choices)
        values = [written(value) for value in options] or (["true", "false"] if key.type is bool else [])
        return [f"{path}={value}" for value in values if value.startswith(text)]
    group = path.rpartition(".")[0]
    matches = [f"{name}." for name in keys.groups if name.rpartition(".")[0] == group and name.startswith(path)]
    matches += [f"{key.path}=" for key in keys if key.group == group and key.path.startswith(path)]
    if not matches and by_name and path and "." not in path:
        return [f"{key.path}=" for key in keys if key.name.startswith(path)]
    return matches
