"""Models that take packed rows on a GPU, without a policy around them."""

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spmd_rl import attention
from spmd_rl.model import LogprobModel


def packed_model(lm):
    """The wrapper around a model, with packed attention."""
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
    lm.set_attn_implementation(attention.NAME)
    return LogprobModel(lm, 0.01)
