"""A model that does nothing, to measure everything else."""

from hocket.algos.no_op_model.no_op_model import NoOpModel, NoOpModelClass

__all__ = ["NoOpModel", "NoOpModelClass"]
