"""A synchronous loop that calls every step without ``await`` in the event loop's own thread."""

from skyasync.interop.skyrl import BasePPOExp, RayPPOTrainer, prepare_generator_input


class PlainTrainer(RayPPOTrainer):
    async def train(self):
        self.init_weight_sync_state()
        self.global_step, _ = self.load_checkpoints()
        await self.dispatch.save_weights_for_sampler()
        for _ in range(self.cfg.trainer.epochs):
            for prompts in self.train_dataloader:
                if self.global_step == self.total_training_steps:
                    return
                self.global_step += 1
                generator_input, uids = prepare_generator_input(
                    prompts, self.cfg.generator.n_samples_per_prompt, {"temperature": 1.0, "max_tokens": 4},
                    self.cfg.environment.env_class, "train", self.global_step,
                )  # fmt: skip
                generator_output = await self.generate(generator_input)
                generator_output, uids = self.postprocess_generator_output(generator_output, uids)
                data = self.convert_to_training_input(generator_output, uids)
                data = self.fwd_logprobs_values_reward(data)
                data = self.compute_advantages_and_returns(data)
                status = self.train_critic_and_policy(data)
                assert status["policy/grad_norm"] >= 0
                self.folder = self.save_checkpoints()
                await self.dispatch.save_weights_for_sampler()
                self.tracker.log(self.all_metrics, step=self.global_step, commit=True)
                self.all_metrics = {}


class PlainExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        return PlainTrainer(*args, **kwargs)
