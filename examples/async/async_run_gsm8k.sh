#!/usr/bin/env bash
# GRPO on GSM8K, one step off policy, on 8 GPUs: four train, four generate.
#
#   uv run examples/gsm8k/gsm8k_dataset.py --output_dir $HOME/data/gsm8k
#   bash examples/async/async_run_gsm8k.sh [key=value ...]
set -euo pipefail

: "${DATA_DIR:=$HOME/data/gsm8k}"
: "${NUM_GPUS_POLICY:=4}"
: "${NUM_ENGINES:=4}"
: "${MODEL:=Qwen/Qwen2.5-1.5B-Instruct}"
: "${LOGGER:=jsonl}" # or wandb: uv run --extra wandb ...

uv run --extra vllm -m examples.async.main_async \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  environment.env_class=gsm8k \
  trainer.policy.model.path="$MODEL" \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.use_kl_loss=true \
  trainer.placement.colocate_all=false \
  trainer.placement.colocate_policy_ref=true \
  trainer.placement.policy_num_gpus_per_node="$NUM_GPUS_POLICY" \
  trainer.epochs=20 \
  trainer.train_batch_size=1024 \
  trainer.policy_mini_batch_size=256 \
  trainer.micro_forward_batch_size_per_gpu=64 \
  trainer.micro_train_batch_size_per_gpu=64 \
  trainer.update_epochs_per_batch=1 \
  trainer.policy.optimizer_config.lr=1.0e-6 \
  trainer.max_prompt_length=512 \
  trainer.eval_batch_size=1024 \
  trainer.eval_before_train=true \
  trainer.eval_interval=5 \
  trainer.ckpt_interval=10 \
  trainer.logger="['$LOGGER']" \
  trainer.project_name=gsm8k_async \
  generator.backend=vllm \
  generator.num_inference_engines="$NUM_ENGINES" \
  generator.inference_engine_tensor_parallel_size=1 \
  generator.weight_sync_backend=nccl \
  generator.gpu_memory_utilization=0.8 \
  generator.n_samples_per_prompt=5 \
  generator.sampling_params.max_generate_length=1024 \
  "$@"
