"""Evaluation on two data sets, one each epoch and one every 8 batches, and of both after training."""

from data import make_loader, make_model

from hocket.trainer import Evaluator, Trainer

if __name__ == "__main__":
    near = Evaluator(label="near", dataloader=make_loader(128, seed=1))
    often = Evaluator(label="often", dataloader=make_loader(64, seed=2), eval_interval="8ba")
    with Trainer(
        model=make_model(),
        train_dataloader=make_loader(),
        eval_dataloader=[near, often],
        max_duration="3ep",
        seed=1,
    ) as trainer:
        trainer.fit()
        trainer.eval()
        for label, metrics in trainer.state.eval_metrics.items():
            print(label, {name: round(float(metric.compute()), 3) for name, metric in metrics.items()})
