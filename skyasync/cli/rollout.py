"""``skyasync rollout``: episodes of some prompts, printed; nothing is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyasync.cli.commands import Arguments, take_options, visible, whole_number

if TYPE_CHECKING:
    from skyasync.rollout.tokenizer import Tokenizer
    from skyasync.rollout.types import Group, Trajectory

HELP = """\
usage: skyasync rollout [--prompts N] [--samples N] [--held-out] [--show-prompts] [--json] [key=value ...]

Generates episodes of the first prompts with the run's engine and environments. Prints rewards, stop reasons and texts.
Nothing is trained, and no run folder is made.

--prompts N     number of prompts (4)
--samples N     samples per prompt
--held-out      prompts of data.val_data, with the sampling of evaluation
--show-prompts  print the prompts as the model reads them; starts nothing
--json          one episode per line
"""
PROMPTS = 4  # enough to see the format, few enough to read


def rollout(argv: Arguments) -> None:
    """Generate episodes and print them, or only print the prompts."""
    flags = ("--held-out", "--show-prompts", "--json")
    options, rest = take_options(argv, {"--prompts": "4", "--samples": "8"}, flags, settings=True)
    from skyasync.cli.rollout_experiment import RolloutExperiment
    from skyasync.cli.train import configuration, run_or_exit

    evaluation = "--held-out" in options
    if "--samples" in options:
        samples = whole_number(options["--samples"], "--samples")
        name = "eval_n_samples_per_prompt" if evaluation else "n_samples_per_prompt"
        rest.append(f"generator.{name}={samples}")
    experiment = RolloutExperiment(configuration(rest), evaluation=evaluation)
    count = whole_number(options.get("--prompts", str(PROMPTS)), "--prompts")
    prompts = experiment.prompts(count)
    tokenizer = experiment.get_tokenizer()
    if "--show-prompts" in options:  # without engines
        from rich.console import Console
        from rich.text import Text

        from skyasync.rollout.chat import ChatTokenizer

        console = Console(highlight=False)
        chat = ChatTokenizer(tokenizer, experiment.cfg.data.apply_chat_template)
        for prompt in prompts:
            tokens = chat.prompt(prompt.messages).tolist()
            console.print(
                Text(f"{prompt.id}  {prompt.env_class}  {len(tokens)} tokens", style="bold")
            )
            console.print(Text(visible(tokenizer.decode(tokens)), style="cyan"))
            for name, value in prompt.extras.items():
                console.print(Text(visible(f"  {name}: {str(value)[:200]}"), style="dim"))
            console.print()
        return
    groups = run_or_exit(experiment, lambda: experiment.play(prompts))
    # Printed at the end, so that engines' messages do not stand between episodes.
    if "--json" not in options:
        _show(groups, tokenizer)
        return
    for group in groups:
        for trajectory in group.trajectories:
            print(json.dumps(record(group, trajectory, tokenizer), default=str))


def record(group: Group, trajectory: Trajectory, tokenizer: Tokenizer) -> dict[str, object]:
    """An episode as JSON for programs, with texts instead of tokens."""
    segments = []
    for segment in trajectory.segments:
        text = tokenizer.decode(segment.tokens.tolist())
        segments.append({"kind": segment.kind, "text": text})
    return {
        "id": str(trajectory.id),
        "messages": group.prompt.messages,
        "segments": segments,
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "response_length": trajectory.response_length,
        "metrics": trajectory.metrics,
    }


def _show(groups: Sequence[Group], tokenizer: Tokenizer) -> None:
    """Print episodes and their metrics."""
    from rich.console import Console
    from rich.text import Text

    from skyasync.rollout.metrics import rollout_metrics

    console = Console(highlight=False)
    for group in groups:
        rewards = ", ".join(f"{reward:.3g}" for reward in group.rewards)
        console.print(Text(f"{group.prompt.id}  rewards {rewards}", style="bold"))
        prompt = ""
        for segment in group.trajectories[0].segments:  # the prompt is that of all
            if segment.kind == "prompt":
                prompt += tokenizer.decode(segment.tokens.tolist())
        console.print(Text(visible(prompt), style="dim"))
        for trajectory in group.trajectories:
            reason = trajectory.stop_reason
            end = {"stop": "", "length": ", cut by its length"}.get(reason, f", {reason}")
            head = f"  r{trajectory.id.repetition}: reward {trajectory.reward:.3g}, {trajectory.response_length} tokens"
            console.print(Text(head + end, style="green" if trajectory.reward > 0 else "yellow"))
            for segment in trajectory.segments[1:]:
                style = "" if segment.kind == "action" else "magenta"
                text = tokenizer.decode(segment.tokens.tolist())
                console.print(Text(visible(text), style=style))
        console.print()
    for name, value in rollout_metrics(groups).items():
        console.print(f"{name:<28} {value:.4g}")
