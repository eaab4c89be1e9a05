"""transformers' Trainer on our tasks: its loop, optimizer and checkpoints, our loss and score."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from matsmerge.errors import NonFiniteError
from matsmerge.lab.training.example_order import ExampleOrder
from matsmerge.lab.training.trainee import Trainee
from matsmerge.lab.training.training_options import TrainingOptions
from matsmerge.optional_import import import_optional
from matsmerge.progress import Progress

_WEIGHTS = "weights.safetensors"
_SCORE = "eval_score"
_SMALLER = "; continue from the last checkpoint, if there is one, with --resume and a smaller --lr"


def make_trainer(
    trainee: Trainee,
    options: TrainingOptions,
    learning_rate: float,
    folder: Path,
    progress: Progress,
    device: str | None,
) -> Any:
    """A Trainer for the trainee, with its checkpoints in a folder."""
    transformers = import_optional("transformers")
    import_optional("accelerate")
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": options.batch_size,
        "gradient_accumulation_steps": options.accumulate,
        "learning_rate": learning_rate,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "logging_strategy": "steps",
        "logging_steps": options.eval_every,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": options.eval_every,
        "save_total_limit": 1,
        "bf16": options.bf16,
        "seed": options.seed,
        "data_seed": options.seed,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "critical",
        # Said outright where there is nothing else, which bf16 wants.
        "use_cpu": device == "cpu"
        or not (torch.cuda.is_available() or torch.backends.mps.is_available()),
    }
    if options.steps is None:
        settings["num_train_epochs"] = options.epochs
    else:
        settings["max_steps"] = options.steps
    if options.validate_:
        settings |= {
            "eval_strategy": "steps",
            "eval_steps": options.eval_every,
            "load_best_model_at_end": True,
            "metric_for_best_model": _SCORE,
            "greater_is_better": True,
        }
    arguments = transformers.TrainingArguments(**settings)
    arguments._n_gpu = min(1, arguments.n_gpu)  # our batches are not to be spread
    watch = _watch(transformers.TrainerCallback, options, progress)
    trainer = _trainer_class(transformers.Trainer)(trainee, options, watch, arguments)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def scores_of(history: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The score of each checkpoint so far, from the history that Trainer logs."""
    return {int(entry["step"]): float(entry[_SCORE]) for entry in history if _SCORE in entry}


def should_stop(history: Sequence[Mapping[str, Any]], patience: int) -> bool:
    """Have the last so many checkpoints brought no improvement?"""
    scores = list(scores_of(history).values())
    return bool(scores) and len(scores) - 1 - scores.index(max(scores)) >= patience


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load the trained values of a checkpoint into a model."""
    stored = load_file(checkpoint / _WEIGHTS)
    current = _changing(model)
    assert stored.keys() == current.keys()
    with torch.no_grad():
        for name, values in current.items():
            values.copy_(stored[name])


def _changing(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: parameters that take gradients, and buffers such as running means.

    Not `state_dict`, which names tied parameters twice.
    """
    changing = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    buffers = dict(model.named_buffers())
    for name in model.state_dict():
        if name in buffers and buffers[name].is_floating_point():
            changing[name] = buffers[name]
    return changing


def _trainer_class(base: Any) -> Any:
    class TaskTrainer(base):  # type: ignore[misc]
        """A Trainer whose inputs are a `ShownBatch`."""

        loss_is_scaled_for_ga = False  # a mean over the batch, for Trainer to divide

        def __init__(
            self, trainee: Trainee, options: TrainingOptions, watch: Any, arguments: Any
        ) -> None:
            self.trainee, self.options, self.watch = trainee, options, watch
            super().__init__(
                model=trainee.model,
                args=arguments,
                data_collator=trainee.collate,
                train_dataset=trainee.shown,
                eval_dataset=[None] if options.validate_ else None,  # `evaluate` has its own
                callbacks=[watch],
            )
            self.model_accepts_loss_kwargs = False  # how earlier versions ask whether to divide

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:  # noqa: ARG002
            batch = inputs["batch"]
            with self.accelerator.autocast():
                losses = self.trainee.losses(batch, self.options.loss)
            if not bool(losses.isfinite().all()):
                raise NonFiniteError(self._diverged(batch, losses))
            mean = losses.mean()
            self.watch.loss = float(mean.detach())
            return mean

        def _diverged(self, batch: Any, losses: Tensor) -> str:
            rows = [
                f"{self.trainee.tasks[shown.task].name} row {shown.example.number + 1}"
                for shown, loss in zip(batch.shown, losses, strict=True)
                if not math.isfinite(loss)
            ]
            return (
                f"batch {self.state.global_step + 1}: the loss is not finite for {len(rows)} of "
                f"{len(losses)} examples, such as {rows[0]}{_SMALLER}"
            )

        def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
            options = self.options
            with self.accelerator.autocast():
                scores = {
                    one.name: one.score(options.batch_size, options.loss)
                    for one in self.trainee.tasks
                }
            metrics = {f"score of {name}": value for name, value in scores.items()}
            metrics[_SCORE] = sum(scores.values()) / len(scores)
            self.log(metrics)
            control: Any = getattr(self, "control")  # noqa: B009
            self.control = self.callback_handler.on_evaluate(
                self.args, self.state, control, metrics
            )
            return metrics

        def floating_point_ops(self, inputs: Any) -> int:  # noqa: ARG002
            return 0

        def _get_train_sampler(self, *_: Any) -> ExampleOrder:
            shown = self.trainee.shown
            return ExampleOrder(
                len(shown),
                self.options.seed,
                batch_size=self.options.batch_size,
                lengths=[s.example.length for s in shown] if self.options.group_by_length else None,
                groups=[s.task for s in shown] if self.options.equal else None,
            )

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:  # noqa: ARG002
            # Under the model's own names, which `save_pretrained` may change.
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            changing = {n: t.cpu().contiguous() for n, t in _changing(self.model).items()}
            for name, values in changing.items():
                if not bool(values.isfinite().all()):
                    raise NonFiniteError(
                        f"batch {self.state.global_step}: '{name}' is not finite any more{_SMALLER}"
                    )
            save_file(changing, folder / _WEIGHTS)

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            load_weights(model or self.model, Path(resume_from_checkpoint))

        def _load_best_model(self) -> None:
            # By its name alone: the folder may have moved since.
            name = Path(self.state.best_model_checkpoint).name
            load_weights(self.model, Path(self.args.output_dir) / name)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            # The rate now asked for, not the one stored.
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] = self.args.learning_rate
            self.lr_scheduler.base_lrs = [
                self.args.learning_rate for _ in self.lr_scheduler.base_lrs
            ]

    return TaskTrainer


def _watch(base: Any, options: TrainingOptions, progress: Progress) -> Any:
    class Watch(base):  # type: ignore[misc]
        """Stops training early, and reports its progress."""

        loss = math.nan  # of the last batch
        best = ""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            progress.stage("training", state.max_steps, "batches", state.global_step)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            progress.advance(1, f"loss {self.loss:.3f}{self.best}")

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            # From what is stored, so that a run that continues counts on.
            if should_stop(state.log_history, options.patience):
                control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            scores = list(scores_of(state.log_history).values())
            if scores and scores[-1] > max(scores[:-1], default=-math.inf):
                self.best = f", best {scores[-1]:.4f} at {state.global_step}"

    return Watch()
