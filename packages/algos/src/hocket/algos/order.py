"""Relative order of the methods, so that the order of the user's list does not matter."""

from enum import IntEnum


class Order(IntEnum):
    """The `order` of each method that changes something that another method changes, too.

    Lower numbers run earlier at the events that change something, and later at the `AFTER_*` events that
    restore it. Methods that are not listed have order 0.
    """

    SELECTIVE_BACKPROP = -100  # chooses samples as the loader gave them
    SEQUENCE_PACKING = -95
    SEQ_LENGTH_WARMUP = -90
    PROGRESSIVE_RESIZING = -80  # shapes first, so that the rest has fewer pixels to change
    COL_OUT = -75
    AUG_MIX = -72
    RAND_AUGMENT = -71
    CUT_OUT = -70
    Z_LOSS = -65  # later at AFTER_LOSS than the next three, which restore the targets that it reads
    CUT_MIX = -60
    MIX_UP = -50
    LABEL_SMOOTHING = -40
    SAM = -20
    SQUEEZE_EXCITE = 10  # treats the model's own convolutions; later methods treat the layers it adds
    BLUR_POOL = 11  # keeps each convolution as a submodule, which the next two may change
    FACTORIZE = 12
    WEIGHT_STANDARDIZATION = 13  # parametrizes the convolutions that the others leave
    QLORA = 20  # surgery on linear layers comes after surgery that replaces or adds them
    LORA = 21
    QAT = 22
    FLOAT8 = 23
    GRADIENT_CLIPPING = 50
    LAYER_FREEZING = 55  # earlier at AFTER_TRAIN_BATCH: drops gradients before the rest is clipped
    SCHEDULE_FREE = 60
    SWA = 70
    EMA = 80
    FUSED_LAYERNORM = 90  # after surgery that puts norms in
    LOW_PRECISION_NORM = 100  # treats the norms that other surgery leaves
    CHANNELS_LAST = 110  # converts the weights that surgery adds, too
