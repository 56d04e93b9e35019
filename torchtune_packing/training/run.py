"""What a recipe stands on before it opens data or model: processes, seed, folders, its voice."""

from __future__ import annotations

import os
import random
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, utils

from torchtune_packing.training import config_values, preflight
from torchtune_packing.training.checkpoint import RunCheckpoints, read_facts
from torchtune_packing.training.parallel import Ranks
from torchtune_packing.training.stop import StopRequest

__all__ = ["Run"]


@dataclass
class Run:
    """The surroundings of one training run, the same for every recipe.

    Attributes:
        cfg: the config of the run.
        ranks: its processes, with this one's device.
        dtype: of weights and computation.
        seed: of order and weights; the same on all ranks.
        checkpoints: the run's checkpoint folders.
        resumed_from: the checkpoint that this run goes on from, or None.
        limits: positions and vocabulary of the model.
    """

    cfg: DictConfig
    ranks: Ranks
    dtype: torch.dtype
    seed: int
    checkpoints: RunCheckpoints
    resumed_from: Path | None
    limits: preflight.ModelLimits
    _logger: Any = field(default=None, repr=False)

    @classmethod
    def start(cls, cfg: DictConfig, known_keys: Iterable[str]) -> Run:
        """Checks the config, joins the other processes and fixes the seed.

        Args:
            cfg: the config of a recipe.
            known_keys: the keys that the recipe knows; any other is refused.

        Raises:
            ValueError: with everything that is wrong with the config.
        """
        for key, node in cfg.items():
            # On the command line, torchtune reads dataset_val=null as dataset_val._component_=null.
            if isinstance(node, DictConfig) and node.get("_component_", "") is None:
                cfg[key] = None
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        limits = preflight.check_config(cfg, known_keys, world_size)
        ranks = Ranks.start(utils.get_device(cfg.device))
        if ranks.world_size > 1 and ranks.device.type == "cpu":
            # The launcher gives each process one thread; share the cores out instead.
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // _local_world_size()))
        checkpoints = RunCheckpoints(
            cfg.output_dir, keep_last_n=cfg.get("keep_last_n_checkpoints", None)
        )
        resuming = bool(cfg.get("resume_from_checkpoint", False))
        found = ranks.from_first(checkpoints.latest()) if resuming else None
        seed = cfg.get("seed", None)
        if seed is None and found is not None:  # drawn at random when the run began
            seed = read_facts(found)["fingerprint"]["seed"]
        seed = ranks.from_first(torch.seed() % 2**31 if seed is None else int(seed))
        # The rank is added so that dropout differs between ranks; order and adapters take run.seed.
        for set_seed in (torch.manual_seed, random.seed, np.random.seed):
            set_seed(seed + ranks.rank)
        run = cls(
            cfg=cfg,
            ranks=ranks,
            dtype=config_values.resolve_dtype(cfg.dtype, ranks.device),
            seed=seed,
            checkpoints=checkpoints,
            resumed_from=found,
            limits=limits,
        )
        if run.dtype == torch.bfloat16 and not config_values.computes_bf16(ranks.device):
            run.say(
                "this CPU has no bf16 instructions and emulates them; dtype=fp32 is faster here"
            )
        return run

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.ranks.device

    @property
    def accumulation(self) -> int:
        """Micro-steps per optimizer step on each rank."""
        return config_values.accumulation_steps(self.cfg, self.ranks.world_size)

    def claim_output_dir(self) -> None:
        """Takes the run's folder and opens its logger; called when nothing can refuse the run.

        Checkpoints of an earlier run go now if ``overwrite_output_dir`` allows it (else they were
        refused at the start), so a run that is refused has cost nobody anything.

        Raises:
            ValueError: the folder cannot be written, or another run has it.
        """
        if self.ranks.is_first:
            self.checkpoints.claim()
            if not self.cfg.get("resume_from_checkpoint", False):
                self.checkpoints.clear()
            if self.cfg.get("metric_logger", None):
                self._logger = config.instantiate(self.cfg.metric_logger)
                self._logger.log_config(self.cfg)
                sys.stdout.flush()  # some say where they write

    def due(self, key: str, step: int) -> bool:
        """Whether something that the config wants every n steps (``key``) is due after a step."""
        every = self.cfg.get(key, None)
        return every is not None and step % every == 0

    def say(self, line: str) -> None:
        """Prints a line on the first rank."""
        if self.ranks.is_first:
            print(line, flush=True)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Hands numbers to the metric logger, on the first rank."""
        if self._logger is not None:
            self._logger.log_dict(values, step=step)

    def resume_command(self) -> str:
        """The shell command that goes on from the newest checkpoint of this run."""
        script = sys.argv[0]
        if not script.endswith(".py"):  # tune names the recipe as a module: recipes.full_finetune
            script = script.replace(".", "/") + ".py"
        path = Path(script)
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        overrides = [
            shlex.quote(a) for a in sys.argv[1:] if not a.startswith("resume_from_checkpoint=")
        ]
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.world_size))
        many = f"--nproc_per_node {local} " if self.ranks.world_size > 1 else ""
        if local < self.ranks.world_size:
            # How the nodes find each other is known to the launcher alone.
            many = f"--nnodes {self.ranks.world_size // local} <rendezvous options> {many}"
        arguments = " ".join([*overrides, "resume_from_checkpoint=True"])
        return f"PYTHONPATH=. tune run {many}{shown} {arguments}"

    def write_checkpoint(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Writes a checkpoint on the first rank while the others wait; returns its folder."""
        folder = self.checkpoints.write(step, fill) if self.ranks.is_first else None
        return self.ranks.from_first(folder)  # type: ignore[return-value]

    def should_stop(self, stop: StopRequest) -> bool:
        """Whether any process of the run was asked to stop; to be called on every rank."""
        return self.ranks.sum(bool(stop))[0] > 0

    def stopped(self, checkpoint: Path, stop: StopRequest, step: int) -> int:
        """Says where a run that was asked to stop has been saved; returns its exit code."""
        self.say(f"stopped after step {step}; checkpoint: {checkpoint}")
        self.say(f"to go on: {self.resume_command()}")
        return self.ranks.from_first(stop.exit_code)

    def config_as_dict(self) -> dict[str, Any]:
        """The config with its references resolved, for a checkpoint."""
        return OmegaConf.to_container(self.cfg, resolve=True)

    def close(self) -> None:
        """Closes the logger, gives the folder free and leaves the process group."""
        if self._logger is not None:
            self._logger.close()
        self.checkpoints.release()
        self.ranks.stop()


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
