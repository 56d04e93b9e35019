"""Full finetuning on packs of documents, on one device or many.

    PYTHONPATH=. tune run recipes/full_finetune.py --config configs/smollm2/135M_full.yaml
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/full_finetune.py --config <config>

Read it from top to bottom: `__init__` checks, `setup` opens, `train` is the loop, `save_checkpoint`
and `cleanup` end it. To change something, copy the file and edit it; docs/recipes.md walks through.
What matters for packing, in order:

1.  everything that can be wrong with the config is reported at once, before anything slow;
2.  the data set plans which documents lie in which pack: no copy, no padding, no mask;
3.  the attention backend is chosen once, for this model on this device;
4.  a step takes all its micro-batches first and counts their trained targets over all ranks, so
    that its loss is one sum over one count, however the documents were batched;
5.  each micro-batch gets its mask on the device, once for all layers;
6.  the position (epoch, packs consumed) is saved with the weights: a resumed run goes on there.
"""

import sys
from pathlib import Path

from torchtune_packing import quiet

quiet.silence_dependencies()  # before the imports below, which read its settings once

from omegaconf import DictConfig
from torchtune import config, training

from torchtune_packing.attention import install_attention
from torchtune_packing.training import checkpoint, model_setup, preflight
from torchtune_packing.training.data import Position, Step, TrainingData
from torchtune_packing.training.evaluate import evaluate
from torchtune_packing.training.example import ShownExample
from torchtune_packing.training.metrics import StepMeter
from torchtune_packing.training.report import check_finite, final_report, report_validation
from torchtune_packing.training.run import Run
from torchtune_packing.training.step import PackedForward, accumulate_gradients, update_weights
from torchtune_packing.training.stop import StopRequest


