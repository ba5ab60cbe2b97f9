"""Multi-token prediction against transformers' DeepSeek-V3 with its MtpModel: loss and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutput

from research.models.mtp import Prediction
from tests.models.hugging_face import TOLERANCE, worst
from tests.models.test_hugging_face_latent import OURS, SIZES, V3

WEIGHT = 0.7


class WithPrediction(DeepseekV3ForCausalLM):
    """Theirs is for generation: it is given the shifted tokens, and its losses are left to us."""

    def __init__(self, config):
        super().__init__(config)
        self.mtp = MtpModel(self, config.num_mtp_layers)

    def forward(self, input_ids, labels):
        rows, length = input_ids.shape
        h = self.model(input_ids).last_hidden_state
        logits = first = self.lm_head(h)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        depths = self.mtp.num_mtp_layers
        for k in range(1, depths + 1):
            shifted = F.pad(input_ids[:, k:], (0, k))
            positions = torch.arange(k, k + length).expand(rows, length)
            h = self.mtp.forward_layer(k - 1, h, positions, None, input_ids=shifted)
            logits = self.mtp._project_to_logits(h)[:, : length - k - 1]
            loss = loss + WEIGHT / depths * F.cross_entropy(logits.flatten(0, 1), labels[:, k + 1 :].flatten())
        return CausalLMOutput(loss=loss, logits=first)


def of_depth(depth, **changes):
    config = DeepseekV3Config(**SIZES, n_group=4, topk_group=2, routed_scaling_factor=2.5, num_mtp_layers=depth)
    ours = {**OURS, **V3, "model.expert_groups": 4, "model.top_groups": 2, "model.weight_scale": 2.5}
    return worst(WithPrediction, config, {**ours, "model.mtp_depth": depth, "model.mtp_weight": WEIGHT, **changes})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_depths(depth, recompute):
    assert of_depth(depth, **{"train.recompute": recompute}) < TOLERANCE


def test_planted_faults(monkeypatch):
    """The two inputs of a depth exchanged; a weight for each depth, not for their mean."""
    with monkeypatch.context() as patch:
        real = Prediction.forward
        patch.setattr(Prediction, "forward", lambda self, h, embedded, *rest: real(self, embedded, h, *rest))
        assert of_depth(1) > 1e-3
    assert of_depth(2, **{"model.mtp_weight": 2 * WEIGHT}) > 1e-3
