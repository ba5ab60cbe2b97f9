import pytest

from research.report.states import states


def test_the_figure_of_the_paper():
    """ZeRO, figure 1: 7.5 B parameters over 64 ranks, in GB."""
    table = states(7.5e9, ranks=64)
    assert table.sum(axis=1).tolist() == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert table.loc["zero=2"].to_dict() == pytest.approx(
        {"parameters": 15.0, "gradients": 0.234, "optimizer": 1.41}, abs=0.01
    )
