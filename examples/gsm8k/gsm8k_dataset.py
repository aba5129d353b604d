"""GSM8K as ``train.parquet`` and ``validation.parquet``, with SkyRL's columns.

Invariant: one row per question, in the source's order; a question whose solution has no final
number after ``####`` is an error and is not left out.

    python -m examples.gsm8k.gsm8k_dataset --output_dir ~/data/gsm8k                # from the hub
    python -m examples.gsm8k.gsm8k_dataset --output_dir ~/data/gsm8k --source DIR   # from files

Data: "Training Verifiers to Solve Math Word Problems" (Cobbe et al., 2021), MIT licence.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from skyasync.errors import UserError
from skyasync.rewards.answer_match import final_number

HUB_NAME = "openai/gsm8k"
SPLITS = {"train": "train", "validation": "test"}  # names of the files -> names at the source
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def prepare(output_dir: Path, source: Path | None = None) -> dict[str, Path]:
    """Write the parquet files; returns them by the name of their split.

    Args:
        source: folder with ``train.jsonl`` and ``test.jsonl`` (columns question, answer); None is
            the hub.

    Raises:
        UserError: if a file is missing in ``source``, or a solution has no final number.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    files = {}
    for split, source_split in SPLITS.items():
        questions = _load(source_split, source)
        rows = [to_row(question, split, index) for index, question in enumerate(questions)]
        files[split] = output_dir / f"{split}.parquet"
        Dataset.from_list(rows).to_parquet(files[split])
    return files


def to_row(question: dict[str, str], split: str, index: int) -> dict[str, Any]:
    """The row of a question: the prompt, the environment that rewards answers, the right answer."""
    truth = final_number(question["answer"])
    if truth is None:
        raise UserError(
            f"{split} row {index}: no number after '####' in the solution {question['answer']!r}"
        )
    return {
        "data_source": HUB_NAME,
        "prompt": [{"role": "user", "content": f"{question['question']} {INSTRUCTION}"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": truth},
        "extra_info": {
            "split": split,
            "index": index,
            "question": question["question"],
            "answer": question["answer"],
        },
    }


def _load(split: str, source: Path | None) -> Dataset:
    if source is None:
        return load_dataset(HUB_NAME, "main", split=split)
    file = source / f"{split}.jsonl"
    if not file.is_file():
        raise UserError(
            f"{file}: no such file; --source needs a folder with train.jsonl and test.jsonl"
        )
    return load_dataset("json", data_files=str(file), split="train")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write GSM8K as train.parquet and validation.parquet."
    )
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="folder for the parquet files"
    )
    parser.add_argument(
        "--source", type=Path, help="folder with train.jsonl and test.jsonl; without it, the hub"
    )
    args = parser.parse_args()
    try:
        for file in prepare(args.output_dir.expanduser(), args.source).values():
            print(file)
    except UserError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
