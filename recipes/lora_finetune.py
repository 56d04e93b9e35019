"""LoRA, QLoRA and DoRA finetuning on packs of documents, on one device or many.

    PYTHONPATH=. tune run recipes/lora_finetune.py --config configs/smollm2/135M_lora.yaml
    PYTHONPATH=. tune run --nproc_per_node 2 recipes/lora_finetune.py --config <config>

The model builder of the config decides which of the three it is: a `lora_` builder, the same with
`use_dora: True`, or a `qlora_` builder (frozen weights in NF4). Everything about packing is as in
full_finetune.py. What differs: only the adapter is trained and saved, in torchtune's format (to go
on from) and in PEFT's (to use elsewhere); `save_merged_weights: True` adds a plain model folder.
"""

import sys
from pathlib import Path

from torchtune_packing import quiet

quiet.silence_dependencies()  # before the imports below, which read its settings once

from omegaconf import DictConfig
from torchtune import config, training

from torchtune_packing.attention import install_attention
from torchtune_packing.training import adapter, checkpoint, model_setup, preflight
from torchtune_packing.training.data import Position, Step, TrainingData
from torchtune_packing.training.evaluate import evaluate
from torchtune_packing.training.example import ShownExample
from torchtune_packing.training.metrics import StepMeter
from torchtune_packing.training.report import check_finite, final_report, report_validation
from torchtune_packing.training.run import Run
from torchtune_packing.training.step import PackedForward, accumulate_gradients, update_weights
from torchtune_packing.training.stop import StopRequest


class LoRAFinetuneRecipe:
    """Trains the adapter of a torchtune LoRA model on packed documents.

    Args:
        cfg: the config; keys as in full_finetune.py, with `preflight.LORA_KEYS` added.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.run = Run.start(cfg, preflight.COMMON_KEYS | preflight.LORA_KEYS)
        self.position = Position()
        self.loss_before: float | None = None

    def setup(self) -> None:
        """Opens data, base model, adapter, attention, optimizer and schedule, cheapest first."""
        cfg, run = self.cfg, self.run
        self.data = TrainingData(run)
        self.example = ShownExample(
            self.data.dataset_val, self.data.tokenizer, cfg.get("show_example", None)
        )

        # A checkpoint of this recipe holds the adapter; the base always comes from its own folder.
        saved, saved_adapter = {}, None
        if run.resumed_from is not None:
            saved, facts = checkpoint.read_state(run.resumed_from)
            preflight.check_resume(facts["fingerprint"], self.fingerprint(), run.resumed_from)
            saved_adapter = adapter.read_adapter(run.resumed_from)
            self.position = Position(**facts["position"])
            self.loss_before = facts["loss_before"]
            self.example.texts.update(facts["example"])
        self.checkpointer, weights = model_setup.load_base_weights(cfg)
        self.model = model_setup.build_model(
            cfg, run.ranks, run.dtype, weights, adapter=saved_adapter, seed=run.seed
        )
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        run.say(f"training {trained:,} adapter parameters; the base model stays as it is")

        # From here on as in full finetuning: attention once, then only rows that have a target.
        backend = cfg.get("attention_backend", "auto")
        self.attention = install_attention(self.model, backend, device=run.device, dtype=run.dtype)
        offloading = model_setup.offloading_context(self.model, cfg)
        self.forward = PackedForward(self.model, self.attention, offloading=offloading)
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

    def fingerprint(self) -> dict:
        """What a resumed run must share: the data, and the shape of the adapter."""
        shape = {
            f"model.{key}": self.run.config_as_dict()["model"].get(key)
            for key in (
                "lora_attn_modules",
                "apply_lora_to_mlp",
                "lora_rank",
                "lora_alpha",
                "use_dora",
            )
        }
        return self.data.fingerprint | shape

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
        if self.cfg.get("save_merged_weights", False):
            self.save_merged(folder / "merged")
        loss_after = self.validate()
        self.example.write("after training", self.forward, run.ranks)
        losses = (self.loss_before, loss_after)
        return final_report(run, self.meter, losses, self.example, folder)

    def train_step(self, step: Step) -> None:
        """One optimizer step: its micro-batches one after the other, then one update."""
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
        """Saves the adapter in both formats, optimizer, schedule, random states and position."""
        tensors = model_setup.training_tensors(
            self.model, self.optimizer, self.scheduler, self.run.ranks
        )
        weights = model_setup.gather_weights(self.model, self.run.ranks, adapter=True)
        facts = {
            "position": self.position.as_dict(),
            "fingerprint": self.fingerprint(),
            "loss_before": self.loss_before,
            "example": self.example.texts,
            "config": self.run.config_as_dict(),
        }

        def fill(folder: Path) -> None:
            adapter.write_adapter(self.checkpointer, folder, weights, self.cfg.model)
            checkpoint.write_state(folder, tensors, facts)

        return self.run.write_checkpoint(self.position.step, fill)

    def save_merged(self, folder: Path) -> None:
        """Writes base and adapter as one model folder, for tools that know nothing of adapters."""
        weights = model_setup.gather_weights(self.model, self.run.ranks)
        if self.run.ranks.is_first:
            folder.mkdir(exist_ok=True)
            adapter.write_merged(self.checkpointer, folder, weights, self.cfg.model)
            self.run.say(f"merged weights: {folder}")
        self.run.ranks.barrier()

    def cleanup(self) -> None:
        """Closes the logger and leaves the process group."""
        self.run.close()


@config.parse
def main(cfg: DictConfig) -> int:
    """Runs the recipe with the config and the overrides of the command line."""
    with preflight.explained():
        recipe = LoRAFinetuneRecipe(cfg)
        recipe.setup()
    code = recipe.train()
    recipe.cleanup()
    return code


if __name__ == "__main__":
    preflight.require_config_file(sys.argv)
    sys.exit(main())
