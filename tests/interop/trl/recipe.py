"""A program of TRL, parsed by a test and never run."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

MODEL = "acme/small-chat"


def brevity(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


train = load_dataset("acme/sums", "hard", split="train")
args = GRPOConfig(
    output_dir="out",
    learning_rate=3e-6,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=6,
    per_device_train_batch_size=6,
    gradient_accumulation_steps=4,
    num_generations=6,
    max_completion_length=350,
    beta=0.02,
    epsilon=0.2,
    epsilon_high=0.28,
    loss_type="grpo",
    scale_rewards=False,
    mask_truncated_completions=True,
    use_vllm=True,
    vllm_mode="server",
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.5,
    use_liger_kernel=True,
    save_steps=40,
    report_to="wandb",
    bf16=True,
)
trainer = GRPOTrainer(model=MODEL, reward_funcs=[brevity], args=args, train_dataset=train)
trainer.train()
