#!/bin/bash
set -x
HERE="$(dirname "$0")"
MODEL="acme/small-chat"
OUT=/data/runs/one
N=12

CKPT=(
   --actor.model_name_or_path ${MODEL}
   # --reward.model_name_or_path nothing
   --ckpt.path "${OUT}/ckpt"
   --ckpt.output_dir ${OUT}/final
   --ckpt.save_steps 25
   --ckpt.max_num 5
   --ckpt.load_enable
)
ROLLOUT=(
   --reward.remote_url /data/rewards/judge.py
   --data.prompt_dataset acme/sums
   --data.prompt_split hard
   --data.input_key question
   --data.label_key answer
   --data.apply_chat_template
   --data.max_len 3072
   --rollout.max_new_tokens 2048
   --rollout.batch_size 96
   --rollout.n_samples_per_prompt $N
   --rollout.temperature 0.9
   --train.batch_size $((N * 24))
   --train.max_epochs 2
   --train.num_episodes 3
   --train.micro_batch_size 2
   --rollout.micro_batch_size 4
   --algo.dynamic_filtering_enable
   --algo.dynamic_filtering_range 0.1 0.9
)
ray job submit --address="http://127.0.0.1:8265" \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   ${CKPT[@]} "${ROLLOUT[@]}" \
   --train.async_enable \
   --train.partial_rollout_enable \
   --actor.num_gpus_per_node 2 \
   --critic.num_gpus_per_node 2 \
   --vllm.num_engines 3 \
   --vllm.tensor_parallel_size 2 \
   --vllm.enforce_eager \
   --ds.zero_stage 3 \
   --ds.param_dtype bf16 \
   --ds.ring_attn_size 2 \
   --actor.adam.lr 4e-7 \
   --actor.eps_clip_low_high 0.2 0.3 \
   --actor.lr_warmup_ratio 0.05 \
   --algo.advantage.estimator reinforce_baseline \
   --algo.advantage.is_correction_enable \
   --algo.advantage.is_correction_type icepop \
   --algo.advantage.is_correction_threshold 0.4 4.0 \
   --algo.kl.init_coef 2e-3 --algo.kl.use_loss --algo.kl.estimator k2 \
   --logger.wandb.key ${WANDB_TOKEN} --logger.wandb.project sums \
   --eval.steps -1 --quux.zorp 7