class FullFinetuneRecipe:
    """Finetunes all weights of a torchtune decoder on packed documents.

    Args:
        cfg: the config; `preflight.COMMON_KEYS` lists its keys, docs/recipes.md explains them.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.run = Run.start(cfg, preflight.COMMON_KEYS)
        self.position = Position()
        self.loss_before: float | None = None

    def setup(self) -> None:
        """Opens data, model, attention, optimizer and schedule, cheapest first."""
        cfg, run = self.cfg, self.run

        # Data: tokenize or open the store, plan the packs. Refuses what cannot be trained on.
        self.data = TrainingData(run)
        self.example = ShownExample(
            self.data.dataset_val, self.data.tokenizer, cfg.get("show_example", None)
        )

        # State of the run that this one goes on from, refused if data or model are others.
        saved: dict = {}
        if run.resumed_from is not None:
            saved, facts = checkpoint.read_state(run.resumed_from)
            preflight.check_resume(facts["fingerprint"], self.data.fingerprint, run.resumed_from)
            self.position = Position(**facts["position"])
            self.loss_before = facts["loss_before"]
            self.example.texts.update(facts["example"])

        # Model: built, compiled, sharded, filled; then the one choice of how its layers attend.
        self.checkpointer, weights = model_setup.load_base_weights(cfg, run.resumed_from)
        self.model = model_setup.build_model(cfg, run.ranks, run.dtype, weights)
        self.attention = install_attention(
            self.model, cfg.get("attention_backend", "auto"), device=run.device, dtype=run.dtype
        )
        self.forward = PackedForward(
            self.model, self.attention, offloading=model_setup.offloading_context(self.model, cfg)
        )

        # Optimizer, and a schedule over the steps that will really be made.
        self.optimizer = model_setup.build_optimizer(
            cfg.optimizer, self.model, run.ranks, saved.get("optimizer")
        )
        self.scheduler = model_setup.build_scheduler(
            cfg.get("lr_scheduler", None),
            self.optimizer,
            num_training_steps=self.data.total_steps,
            state=saved.get("lr_scheduler"),
        )
        if saved:
            model_setup.restore_random_state(saved["random"], run.ranks)
        self.profiler = model_setup.build_profiler(cfg.get("profiler", None))
        run.claim_output_dir()  # nothing refuses the run from here on
        run.say(self.attention.reason)
        run.say(self.data.describe())

    def train(self) -> int:
        """Trains to the end, or until asked to stop; returns the exit code."""
        run, stop, folder = self.run, StopRequest(), None
        if self.position.step == 0:
            self.loss_before = self.validate()
            self.example.write("before training", self.forward, run.ranks)
        self.meter = StepMeter(
            run.ranks,
            total_steps=self.data.total_steps,
            done_steps=self.position.step,
            log_every_n_steps=self.cfg.get("log_every_n_steps", 1),
        )
        self.forward.meter = self.meter
        self.profiler.start()
        for step in self.meter.timed(self.data.steps(self.position)):
            self.train_step(step)
            self.profiler.step()
            self.position = step.position
            folder = None
            if run.should_stop(stop):
                self.profiler.stop()
                self.meter.close()
                return run.stopped(self.save_checkpoint(), stop, self.position.step)
            if run.due("save_every_n_steps", self.position.step):
                folder = self.save_checkpoint()
            last = self.position.step == self.data.total_steps  # validated below
            if run.due("run_val_every_n_steps", self.position.step) and not last:
                report_validation(run, self.validate(), self.position.step)
        self.profiler.stop()
        self.meter.close()
        folder = folder or self.save_checkpoint()
        loss_after = self.validate()
        self.example.write("after training", self.forward, run.ranks)
        losses = (self.loss_before, loss_after)
        return final_report(run, self.meter, losses, self.example, folder)

    def train_step(self, step: Step) -> None:
        """One optimizer step: its micro-batches one after the other, then one update.

        `self.forward.loss` makes the mask of a micro-batch on the device and gives the summed loss
        of its trained rows; put your own in its place to change the loss.
        """
        loss = accumulate_gradients(step, self.forward.loss, ranks=self.run.ranks, meter=self.meter)
        check_finite(loss, step.position, self.data)
        values = {"loss": loss, "lr": float(training.get_lr(self.optimizer))}
        with self.meter.phase("optimizer"):
            values |= update_weights(
                self.model,
                self.optimizer,
                self.scheduler,
                has_targets=step.counts.trained > 0,
                clip_grad_norm=self.cfg.get("clip_grad_norm", None),
            )
        self.meter.finish_step(self.run, step, values)

    def validate(self) -> float | None:
        """Loss over every document of the validation set, once; None without a set."""
        reduction = self.cfg.get("loss_reduction", "token")
        return evaluate(self.forward, self.data.validation_loader(), self.run.ranks, reduction)

    def save_checkpoint(self) -> Path:
        """Saves weights, optimizer, schedule, random states and position; all ranks call it."""
        weights = model_setup.gather_weights(self.model, self.run.ranks)
        tensors = model_setup.training_tensors(
            self.model, self.optimizer, self.scheduler, self.run.ranks
        )
        facts = {
            "position": self.position.as_dict(),
            "fingerprint": self.data.fingerprint,
            "loss_before": self.loss_before,
            "example": self.example.texts,
            "config": self.run.config_as_dict(),
        }

        def fill(folder: Path) -> None:
            checkpoint.write_weights(self.checkpointer, folder, {training.MODEL_KEY: weights})
            checkpoint.write_state(folder, tensors, facts)

        return self.run.write_checkpoint(self.position.step, fill)

    def cleanup(self) -> None:
        """Closes the logger and leaves the process group."""
        self.run.close()


@config.parse
def main(cfg: DictConfig) -> int:
    """Runs the recipe with the config and the overrides of the command line."""
    with preflight.explained():
        recipe = FullFinetuneRecipe(cfg)
        recipe.setup()
    code = recipe.train()
    recipe.cleanup()
    return code


if __name__ == "__main__":
    preflight.require_config_file(sys.argv)
    sys.exit(main())
