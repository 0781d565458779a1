"""`config.frisket_invariant` of transformers: the log-probabilities of sampling are those of a training forward.

The other layers of a model are torch's, whose matrix products depend on the batch. Here they are row by row.
"""

import pytest
from support.native.compiler import needs_compiler

from frisket.dsl.errors import ParameterError

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytestmark = [needs_compiler, pytest.mark.usefixtures("automatic")]
PROMPT, NEW = 70, 6


class RowLinear(torch.nn.Linear):
    """Each entry of the result is one sum, whatever the batch is."""

    def forward(self, x):
        return (x[..., None, :] * self.weight).sum(-1)


def model(**fields):
    import transformers

    import frisket.integrations.transformers

    frisket.integrations.transformers.register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 100, "pad_token_id": 0, "eos_token_id": None}
    config = transformers.LlamaConfig(**sizes, **fields)
    made = transformers.LlamaForCausalLM._from_config(config, attn_implementation="frisket").eval()
    for module in made.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = RowLinear
    return made


def test_sampling_and_training_have_equal_log_probabilities():
    llama, ids = model(frisket_invariant=True), torch.randint(1, 100, (3, PROMPT))
    with torch.no_grad():
        options = {"do_sample": True, "output_logits": True, "return_dict_in_generate": True}
        sampled = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **options)
        logits = llama(sampled.sequences).logits
        alone = llama(sampled.sequences[1:2]).logits
    steps = torch.stack(sampled.logits, 1).log_softmax(-1)
    assert torch.equal(steps, logits[:, PROMPT - 1 : -1].log_softmax(-1))
    assert torch.equal(alone, logits[1:2])


def test_invariant_field_takes_a_bool_alone():
    llama, ids = model(frisket_invariant=1), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ParameterError, match=r"config.frisket_invariant is 1; it is True or False"):
        llama(ids)
