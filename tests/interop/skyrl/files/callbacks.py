"""Callbacks with three arguments, one of them async, that request a checkpoint and an evaluation."""

import asyncio

from skyasync.interop.skyrl import BasePPOExp, CallbackInput, RayPPOTrainer, TrainingCallback, TrainingControl

SEEN = []


class ResourceMonitor(TrainingCallback):
    def on_train_start(self, trainer, callback_input: CallbackInput, control: TrainingControl):
        SEEN.append(("start", callback_input.global_step))

    def on_epoch_start(self, trainer, callback_input, control):
        SEEN.append(("epoch", callback_input.epoch))

    def on_step_end(self, trainer, callback_input, control):
        SEEN.append(("step", callback_input.global_step))
        assert callback_input.metrics and callback_input.total_steps == 2
        control.should_save = callback_input.global_step == 1
        control.should_evaluate = callback_input.global_step == 1

    def on_eval_end(self, trainer, callback_input, control):
        SEEN.append(("eval", callback_input.global_step))

    def on_save(self, trainer, callback_input, control):
        SEEN.append(("save", callback_input.ckpt_path))

    def on_log(self, trainer, callback_input, control):
        callback_input.logs["mine/logged"] = 1.0

    def on_train_end(self, trainer, callback_input, control):
        SEEN.append(("end", callback_input.global_step))


class Later(TrainingCallback):
    async def on_step_end(self, trainer, callback_input, control):
        await asyncio.sleep(0)
        SEEN.append(("later", callback_input.global_step))

    async def on_log(self, trainer, callback_input, control):
        await asyncio.sleep(0)
        callback_input.logs["mine/later"] = 2.0


class WatchedExp(BasePPOExp):
    def get_trainer(self, *args, **kwargs):
        trainer = RayPPOTrainer(*args, callbacks=[ResourceMonitor()], **kwargs)
        trainer.add_callback(Later())
        return trainer
