"""Published recipes of other frameworks, translated and rehearsed: which run, and what stops the
others.

    python -m benchmarks.rehearse --root FOLDER recipe.sh other/recipe.yaml ...

FOLDER holds copies of the frameworks' repositories, one folder each (``verl``, ``trl``, ``skyrl``,
``openrlhf``, ``areal``, ``roll``); the recipes are named relative to it. Each is translated by
``skyasync translate``, and ``skyasync rehearse`` runs the result in a process of its own. What only
a hub has is replaced by a stand-in: a model by a configuration of its family with its vocabulary, a
data set by a few rows with the columns of that framework's data, and a reward that is a class of
the framework by a function. Prints a Markdown table. CPU seconds are those of all the processes
that a rehearsal starts, read twice per second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml
from transformers import AutoConfig

from skyasync.config import load_config
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.examples.tiny.model import Recipe
from skyasync.interop.recipe import detect, read_recipe
from skyasync.interop.translation import translated
from skyasync.rewards.settings import judges

#: A part of a model's name, in the order in which they are looked for, and its family, vocabulary and sizes.
FAMILIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        r"qwen3.*a\d+b",
        "qwen3_moe",
        {"vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    (
        r"qwen1.5-moe",
        "qwen2_moe",
        {"vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4},
    ),
    (r"qwen3", "qwen3", {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 262144}),
    (r"qwen|deepseek-r1-distill|searchr1", "qwen2", {"vocab_size": 152064}),
    (r"gemma", "gemma2", {"vocab_size": 256000, "head_dim": 256}),
    (r"mistral", "mistral", {"vocab_size": 32000}),
    (r"", "llama", {"vocab_size": 128256}),
)
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% if enable_thinking %}{% endif %}"
)
QUESTION = "Natalia sold {n} clips in April and half as many in May. How many clips did she sell altogether?"
REWARD = "def reward(response):\n    return float(any(letter.isdigit() for letter in response))\n"


def row(system: str, index: int, cfg: Config) -> dict[str, Any]:
    """A row with the columns of a framework's data for mathematics."""
    number = 4 * index + 8
    question = QUESTION.format(n=number)
    answer = str(number * 3 // 2)
    messages = [{"role": "user", "content": question}]
    usual: dict[str, dict[str, Any]] = {
        "verl": {
            "data_source": "openai/gsm8k",
            "prompt": messages,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {
                "split": "train",
                "index": index,
                "answer": f"#### {answer}",
                "question": question,
            },
        },
        "skyrl": {
            "data_source": "openai/gsm8k",
            "prompt": messages,
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": answer},
            "extra_info": {
                "split": "train",
                "index": index,
                "answer": f"#### {answer}",
                "question": question,
            },
        },
        "openrlhf": {"label": answer, "answer": answer},
        "areal": {"question": question, "answer": f"Half of it is {number // 2}.\n#### {answer}"},
        "roll": {
            "id": str(index),
            "source": "gsm8k",
            "difficulty": 0,
            "prompt": question,
            "messages": json.dumps(messages),
            "ground_truth": answer,
            "case_type": "",
            "test_case_function": "",
            "test_cases": "",
            "tag": "gsm8k",
        },
        "trl": {
            "prompt": messages,
            "problem": question,
            "solution": f"${answer}$",
            "answer": answer,
        },
    }
    columns = usual[system]
    domains = list(cfg.environment.domains)
    if domains:  # ROLL derives them from its tags
        columns[cfg.data.domain_key] = domains[index % len(domains)]
    if system == "openrlhf":  # its recipes name their columns
        if "messages" in cfg.data.prompt_key:
            columns[cfg.data.prompt_key] = messages
        else:
            columns[cfg.data.prompt_key] = question
        columns[cfg.data.label_key] = answer
    return columns


def stand_in_model(name: str, folder: Path, *, reward: bool) -> str:
    """The folder of a configuration of the same family, without weights."""
    family, sizes = next((f, sizes) for part, f, sizes in FAMILIES if re.search(part, name.lower()))
    target = folder / (f"{family}-reward" if reward else family)
    if not target.exists():
        tokenizer = Recipe().make_tokenizer()
        tokenizer.chat_template = TOOLS + str(tokenizer.chat_template)
        tokenizer.save_pretrained(target)
        ends = {
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        }
        config = AutoConfig.for_model(family, **(SHAPE | sizes | ends))
        if reward:
            config.num_labels = 1
            config.architectures = [f"{family.title()}ForSequenceClassification"]
        config.save_pretrained(target)
    return str(target)


def stand_ins(cfg: Config, system: str, root: Path, folder: Path) -> dict[str, object]:
    """The settings that name what only a hub or another file system has -> what stands in."""
    changed: dict[str, object] = {}
    trainer = cfg.trainer
    for key in ("policy", "ref", "critic", "teacher", "reward"):
        path = getattr(trainer, key).model.path
        if path and not Path(path).is_dir():
            changed[f"trainer.{key}.model.path"] = stand_in_model(
                path, folder, reward=key == "reward"
            )
    for name, entry in trainer.reward.models.items():
        changed[f"trainer.reward.models.{name}.path"] = stand_in_model(
            entry["path"], folder, reward=True
        )
    rows = folder / f"{system}.jsonl"
    rows.write_text("".join(json.dumps(row(system, index, cfg)) + "\n" for index in range(64)))
    for key in ("train_data", "val_data"):
        if vars(cfg.data)[key]:
            changed[f"data.{key}"] = [str(rows)]
    if not cfg.data.train_data:
        changed["data.train_data"] = [str(rows)]
    if cfg.data.val_sets:
        changed["data.val_sets"] = {}
    program = cfg.generator.agent_program or cfg.generator.agent_func_path
    if cfg.generator.agent_func_path:  # relative to the repository
        changed["generator.agent_func_path"] = str(root / cfg.generator.agent_func_path)
    functions = [name.replace("/openrlhf/", f"{root}/") for name in cfg.environment.reward_funcs]
    if functions != cfg.environment.reward_funcs:  # its container's folder
        changed["environment.reward_funcs"] = functions
    rewarded = cfg.environment.env_class or judges(cfg.environment) or program
    if not rewarded and "env_class" not in row(system, 0, cfg):
        (folder / "reward.py").write_text(REWARD)
        changed |= {
            "environment.env_class": "reward",
            "environment.reward_funcs": [f"{folder}/reward.py:reward"],
        }
    return changed


def rehearsed(
    root: Path, recipe: Path, folder: Path, limit: float
) -> tuple[str, float, float, str]:
    """Result, wall seconds, CPU seconds, and what is a stand-in besides models and data."""
    source = read_recipe([str(recipe)])
    system = detect(source)
    ours = folder / "ours.yaml"
    ours.write_text(translated(source, system))
    cfg = load_config(["--config", str(ours)])
    changed = stand_ins(cfg, system, root / system, folder)
    words = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).strip()}"
        for key, value in changed.items()
    ]
    words = [word.removesuffix("\n...") for word in words]
    command = [sys.executable, "-m", "skyasync", "rehearse", "--config", str(ours), *words]
    began = time.monotonic()
    cpu = {}
    with (folder / "out.txt").open("w") as out:
        process = psutil.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=recipe.parent,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        while process.poll() is None and time.monotonic() - began < limit:
            with contextlib.suppress(psutil.Error):
                for each in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        times = each.cpu_times()
                        cpu[each.pid] = times.user + times.system
            time.sleep(0.5)
        late = process.poll() is None
        if late:
            for each in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.Error):
                    each.kill()
        status = process.wait()
    lines = (folder / "out.txt").read_text().splitlines()
    error = next(
        (line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else ""
    )
    if late:
        result = f"longer than {limit:.0f} s"
    elif status == 0:
        result = "runs"
    else:
        result = error
    others = "reward" if "environment.reward_funcs" in changed else ""
    return result, time.monotonic() - began, sum(cpu.values()), others


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rehearse", description="Rehearse published recipes."
    )
    parser.add_argument("recipes", nargs="+", help="files, relative to --root")
    parser.add_argument("--root", default=".", help="the folder of the frameworks' repositories")
    parser.add_argument(
        "--limit", type=float, default=180, help="seconds for each (default %(default)s)"
    )
    parser.add_argument(
        "--keep", help="a folder for translations and outputs (default: a temporary one)"
    )
    args = parser.parse_args()
    root = Path(args.root).resolve()
    print("| recipe | s | CPU s | result |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for number, name in enumerate(args.recipes):
            folder = Path(args.keep or temporary) / f"{number:02}-{Path(name).stem}"
            folder.mkdir(parents=True, exist_ok=True)
            try:
                result, wall, cpu, others = rehearsed(
                    root, root / name, folder.resolve(), args.limit
                )
            except UserError as error:
                result = str(error)
                wall = 0.0
                cpu = 0.0
                others = ""
            note = f" (own {others})" if others else ""
            print(f"| `{name}` | {wall:.0f} | {cpu:.0f} | {result}{note} |", flush=True)


if __name__ == "__main__":
    main()
