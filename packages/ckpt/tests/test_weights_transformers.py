"""transformers opens a followed folder, again and again, while versions arrive."""

import os
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="needs `uv sync --group transformers`")

from hocket.ckpt.torch import Publisher  # noqa: E402 - after the checks for both

NUM_VERSIONS = 24


def small_llama(*, tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_is_loaded_while_versions_arrive_is_of_one_version(tmp_path, tied):
    model = small_llama(tied=tied)
    model.config.save_pretrained(tmp_path / "base")
    uri, folder = tmp_path / "weights", tmp_path / "served"
    command = [
        sys.executable, "-m", "hocket.ckpt", "follow", str(uri), str(folder), "--name-prefix", "model.",
        "--model", str(tmp_path / "base"), "--interval", "0.01",
    ]  # fmt: skip
    states = []
    with (
        Publisher(uri, full_every=6) as publisher,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as follow,
    ):
        try:

            def publish():
                with torch.no_grad():
                    for parameter in model.parameters():  # every tensor changes in every version
                        parameter += 0.5
                states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
                publisher.publish({"model": model.state_dict()}, step=len(states))

            publish()
            assert follow.stdout.readline().startswith("step 1, whole")
            seen, deadline = [], time.monotonic() + 120
            while len(seen) == 0 or seen[-1] < NUM_VERSIONS:
                assert time.monotonic() < deadline
                # Not far ahead of the loaded ones, so that several versions are seen on a slow machine, too.
                if len(states) < min(NUM_VERSIONS, (seen or [1])[-1] + 4):
                    publish()
                loaded = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="bfloat16")
                held = loaded.state_dict()
                assert held.keys() == states[0].keys()
                same = [
                    number
                    for number, state in enumerate(states, start=1)
                    if all(torch.equal(held[name], tensor) for name, tensor in state.items())
                ]
                assert len(same) == 1, "the model is of no version"
                assert seen == [] or same[0] >= seen[-1]
                seen += same
                assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        finally:
            follow.terminate()
            follow.wait(20)
    assert len(set(seen)) > 3, "too few versions arrived while models were loaded"
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)
