"""What a rank keeps of each parameter under the stages of ZeRO."""

import pandas as pd


def states(parameters: float, ranks: int, weight: int = 2, grad: int = 2, optimizer: int = 12) -> pd.DataFrame:
    """GB (10^9 bytes) that each of `ranks` keeps, a line for each stage: with so many bytes of a parameter for its
    weight, its gradient, and its optimizer's state (float32 master and two moments: 12). Rajbhandari et al. 2020,
    section 5."""
    cuts = {stage: [ranks if stage >= first else 1 for first in (3, 2, 1)] for stage in range(4)}
    sizes = (weight, grad, optimizer)
    data = [[parameters * size / cut / 1e9 for size, cut in zip(sizes, stage, strict=True)] for stage in cuts.values()]
    index = pd.Index([f"zero={stage}" for stage in cuts], name="stage")
    return pd.DataFrame(data, index=index, columns=["parameters", "gradients", "optimizer"])
