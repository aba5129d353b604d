"""A loop like that of the tutorial on asynchronous training: generation runs one batch ahead of training.

Its calls and their order are the tutorial's; the text is ours.
"""

import asyncio

from skyasync.interop.skyrl import (
    BasePPOExp,
    RayPPOTrainer,
    ResumeMode,
    Timer,
    get_sampling_params_for_backend,
    prepare_generator_input,
)


class OneStepOffTrainer(RayPPOTrainer):
    async def train(self):
        assert not self.colocate_all, "generation and training run at the same time"
        self.global_step = 0
        if self.resume_mode != ResumeMode.NONE:
            self.global_step, _ = self.load_checkpoints()
        self.init_weight_sync_state()
        await self.dispatch.save_weights_for_sampler()
        if self.cfg.trainer.eval_interval > 0 and self.cfg.trainer.eval_before_train:
            with Timer("eval", self.all_timings):
                self.tracker.log(await self.eval(), step=self.global_step)

        first_epoch = self.global_step // len(self.train_dataloader)
        self.global_step += 1
        self._profiler_start()
        for epoch in range(first_epoch, self.cfg.trainer.epochs):
            buffer = asyncio.Queue(maxsize=1)
            self.sync_finished, self.generation_ack = asyncio.Event(), asyncio.Event()
            generating = asyncio.create_task(self._run_generate_loop(buffer))
            for index in range(len(self.train_dataloader)):
                with Timer("step", self.all_timings):
                    status = await self._run_training(buffer)
                    if index != len(self.train_dataloader) - 1:
                        await self.generation_ack.wait()
                    async with Timer("sync_weights", self.all_timings):
                        await self.dispatch.save_weights_for_sampler()
                    self.sync_finished.set()
                    self.generation_ack.clear()
                self._profiler_step()
                assert status
                self.all_metrics.update({"trainer/epoch": epoch, "trainer/global_step": self.global_step})
                self.tracker.log(self.all_metrics, step=self.global_step)
                self.all_metrics = {}
                if self.cfg.trainer.eval_interval > 0 and (
                    self.global_step % self.cfg.trainer.eval_interval == 0
                    or self.global_step == self.total_training_steps
                ):
                    self.all_metrics.update(await self.eval())
                if self.cfg.trainer.ckpt_interval > 0 and self.global_step % self.cfg.trainer.ckpt_interval == 0:
                    with Timer("save_checkpoints", self.all_timings):
                        self.save_checkpoints()
                if self.cfg.trainer.hf_save_interval > 0:
                    self.save_models()
                self.tracker.log({"timing/" + k: v for k, v in self.all_timings.items()}, step=self.global_step)
                self.all_timings = {}
                self.global_step += 1
            if self.cfg.trainer.update_ref_every_epoch and self.ref_model is not None:
                raise NotImplementedError
            generating.cancel()
        self._profiler_stop()
        self.tracker.finish()

    async def _run_training(self, buffer):
        generator_output, uids = await buffer.get()
        self.tokenizer.decode(generator_output["response_ids"][0])
        training_input = self.convert_to_training_input(generator_output, uids)
        training_input = await asyncio.to_thread(self.fwd_logprobs_values_reward, training_input)
        if self.cfg.trainer.algorithm.use_kl_in_reward:
            training_input = self.apply_reward_kl_penalty(training_input)
        with Timer("compute_advantages_and_returns", self.all_timings):
            training_input = self.compute_advantages_and_returns(training_input)
            training_input.pop("rewards")
            training_input.metadata.pop("uids")
        if self.cfg.trainer.dump_data_batch:
            raise NotImplementedError
        return await asyncio.to_thread(self.train_critic_and_policy, training_input)

    async def _run_generate_loop(self, buffer):
        for number, prompts in enumerate(self.train_dataloader):
            prompts = self._remove_tail_data(prompts)
            generator_input, uids = prepare_generator_input(
                prompts,
                self.cfg.generator.n_samples_per_prompt,
                get_sampling_params_for_backend(
                    self.cfg.generator.inference_engine.backend, self.cfg.generator.sampling_params
                ),
                self.cfg.environment.env_class,
                "train",
                self.global_step,
            )
            async with Timer("generate", self.all_timings):
                generator_output = await self.generate(generator_input)
                generator_output, uids = self.postprocess_generator_output(generator_output, uids)
            await buffer.put((generator_output, uids))
            if buffer.full() and number != 0:
                self.generation_ack.set()
                await self.sync_finished.wait()
                self.sync_finished.clear()


class OneStepOffExp(BasePPOExp):
    def get_trainer(self, cfg, tracker, tokenizer, train_dataset, eval_dataset, inference_engine_client, generator,
                    colocate_pg):  # fmt: skip
        return OneStepOffTrainer(
            cfg=cfg, tracker=tracker, tokenizer=tokenizer, train_dataset=train_dataset, eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client, generator=generator, colocate_pg=colocate_pg,
        )  # fmt: skip
