set -x
: "${DATA_DIR:="/data/sums"}"
: "${GPUS:=2}"
: "${STALENESS:=3}"
BATCH=48

uv run --isolated --extra fsdp -m examples.train.fully_async.main_fully_async \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.fully_async.enabled=true \
  trainer.fully_async.max_staleness_steps=${STALENESS} \
  trainer.fully_async.num_parallel_generation_workers=$(( BATCH * (STALENESS + 1) )) \
  trainer.algorithm.policy_loss_type="regular" \
  trainer.algorithm.off_policy_correction.tis_ratio_type=sequence \
  trainer.algorithm.off_policy_correction.sequence_tis_ratio_clip_high=4.0 \
  trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high=50.0 \
  trainer.algorithm.use_kl_loss=false \
  trainer.policy.model.path="acme/small-chat" \
  trainer.policy.model.lora.rank=16 \
  trainer.policy.optimizer_config.scheduler=constant_with_warmup \
  trainer.policy.optimizer_config.num_warmup_steps=7 \
  trainer.placement.colocate_all=false \
  trainer.placement.policy_num_gpus_per_node=$GPUS \
  trainer.placement.critic_num_gpus_per_node=$GPUS \
  trainer.strategy=fsdp \
  trainer.train_batch_size=$BATCH \
  trainer.policy_mini_batch_size=24 \
  trainer.micro_train_batch_size_per_gpu=4 \
  trainer.max_ckpts_to_keep=-1 \
  trainer.flash_attn=true \
  trainer.resume_mode=null \
  trainer.logger="console" \
  generator.inference_engine.num_engines=$GPUS \
  generator.inference_engine.backend=vllm \
  generator.inference_engine.enforce_eager=true \
  generator.n_samples_per_prompt=6 \
  generator.sampling_params.max_generate_length=700 \
  environment.env_class=gsm8k \
  $@
